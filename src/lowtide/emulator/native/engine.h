// A copy engine: one direction of the link. Its copies take turns, and each takes as long as the link would.
#pragma once
#include "trace.h"

namespace lowtide::sim {

class Engine {
 public:
  Engine(Work kind, int device, Activity& activity) : kind_(kind), device_(device), activity_(activity) {}
  std::atomic<double> bytes_per_s{0};  // 0: as fast as memory
  void copy(char* to, const char* from, size_t n, StreamId stream);

 private:
  Work kind_;
  int device_;
  Activity& activity_;
  std::mutex mutex_;
};

}  // namespace lowtide::sim
