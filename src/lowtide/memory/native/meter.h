// How fast transfers are: the time in which there was one under way, by direction and by whether the program waited.
#pragma once
#include "lowtide.h"

#include <array>

namespace lowtide {

// Guarded by the movers' lock. Chunks share the time in which several are under way; where both directions are, each has half
// of it.
class Meter {
 public:
  enum Kind : int { kWrite = 0, kRead = 1, kWriteWaited = 2, kReadWaited = 3, kKinds = 4 };
  using Clocks = std::array<int64_t, kKinds>;

  // Begin a chunk; returns what to end it with.
  Clocks begin(bool write) {
    tick();
    ++(write ? writes_ : reads_);
    return clocks_;
  }

  // End a chunk of `bytes`, which is `share` of its transfer.
  void end(bool write, const Clocks& begun, int64_t bytes, double share) {
    tick();
    --(write ? writes_ : reads_);
    int64_t beside = 0, waited = 0;
    for (int kind = 0; kind < kKinds; ++kind) (kind < kWriteWaited ? beside : waited) += clocks_[kind] - begun[kind];
    double part = beside + waited > 0 ? static_cast<double>(waited) / static_cast<double>(beside + waited) : 0;
    for (int at_wait : {0, 1}) {
      int kind = (write ? kWrite : kRead) + 2 * at_wait;
      double of = at_wait ? part : 1 - part;
      bytes_[kind] += of * static_cast<double>(bytes);
      transfers_[kind] += of * share;
    }
  }

  void wait(int change) {
    tick();
    waiting_ += change;
  }

  // Count from zero; what is under way goes on.
  void forget() {
    tick();
    forgotten_ = clocks_;  // the clocks themselves go on: chunks under way compare them
    bytes_ = transfers_ = {};
  }

  // For each kind: bytes, transfers, nanoseconds.
  void read(double* out) {
    tick();
    for (int kind = 0; kind < kKinds; ++kind) {
      *out++ = bytes_[kind];
      *out++ = transfers_[kind];
      *out++ = static_cast<double>(clocks_[kind] - forgotten_[kind]);
    }
  }

 private:
  void tick() {
    int64_t now = now_ns();
    int64_t passed = now - last_, half = reads_ > 0 && writes_ > 0 ? passed / 2 : passed;
    int at_wait = waiting_ > 0 ? 2 : 0;
    if (reads_ > 0) clocks_[kRead + at_wait] += half;
    if (writes_ > 0) clocks_[kWrite + at_wait] += half;
    last_ = now;
  }

  Clocks clocks_{}, forgotten_{};
  std::array<double, kKinds> bytes_{}, transfers_{};
  int64_t last_ = 0;
  int reads_ = 0, writes_ = 0, waiting_ = 0;
};

}  // namespace lowtide
