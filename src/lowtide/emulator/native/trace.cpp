#include "trace.h"

namespace lowtide::sim {

Trace& trace() {
  static Trace* instance = new Trace;
  return *instance;
}

void Trace::add(Work kind, int device, StreamId stream, Clock::time_point start, Clock::time_point end, int64_t nbytes,
                const std::string& name) {
  if (!on.load(std::memory_order_relaxed)) return;
  std::lock_guard<std::mutex> guard(mutex);
  auto [found, fresh] = ids_.emplace(name, static_cast<int64_t>(names.size()));
  if (fresh) names.push_back(name);
  records.push_back({static_cast<int64_t>(kind), device, stream, to_ns(start), to_ns(end), nbytes, found->second});
}

void Trace::clear() {
  std::lock_guard<std::mutex> guard(mutex);
  records.clear();
  names.clear();
  ids_.clear();
}

void Activity::advance(Clock::time_point now) {
  int64_t passed = to_ns(now) - to_ns(since_);
  since_ = now;
  bool computing = running_[0] > 0;
  if (computing) totals_.compute_ns += passed;
  for (int direction = 0; direction < 2; ++direction) {
    if (running_[1 + direction] == 0) continue;
    totals_.busy_ns[direction] += passed;
    if (computing) totals_.hidden_ns[direction] += passed;
  }
}

Clock::time_point Activity::begin(Work kind) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto now = Clock::now();
  advance(now);
  ++running_[static_cast<int>(kind)];
  return now;
}

Clock::time_point Activity::end(Work kind, int64_t nbytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto now = Clock::now();
  advance(now);
  --running_[static_cast<int>(kind)];
  if (kind == Work::kKernel) {
    ++totals_.kernels;
  } else {
    int direction = static_cast<int>(kind) - 1;
    ++totals_.copies[direction];
    totals_.nbytes[direction] += nbytes;
  }
  return now;
}

Activity::Totals Activity::totals() {
  std::lock_guard<std::mutex> guard(mutex_);
  advance(Clock::now());
  return totals_;
}

void Activity::reset() {
  std::lock_guard<std::mutex> guard(mutex_);
  advance(Clock::now());
  totals_ = {};
}

}  // namespace lowtide::sim
