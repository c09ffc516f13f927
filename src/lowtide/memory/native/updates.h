// Updates that are put off: what an optimizer's step does to large tensors is remembered, and done when somebody uses them.
//
// Note [Put off]: with a state larger than memory, a step of an optimizer reads and writes all of it with next to no compute
// to hide that. So while an optimizer computes, its operators on ranges are not run: they are remembered as calls
// (calls.h), with the numbers that they were given. Calls that share a range are one update; updates share none. An update
// runs before anybody reads or writes what it changes, or writes what it reads: before an operator that is announced, at a
// fault, before memory is lent, a fork, or the end. Mostly that is the next forward pass, layer by layer, and its traffic
// hides there. The operators run as the program's own: they are logged, planned and announced, at the place where they run.
//
// Note [Barred]: until its update has run, nobody has access to the pages of a range that it changes, at its addresses or
// on their way to them; what it only reads is read-only. Its storages are kept alive. So the bits are those of a step
// that was not put off, whoever looks, and in whatever order (R1). Versions of tensors change when the step is called.
// Memory that was taken over from another allocator cannot be barred whole, and is updated at once.
//
// Note [Vacant]: what an operator that is put off would make (the root of a moment, say) has addresses and no bytes. Mostly
// the optimizer is done with it before the update runs: then it is made in passing, and never has any.
//
// Note [Failed]: an update whose operands cannot be read stays as it is, and the error is raised like any other
// (ranges.h, Note [Lost]): the step is lost, and whoever tries again runs the rest. Until that has been told, readers see
// the values of before; whoever writes over them gives the update up, and all that it would have changed becomes NaN.
#pragma once
#include "call.h"

#include <unordered_set>

namespace lowtide {

// The storages that an update keeps alive.
struct Held;

struct Update {
  std::string optimizer;  // as its range is named
  std::vector<std::shared_ptr<Call>> calls;
  size_t next = 0;  // the first call that has not run
  std::shared_ptr<Held> held;
  std::unordered_set<int64_t> reads;  // serials of what it does not change
  bool running = false;
  bool faults = false;  // the kernels of the call that runs are served by faults, too
  bool failed = false;  // see Note [Failed]
  bool done = false;
};

struct UpdateCounters {
  int64_t put_off = 0;  // calls
  int64_t run = 0;      // likewise
  int64_t asked = 0;    // updates that somebody who was not announced had to wait for
};

// Guarded by `pages().mutex`, except where calls run. No storage is given back with it held.
class Updates {
 public:
  UpdateCounters counted;

  // Remember a call instead of running it; its results replace its arguments. False: it has to run. Takes the lock itself.
  bool put_off(const c10::OperatorHandle& op, std::vector<c10::IValue>& stack);
  int64_t count() const {
    return pending_count_.load(std::memory_order_relaxed);
  }
  bool any() const {
    return pending_count_.load(std::memory_order_relaxed) > 0;
  }
  // The update that has to run before a range is used; nullptr: none. With the lock.
  std::shared_ptr<Update> due(const Range* range, bool changes) const;
  // Run an update, or wait for whoever does. False: it failed. Without the lock.
  bool run(const std::shared_ptr<Update>& update);
  // Run what has to before a range is used. False: it failed.
  bool run_for(int64_t serial, bool changes);
  // Run all of them, whatever the budget says. False: some failed.
  bool run_all();
  // Somebody uses a range whose update failed: see Note [Failed]. With the lock, which is given up meanwhile.
  void go_without_waiting(Range* range, bool changes, std::unique_lock<std::mutex>& guard);
  // Give up what failed, at the end: see Note [Failed]. Without the lock.
  void give_up_all();
  // The error has been told: what failed is tried again. With the lock.
  void forgive();
  // Give up the updates of tensors that nobody has any more. Without the lock.
  void forget_unseen();
  // Nobody runs them in a child, and nothing that waits for them is to be had. With the lock.
  void abandon_in_child();

 private:
  // A call that uses these storages is part of an update from here on.
  void attach(const std::shared_ptr<Call>& call, const Held& storages);
  std::shared_ptr<Update> merged(std::shared_ptr<Update> update, const std::shared_ptr<Update>& other);
  int run_next(Update& update);
  // Its ranges are as others. What is returned is given back without the lock.
  std::shared_ptr<Held> detach(Update& update);
  void bar_all(const Update& update);
  void give_up_waiting(std::shared_ptr<Update> update, std::unique_lock<std::mutex>& guard);

  std::unordered_map<const Update*, std::shared_ptr<Update>> pending_;
  std::atomic<int64_t> pending_count_{0};
};

Updates& updates();

// Whether the operators that this thread calls are put off.
extern thread_local bool putting_off;
// Whether it runs an update.
extern thread_local bool updating;

}  // namespace lowtide
