// The safety net: whoever touches a range whose pages are away, without having been announced, gets them back here.
//
// A fault is synchronous: the thread that is interrupted was at an access of its own to tensor memory, so it holds none of
// our locks, and may be made to wait. It may hold the GIL, which is why nothing here takes it.
#include "ranges.h"

#include <signal.h>
#include <ucontext.h>

#include <cstring>

namespace lowtide {
namespace {

struct sigaction before;

bool is_write(void* context) {
#if defined(__x86_64__)
  return (static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2) != 0;
#else
  (void)context;
  return true;  // not told: a range that was only read counts as changed, which costs a write and no wrong number
#endif
}

// Whether the access can go on.
bool serve(void* address, bool write) {
  Ranges& all = ranges();
  std::unique_lock<std::mutex> guard(pages().mutex);
  Range* range = all.at(address);
  if (!range) return false;
  if (in_forked_child()) {
    if (!all.bring_in_child(range)) return false;
    if (!range->writable) all.make_writable(range);
    return true;
  }
  bool was_here = range->place == Place::kHere;
  ++(was_here ? all.counted.write_faults : all.counted.faults);
  if (logging.load(std::memory_order_relaxed)) log_event(Event::kTouch, range->serial, write);
  int64_t serial = range->serial;
  if (!all.bring_waiting(range, guard, false)) {
    if (range->serial != serial) return false;  // freed while it was read: the access is the program's error
    all.fill_lost(range);
  }
  all.touch(range, write);
  return true;
}

void on_fault(int signal, siginfo_t* info, void* context) {
  int kept_errno = errno;
  if (serve(info->si_addr, is_write(context))) {
    errno = kept_errno;
    return;
  }
  errno = kept_errno;
  // Not ours: whoever was there before us, or the default, which ends the process at the same instruction.
  if (before.sa_flags & SA_SIGINFO) {
    before.sa_sigaction(signal, info, context);
  } else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
    struct sigaction fatal {};
    fatal.sa_handler = SIG_DFL;
    sigaction(signal, &fatal, nullptr);
  } else {
    before.sa_handler(signal);
  }
}

}  // namespace

void catch_faults() {
  struct sigaction now;
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == &on_fault) return;
  before = now;
  struct sigaction ours {};
  ours.sa_sigaction = &on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGSEGV, &ours, nullptr);
}

}  // namespace lowtide
