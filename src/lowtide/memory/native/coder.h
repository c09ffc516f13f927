// Codecs as movers run them: a range's bytes in frames, each encoded on its own when it leaves, and decoded when it returns.
//
// Note [Encoded]: a frame is what a mover takes at once. It is encoded into the mover's own buffer, outside the budget, and has
// an extent of its own, as long as what is left of it. One that would not become a page shorter, or has a value that the codec
// cannot hold, is written as it is. Whoever encodes reads the pages at their addresses, so they cannot be called back
// meanwhile: who wants them waits for the frame, whose blob is then thrown away.
#pragma once
#include "lowtide.h"

#include <sys/mman.h>

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
};

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
