// Codecs as movers run them: a range's bytes in frames, each encoded on its own when it leaves, and decoded when it returns.
//
// Note [Encoded]: a frame is what a mover takes at once. It is encoded into the mover's own buffer, outside the budget, and has
// an extent of its own, as long as what is left of it. One that would not become a page shorter, or has a value that the codec
// cannot hold, is written as it is. Whoever encodes reads the pages at their addresses, so they cannot be called back
// meanwhile: who wants them waits for the frame, whose blob is then thrown away.
//
// Note [Rounded]: a codec that rounds is for ranges that operators use as single precision only. Nobody relies on what it
// promises: each frame is decoded again, and one with a value that is further off than `most_error` times the frame's largest,
// or with a zero that is none any more, is written as it is.
#pragma once
#include "lowtide.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace lowtide {

// The same as in codecs/native/codecs.cpp: the blob's bytes, or below 0; and 0, or not.
using EncodeCall = int64_t (*)(const void* in, int64_t n, void* out, int64_t room);
using DecodeCall = int (*)(const void* blob, int64_t m, void* out, int64_t n);

struct Coder {
  EncodeCall encode = nullptr;
  DecodeCall decode = nullptr;
  bool exact = true;       // every bit comes back
  bool in_python = false;  // it takes the GIL
  double most_error = 0;   // of a codec that rounds, in terms of the frame's largest value: see Note [Rounded]
};

// Whether all of `back` is as near to `values` as `most_error` asks for: see Note [Rounded]. Both are `n` bytes of floats.
inline bool is_near(const char* values, const char* back, int64_t n, double most_error) {
  constexpr uint32_t kMagnitude = 0x7FFFFFFF, kInfinity = 0x7F800000;
  int64_t count = n / 4;
  auto word = [](const char* from, int64_t i) {
    uint32_t bits;
    std::memcpy(&bits, from + 4 * i, 4);
    return bits;
  };
  auto number = [](uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  };
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t magnitude = word(values, i) & kMagnitude;
    largest = std::max(largest, magnitude < kInfinity ? magnitude : 0);
  }
  // A little less, for what the difference itself is rounded by.
  auto bound = static_cast<float>(most_error * static_cast<double>(number(largest)) * (1 - 1.0 / (1 << 20)));
  int64_t far = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t before = word(values, i), after = word(back, i), magnitude = before & kMagnitude;
    bool same = before == after || (magnitude > kInfinity && (after & kMagnitude) > kInfinity);
    bool near = magnitude ? std::fabs(number(before) - number(after)) <= bound : (after & kMagnitude) == 0;
    far += !same && !near;
  }
  return far == 0 && std::memcmp(values + 4 * count, back + 4 * count, n - 4 * count) == 0;
}

struct Frame {
  int64_t offset = -1;  // of its extent
  int64_t stored = 0;   // the extent's bytes: whole pages
  int64_t blob = 0;     // bytes of the blob; 0: it is as it was
};

// What a slot holds in frames instead of as it is.
struct Frames {
  int32_t coder = 0;
  std::vector<Frame> frames;
};

// A mover's memory for blobs: whole pages, for direct files.
class BlobBuffer {
 public:
  // Room for `bytes`, or nullptr.
  char* get(int64_t bytes) {
    if (bytes > bytes_) {
      release();
      void* got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (got == MAP_FAILED) return nullptr;
      data_ = static_cast<char*>(got);
      bytes_ = bytes;
    }
    return data_;
  }
  ~BlobBuffer() {
    release();
  }

 private:
  void release() {
    if (data_) munmap(data_, bytes_);
    data_ = nullptr;
    bytes_ = 0;
  }
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace lowtide
