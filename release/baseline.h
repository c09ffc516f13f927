// What the C++ library of the baseline (Debian 11) does not have of the newer one whose headers are used. Included first
// in every library of a wheel, where each has its own.
#pragma once
#include <new>
#include <sstream>

namespace std {
[[gnu::weak, noreturn]] void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}
}  // namespace std

#if _GLIBCXX_USE_CXX11_ABI
template std::string std::basic_stringbuf<char>::str() &&;
#endif
