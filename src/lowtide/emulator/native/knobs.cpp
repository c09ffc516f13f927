// What Python calls: knobs, counters, the trace, findings of the race detector.
#include <algorithm>
#include <cstdio>

#include "device.h"

namespace lowtide::sim {
namespace {

// A C function must not throw into ctypes.
template <class F>
int guarded(F f) {
  try {
    f();
    return 0;
  } catch (const std::exception&) {
    return -1;
  }
}

}  // namespace

extern "C" {

// Before the first use of a device.
void sim_set_devices(int devices, uint64_t reserve_bytes) {
  knobs().devices = std::clamp(devices, 1, kMaxDevices);
  knobs().reserve_bytes = reserve_bytes;
}
int sim_device_count() { return knobs().devices; }
int sim_forked() { return forked; }

void sim_set_capacity(uint64_t nbytes) { knobs().capacity_bytes = nbytes; }
void sim_set_allowed(int index, uint64_t nbytes) { knobs().allowed_bytes[std::clamp(index, 0, kMaxDevices - 1)] = nbytes; }
int sim_set_bandwidth(double h2d_bytes_per_s, double d2h_bytes_per_s) {
  return guarded([&] {
    for (int i = 0; i < knobs().devices; ++i) {
      device(i).h2d.bytes_per_s = h2d_bytes_per_s;
      device(i).d2h.bytes_per_s = d2h_bytes_per_s;
    }
  });
}
void sim_set_latency(double s) { knobs().latency_s = s; }
void sim_set_slowdown(double factor) { knobs().slowdown = factor; }
void sim_set_jitter(double s, uint64_t seed) {
  knobs().jitter_s = s;
  knobs().seed = seed;
}
void sim_set_poison(int on) { knobs().poison = on; }
void sim_set_strict(int on) { knobs().strict = on; }
void sim_set_fragmentation(int on) { knobs().fragmentation = on; }
void sim_set_queue_depth(int64_t jobs) { knobs().queue_depth = jobs; }
void sim_set_pressure(Pressure callback) { pressure = callback; }

// 16 numbers: live, peak, active, peak active, allocations, out-of-memory errors; compute ns, kernels; for each direction
// copies, bytes, busy ns; hidden ns of both.
int sim_stats(int index, int64_t* out) {
  return guarded([&] {
    Device& on = device(index);
    auto memory = on.arena.stats();
    auto totals = on.activity.totals();
    const int64_t values[] = {
        memory.allocated_bytes[0].current, memory.allocated_bytes[0].peak, memory.active_bytes[0].current,
        memory.active_bytes[0].peak, memory.num_device_alloc, memory.num_ooms, totals.compute_ns, totals.kernels,
        totals.copies[0], totals.nbytes[0], totals.busy_ns[0], totals.hidden_ns[0],
        totals.copies[1], totals.nbytes[1], totals.busy_ns[1], totals.hidden_ns[1]};
    std::copy(std::begin(values), std::end(values), out);
  });
}
int sim_reset_stats(int index) {
  return guarded([&] {
    device(index).arena.reset_stats(true);
    device(index).activity.reset();
  });
}

void sim_trace_enable(int on) { trace().on = on; }
void sim_trace_clear() { trace().clear(); }
// Copies at most `most` records of seven numbers each; returns how many there are.
int64_t sim_trace_read(int64_t* out, int64_t most) {
  std::lock_guard<std::mutex> guard(trace().mutex);
  auto& records = trace().records;
  auto count = std::min<int64_t>(most, static_cast<int64_t>(records.size()));
  if (out) std::memcpy(out, records.data(), static_cast<size_t>(count) * sizeof(TraceRecord));
  return static_cast<int64_t>(records.size());
}
int64_t sim_trace_name(int64_t id, char* out, int64_t most) {
  std::lock_guard<std::mutex> guard(trace().mutex);
  if (id < 0 || id >= static_cast<int64_t>(trace().names.size())) return -1;
  return std::snprintf(out, static_cast<size_t>(most), "%s", trace().names[static_cast<size_t>(id)].c_str());
}

void sim_watch_races(int on) {
  races::enable(on);
  watch_host(on);
}
// The host touches memory by other means than an operator, such as a thread that writes a pinned buffer to a file.
void sim_host_access(const void* p, int64_t nbytes, int write, const char* name) {
  if (races::enabled()) races::host_access(p, static_cast<size_t>(nbytes), write, name);
}
}  // extern "C"

}  // namespace lowtide::sim
