// What ran when: running totals that are always kept, and a list of everything that is kept on demand.
#pragma once
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "state.h"

namespace lowtide::sim {

enum class Work : int64_t { kKernel = 0, kHostToDevice = 1, kDeviceToHost = 2 };

struct TraceRecord {
  int64_t kind, device, stream, start_ns, end_ns, nbytes, name;
};

class Trace {
 public:
  std::atomic<bool> on{false};
  std::mutex mutex;
  std::vector<TraceRecord> records;
  std::vector<std::string> names;

  void add(Work kind, int device, StreamId stream, Clock::time_point start, Clock::time_point end, int64_t nbytes,
           const std::string& name);
  void clear();

 private:
  std::unordered_map<std::string, int64_t> ids_;
};
Trace& trace();

// How long a device computed, copied, and did both at once. Every kernel and copy is bracketed by begin and end.
class Activity {
 public:
  struct Totals {
    int64_t compute_ns = 0;
    int64_t busy_ns[2] = {}, hidden_ns[2] = {};  // by direction: host to device, device to host
    int64_t kernels = 0, copies[2] = {}, nbytes[2] = {};
  };
  Clock::time_point begin(Work kind);
  Clock::time_point end(Work kind, int64_t nbytes);
  Totals totals();
  void reset();

 private:
  void advance(Clock::time_point now);
  std::mutex mutex_;
  Clock::time_point since_ = Clock::now();
  int running_[3] = {};
  Totals totals_;
};

}  // namespace lowtide::sim
