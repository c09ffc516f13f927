// The safety net: whoever touches a range whose pages are away, without having been announced, gets them back here.
//
// A fault is synchronous: the thread that is interrupted was at an access of its own to tensor memory, so it holds none of
// our locks, and may be made to wait. It may hold the GIL: it gives that up while it waits for a medium in Python.
#include "remakes.h"
#include "updates.h"

#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstring>

namespace lowtide {
namespace {

struct sigaction before_segv, before_bus;

// A fault that is being handed over; a handler may leave it by a jump, so nothing here is given back.
struct Passed {
  std::atomic<pid_t> thread{0};
  const void* info = nullptr;
  const void* frame = nullptr;
} passed;

// Whether whoever it was handed to hands it back: by raising it anew, or by calling us.
bool is_back(const siginfo_t* info, const void* frame) {
  return passed.thread == gettid() && (info->si_code <= 0 || (passed.info == info && frame < passed.frame));
}

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
  bool was_here = Ranges::is_reachable(range);
  ++(was_here ? all.counted.write_faults : all.counted.faults);
  if (logging.load(std::memory_order_relaxed)) log_event(Event::kTouch, range->serial, write);
  int64_t serial = range->serial;
  // What was put off is done first; see updates.h. Whoever runs it, or a thread of its kernels, is here for that.
  for (bool waits = false; !updating && !in_forked_child() && range->serial == serial; waits = true) {
    std::shared_ptr<Update> due = updates().due(range, write);
    if (!due || (due->running && due->faults && !waits)) break;
    if (due->failed) {
      updates().go_without_waiting(range, write, guard);
      break;
    }
    if (!due->running) {
      ++updates().counted.asked;
      remakes().ask({serial});
    }
    all.change_waiting(guard, true);
  }
  // What is computed from it is computed while it is as it was; see Note [What a recipe stands on].
  while (write && !remaking && !in_forked_child() && range->serial == serial) {
    std::vector<int64_t> due = remakes().dependents(range);
    if (due.empty()) break;
    remakes().ask(due);
    all.change_waiting(guard, true);
  }
  if (range->serial != serial) return false;
  if (!all.bring_waiting(range, guard, all.needs_gil())) {
    // Freed while it was read: the access is the program's error. A child has nobody to tell of what is lost.
    if (range->serial != serial || in_forked_child()) return false;
    all.fill_lost(range);
  }
  all.touch(range, write);
  if (write) all.note_write(range);
  all.read_on();
  return true;
}

// The file behind slow memory was cut: whoever touches it gets ones, and the next allocation raises; see Note [Lost].
bool serve_cut_file(void* address) {
  std::unique_lock<std::mutex> guard(pages().mutex);
  Range* range = ranges().at(address);
  if (!range || range->place != Place::kSlow || in_forked_child()) return false;
  ranges().lose_slow(range, kShortRead);
  return true;
}

void on_fault(int signal, siginfo_t* info, void* context) {
  int kept_errno = errno;
  bool served = signal == SIGBUS ? serve_cut_file(info->si_addr) : serve(info->si_addr, is_write(context));
  errno = kept_errno;
  if (served) return;
  const struct sigaction& before = signal == SIGBUS ? before_bus : before_segv;
  // Not ours: whoever was there before us, or the default, which ends the process. Somebody who came after us and was
  // found there later hands it back: then it has been everywhere.
  const void* frame = __builtin_frame_address(0);
  bool sent = info->si_code <= 0;  // by kill(2): the same instruction would not fault again
  bool again = is_back(info, frame);
  passed.thread = gettid();
  passed.info = info;
  passed.frame = frame;
  bool is_default = !(before.sa_flags & SA_SIGINFO) && before.sa_handler == SIG_DFL;
  bool ignored = !(before.sa_flags & SA_SIGINFO) && before.sa_handler == SIG_IGN;
  if (again || is_default || (ignored && !sent)) {
    struct sigaction fatal {};
    fatal.sa_handler = SIG_DFL;
    sigaction(signal, &fatal, nullptr);
    if (sent || again) raise(signal);
  } else if (before.sa_flags & SA_SIGINFO) {
    before.sa_sigaction(signal, info, context);
  } else if (!ignored) {
    before.sa_handler(signal);
  }
  passed.thread = 0;
}

}  // namespace

void catch_faults() {
  for (int signal : {SIGSEGV, SIGBUS}) {
    struct sigaction now;
    sigaction(signal, nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == &on_fault) continue;
    (signal == SIGBUS ? before_bus : before_segv) = now;
    struct sigaction ours {};
    ours.sa_sigaction = &on_fault;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(signal, &ours, nullptr);
  }
}

}  // namespace lowtide
