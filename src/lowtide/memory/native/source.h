// A source: files of somebody else's, a checkpoint's, that ranges are read from in place. Nothing leaves to it.
//
// Note [Places in a source]: a tensor lies in its file at any byte, in its own type. To ranges a source is as any tier: whole
// pages at offsets. So each tensor has a place, page-aligned and as long as its range, which is nowhere but in this table;
// a read looks up the file's bytes behind it, and converts them where the range is of another type.
#pragma once
#include "lowtide.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>

namespace lowtide {

constexpr int kSourceCut = 10005;      // not an errno: a source's file ends before the bytes do
constexpr int kSourceChanged = 10006;  // not an errno: a source's file is not the one that was opened

// Which type the file has, where the range has float32, and which the range has, where the file has float32.
enum class Conversion : int32_t { kNone = 0, kFromBFloat16 = 1, kFromHalf = 2, kToBFloat16 = 3, kToHalf = 4 };

// What is in a place of a source.
struct InFile {
  int64_t begin = 0;  // in the file
  int64_t bytes = 0;  // in memory: converted
  Conversion conversion = Conversion::kNone;
};

class Source {
 public:
  // `direct`: reads go past the page cache, so they begin and end at pages.
  Source(int fd, bool direct) : fd_(fd), direct_(direct) {
    if (fstat(fd, &opened_) != 0) opened_ = {};
  }

  void add(int64_t place, const InFile& what) {
    places_.emplace(place, what);
  }

  // Read whole pages of one place; blocks. Returns 0, an errno or one of the codes above.
  int read(char* data, int64_t n, int64_t offset) const {
    auto after = places_.upper_bound(offset);
    if (after == places_.begin()) return EINVAL;
    auto [place, what] = *std::prev(after);
    struct stat now;
    if (fstat(fd_, &now) != 0) return errno;
    if (now.st_size < opened_.st_size) return kSourceCut;
    if (now.st_size != opened_.st_size || now.st_mtim.tv_sec != opened_.st_mtim.tv_sec ||
        now.st_mtim.tv_nsec != opened_.st_mtim.tv_nsec)
      return kSourceChanged;
    int64_t at = offset - place, wanted = std::min(n, what.bytes - at);
    std::memset(data + wanted, 0, n - wanted);  // beyond the tensor's end
    return read_bytes(data, wanted, what.begin + in_file(at, what.conversion), what.conversion);
  }

 private:
  // Of memory for each thread that reads, beside the budget. One huge page: the kernel reads three times as fast into it as
  // into small ones, each of which it has to look up and hold. And a small one: so many bytes that do not begin at a page of
  // the file lie in one page more, and a read of that page alone would take as long as one of all the others.
  static constexpr int64_t kBounce = 2 << 20;

  // Never freed: movers live as long as the process.
  static char* new_bounce() {
    void* got = nullptr;
    if (posix_memalign(&got, kBounce, kBounce + kPage) != 0) return nullptr;
    madvise(got, kBounce, MADV_HUGEPAGE);
    return static_cast<char*>(got);
  }

  // How many bytes of the file become so many in memory.
  static int64_t in_file(int64_t bytes, Conversion conversion) {
    switch (conversion) {
      case Conversion::kFromBFloat16:
      case Conversion::kFromHalf:
        return bytes / 2;
      case Conversion::kToBFloat16:
      case Conversion::kToHalf:
        return bytes * 2;
      default:
        return bytes;
    }
  }

  // How many bytes of memory whole numbers take that lie in so many of the file.
  static int64_t in_memory(int64_t bytes, Conversion conversion) {
    switch (conversion) {
      case Conversion::kFromBFloat16:
      case Conversion::kFromHalf:
        return bytes / 2 * 4;
      case Conversion::kToBFloat16:
      case Conversion::kToHalf:
        return bytes / 4 * 2;
      default:
        return bytes;
    }
  }

  int read_bytes(char* data, int64_t wanted, int64_t begin, Conversion conversion) const {
    // What lies at pages in the file is read to where it belongs; its last page has room to the page's end.
    if (conversion == Conversion::kNone && (!direct_ || begin % kPage == 0)) {
      int64_t n = direct_ ? round_to_page(wanted) : wanted;
      return fill(data, n, wanted, begin);
    }
    static thread_local char* bounce = nullptr;
    if (!bounce && !(bounce = new_bounce())) return ENOMEM;
    while (wanted > 0) {
      int64_t skew = direct_ ? begin % kPage : 0;
      int64_t piece = std::min(wanted, in_memory(kBounce, conversion)), bytes = in_file(piece, conversion);
      int error = fill(bounce, direct_ ? round_to_page(skew + bytes) : bytes, skew + bytes, begin - skew);
      if (error) return error;
      convert(data, bounce + skew, bytes, conversion);
      data += piece;
      begin += bytes;
      wanted -= piece;
    }
    return 0;
  }

  // Read `n` bytes, of which at least `least` must be there: the file may end in its last page.
  int fill(char* data, int64_t n, int64_t least, int64_t offset) const {
    int64_t done = 0;
    while (done < least) {
      ssize_t got = pread(fd_, data + done, n - done, offset + done);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return errno;
      if (got == 0) return kSourceCut;
      done += got;
    }
    return 0;
  }

  static void convert(char* into, const char* from, int64_t bytes, Conversion conversion) {
    switch (conversion) {
      case Conversion::kNone:
        std::memcpy(into, from, bytes);
        return;
      case Conversion::kToBFloat16:
        return narrow(into, from, bytes, float_to_bfloat16);
      case Conversion::kToHalf:
        return narrow(into, from, bytes, float_to_half);
      default:
        return widen(into, from, bytes, conversion);
    }
  }

  template <typename Convert>
  static void narrow(char* into, const char* from, int64_t bytes, Convert convert) {
    for (int64_t i = 0; i < bytes / 4; ++i) {
      uint32_t wide;
      std::memcpy(&wide, from + 4 * i, 4);
      uint16_t narrow = convert(wide);
      std::memcpy(into + 2 * i, &narrow, 2);
    }
  }

  // To the nearest, to the even one of two, as PyTorch rounds.
  static uint16_t float_to_bfloat16(uint32_t bits) {
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;  // nan
    return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
  }

  // Likewise; the additions of floats round.
  static uint16_t float_to_half(uint32_t bits) {
    uint32_t sign = (bits >> 16) & 0x8000, twice = bits + bits, rest = bits & 0x7FFFFFFF;
    if (twice > 0xFF000000) return static_cast<uint16_t>(sign | 0x7E00);  // nan
    float value;
    std::memcpy(&value, &rest, 4);
    float base = (value * 0x1p+112f) * 0x1p-110f;
    uint32_t bias_bits = (std::max<uint32_t>(twice & 0xFF000000, 0x71000000) >> 1) + 0x07800000;
    float bias;
    std::memcpy(&bias, &bias_bits, 4);
    base = bias + base;
    uint32_t rounded;
    std::memcpy(&rounded, &base, 4);
    return static_cast<uint16_t>(sign | (((rounded >> 13) & 0x7C00) + (rounded & 0xFFF)));
  }

  static void widen(char* into, const char* from, int64_t bytes, Conversion conversion) {
    for (int64_t i = 0; i < bytes / 2; ++i) {
      uint16_t narrow;
      std::memcpy(&narrow, from + 2 * i, 2);
      uint32_t wide = conversion == Conversion::kFromBFloat16 ? static_cast<uint32_t>(narrow) << 16 : half_to_float(narrow);
      std::memcpy(into + 4 * i, &wide, 4);
    }
  }

  // The bits of the float that a half is; exact, as every half is one.
  static uint32_t half_to_float(uint16_t half) {
    uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7FFF;
    if (rest >= 0x7C00) return sign | 0x7F800000 | ((rest & 0x3FF) << 13) | (rest > 0x7C00 ? 0x400000 : 0);  // inf, quiet nan
    if (rest >= 0x400) return sign | ((rest << 13) + 0x38000000);
    float value = static_cast<float>(rest) * 0x1p-24f;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return sign | bits;
  }

  int fd_;
  bool direct_;
  struct stat opened_ {};
  std::map<int64_t, InFile> places_;
};

}  // namespace lowtide
