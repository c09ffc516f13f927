// The bytes of its storage that a tensor reaches.
#pragma once
#include <ATen/core/Tensor.h>

namespace lowtide::sim {

struct Span {
  const char* start;
  size_t nbytes;
};

// From the first to the last element, gaps between strides included: what two interleaved views share is not told apart.
inline Span span_of(const at::Tensor& t, const char* first_element) {
  if (t.numel() == 0) return {first_element, 0};
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  return {first_element, static_cast<size_t>(last + 1) * t.element_size()};
}

}  // namespace lowtide::sim
