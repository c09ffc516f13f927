// What every part shares: the knobs, the calling thread's device and stream, the clock, and waiting without the GIL.
#pragma once
#include <Python.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>

#ifdef Py_LIMITED_API
// Not in the stable interface, and in every CPython since 3.4.
extern "C" int PyGILState_Check(void);
#endif

namespace lowtide::sim {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;
using c10::DeviceIndex;
using c10::StreamId;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;
constexpr int kStreams = 33;  // stream 0 is the default one, the others are handed out in turn

struct Knobs {
  int devices = 1;                                // fixed once a device was used
  size_t reserve_bytes = size_t(64) << 30;        // addresses for each device; fixed likewise
  std::atomic<size_t> capacity_bytes{size_t(2) << 30};
  // What this process may use of each device, by torch.sim.set_per_process_memory_fraction; 0: all of it.
  std::atomic<size_t> allowed_bytes[kMaxDevices] = {};
  std::atomic<double> latency_s{0}, slowdown{1}, jitter_s{0};
  std::atomic<uint64_t> seed{0};
  std::atomic<int64_t> queue_depth{1024};         // launches that the host may be ahead of a stream
  std::atomic<bool> poison{false};                // new blocks are filled with 0xFF, which is NaN in every float type
  std::atomic<bool> strict{true};                 // refuse operands of two devices
  std::atomic<bool> fragmentation{false};         // a block must lie below the capacity, as in real memory
};
inline Knobs& knobs() {
  static Knobs* instance = new Knobs;
  return *instance;
}
// What allocations on a device may not pass.
inline size_t limit_bytes(int device) {
  size_t capacity = knobs().capacity_bytes, allowed = knobs().allowed_bytes[device];
  return allowed && allowed < capacity ? allowed : capacity;
}

// A forked child has the memory but none of the threads: it may drop what it holds and nothing else.
inline std::atomic<bool> forked{false};

inline thread_local DeviceIndex current_device = 0;
inline thread_local StreamId current_streams[kMaxDevices] = {};
// The device whose kernel this host thread is executing, or -1. Then CPU allocations come from the device's memory.
inline thread_local int kernel_device = -1;
// This thread is the worker of a stream.
inline thread_local bool is_worker = false;

inline int64_t to_ns(Clock::time_point t) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(t.time_since_epoch()).count();
}
inline Clock::duration seconds(double s) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
}

// Drops the GIL for its lifetime if this thread holds it: a kernel that another thread must finish may be written in Python.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state_) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

}  // namespace lowtide::sim
