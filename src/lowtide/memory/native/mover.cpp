// Starting, stopping and counting the movers, and what becomes of them when the process forks.
#include "mover.h"

#include <pthread.h>

namespace lowtide {
namespace {

void pause_mover() {
  mover().pause_for_fork();
}
void resume_mover() {
  mover().resume_after_fork();
}
void abandon_mover() {
  mover().abandon_in_child();
}

}  // namespace

void program_waits(int change) {
  Mover& m = mover();
  std::lock_guard<std::mutex> guard(m.mutex);
  m.meter.wait(change);
}

}  // namespace lowtide

using namespace lowtide;

extern "C" {

// Use these files, or `call` if it is set, as the tier below; returns 0, or -1 if one is in use already.
int lt_mover_start(
    const int* fds, int fd_count, int64_t stripe, int direct, int verify, int threads, MediumCall call) {
  survive_forks();  // first: the movers take their own lock before the budget's
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(&pause_mover, &resume_mover, &abandon_mover); });
  Mover& m = mover();
  if (m.running()) return -1;
  m.medium = Medium{std::vector<int>(fds, fds + fd_count), stripe, direct != 0, verify != 0, call};
  m.written_bytes = m.read_bytes = 0;
  m.meter = Meter{};
  m.start(threads);
  return 0;
}

// Finish what is queued and join the threads.
void lt_mover_stop() {
  WithoutGil released;
  if (!in_forked_child()) mover().stop();
}

// Forget the writes that have not begun: for an end that is near.
void lt_mover_cancel_writes() {
  WithoutGil released;
  if (!in_forked_child()) mover().cancel_writes();
}

// leaving, arriving, written, read, records
void lt_mover_counters(int64_t* out) {
  Mover& m = mover();
  std::lock_guard<std::mutex> guard(m.mutex);
  out[0] = m.leaving_bytes;
  out[1] = m.arriving_bytes;
  out[2] = m.written_bytes;
  out[3] = m.read_bytes;
  out[4] = static_cast<int64_t>(m.records.size());
}

// Bytes, transfers and nanoseconds of writes, reads, and writes and reads in which the program waited.
void lt_mover_meter(double* out) {
  Mover& m = mover();
  std::lock_guard<std::mutex> guard(m.mutex);
  m.meter.read(out);
}
}
