// Slow memory that operators read and write in place: what an operator pays there, and how fast pages migrate.
//
// Note [Charging]: where the device is no real one, it is memory of this machine, and whoever uses it is made to wait. An
// operator that found operands there takes as long as plan/costs/operator_times.py says, from the same constants: with d
// the time it took, n the bytes of its operands, n' of those in fast memory, T the time that the device is busy with the
// rest, it takes max(d, d n' / n + T), or max(d, T) where the device has channels of its own. It cannot be made faster
// than it was. What it was the last to touch is in the last-level cache, as far as `cache_bytes` reach: reading that is
// free. Writing never is, for the bytes reach the device in the end. Migrations take their time on the movers' threads.
#pragma once
#include "lowtide.h"

#include <fcntl.h>

#include <algorithm>
#include <cmath>

namespace lowtide {

// What a device is like. Rates are in bytes per nanosecond; 0: as fast as this machine is.
struct SlowRates {
  double read = 0, write = 0;                // of operators, in place
  double mixed_share = 1;                    // left of both where an operator reads and writes
  double latency_ns = 0;                     // once for each operand
  bool own_channel = false;                  // beside those of fast memory
  double fast = 0;                           // what fast memory delivers
  int64_t cache_bytes = 0;                   // of the last-level cache
  double migrate_out = 0, migrate_in = 0;    // beside operators
  double waited_out = 0, waited_in = 0;      // while the program waits
  double out_latency_ns = 0, in_latency_ns = 0;
  bool duplex = false;

  bool charges() const {
    return read > 0;
  }
};

// What an operator reads and writes, in all and in slow memory.
struct SlowUse {
  double read = 0, written = 0, slow_read = 0, slow_written = 0;
  int operands = 0;  // in slow memory

  void add(double bytes, bool reads, bool writes, bool slow, bool cached) {
    if (reads) read += bytes;
    if (writes) written += bytes;
    if (!slow) return;
    ++operands;
    if (reads && !cached) slow_read += bytes;
    if (writes) slow_written += bytes;
  }
};

// How many nanoseconds an operator that took `took_ns` has to go on; see Note [Charging].
inline int64_t charge_ns(const SlowRates& rates, SlowUse use, bool gathers, int64_t took_ns) {
  if (!use.operands || !rates.charges()) return 0;
  auto d = static_cast<double>(took_ns);
  if (gathers && use.read > use.written) {  // the rows that it returns, and none of the others
    use.slow_read *= use.written / use.read;
    use.read = use.written;
  }
  double total = use.read + use.written;
  if (total <= 0) return 0;
  // No more than fast memory can deliver in that time: a view of a large storage is smaller than that.
  double scale = rates.fast > 0 ? std::min(1.0, d * rates.fast / total) : 1.0;
  double read = use.slow_read * scale, written = use.slow_written * scale;
  double share = read > 0 && written > 0 ? rates.mixed_share : 1.0;
  double busy = use.operands * rates.latency_ns + (read / rates.read + written / rates.write) / share;
  double kept = std::max(0.0, total * scale - read - written);
  double takes = rates.own_channel ? std::max(d, busy) : std::max(d, d * kept / (total * scale) + busy);
  return std::llround(takes - d);
}

// Sleeps, and spins for the rest: the kernel wakes nobody on time.
inline void pass_until(int64_t deadline_ns) {
  constexpr int64_t kLate = 100'000;
  int64_t now = now_ns();
  if (deadline_ns - now > 2 * kLate) {
    int64_t until = deadline_ns - kLate;
    timespec at{static_cast<time_t>(until / 1'000'000'000), static_cast<long>(until % 1'000'000'000)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, nullptr) == EINTR) {
    }
  }
  while (now_ns() < deadline_ns) {
  }
}

// The way between fast and slow memory. One transfer after the other has it; where it is duplex, one in each direction.
// Guarded by `pages().mutex`.
class MigrationLink {
 public:
  int64_t runs = 0, run_bytes = 0;

  // A transfer is asked for. Pages that lie behind those of the one before it, which has not ended, move with them as one
  // run: true.
  bool begin(bool write, int64_t offset, int64_t bytes) {
    Queue& queue = queues_[write ? 1 : 0];
    bool joins = queue.transfers++ > 0 && queue.end == offset;
    queue.end = offset + bytes;
    if (!joins) ++runs;
    run_bytes += bytes;
    return joins;
  }
  void end(bool write) {
    --queues_[write ? 1 : 0].transfers;
  }

  // A piece of a transfer begins: when it may end. `first` of a run: that pays the latency.
  int64_t end_of(const SlowRates& rates, bool write, int64_t bytes, bool first, bool waited) {
    double rate = write ? rates.migrate_out : rates.migrate_in;
    double at_wait = write ? rates.waited_out : rates.waited_in;
    if (waited && at_wait > 0) rate = at_wait;
    double takes = rate > 0 ? static_cast<double>(bytes) / rate : 0;
    if (first) takes += write ? rates.out_latency_ns : rates.in_latency_ns;
    int64_t& free_at = free_at_[rates.duplex && write ? 1 : 0];
    return free_at = std::max(now_ns(), free_at) + std::llround(takes);
  }

 private:
  struct Queue {
    int64_t transfers = 0, end = -1;
  };
  Queue queues_[2];
  int64_t free_at_[2] = {0, 0};
};

}  // namespace lowtide
