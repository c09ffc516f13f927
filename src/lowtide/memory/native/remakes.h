// Ranges that are given up without a copy, and made again by running the calls that made them.
//
// Note [What a recipe stands on]: a range is discarded only if the calls that made it were all remembered, and would find
// what they read as it was: every range carries the number of its last write (`written_at`), and a call the numbers of what
// it was given. From then on, what the recipe reads has a lien on it. It may leave, but it is neither freed nor changed: its
// owner's release is put off, and whoever is about to write it (an operator, a borrower, a write fault: it is mapped
// read-only) has those who depend on it made first. So a discarded range can be made at any instant (R1).
//
// Note [Trial]: the first time that a plan would discard a range, its bytes are swapped out instead and only their
// checksum is kept. When it is due it is made again and compared. If the checksums differ, a write was unseen, or an
// operator is not a function of what it is given: that range is swapped from then on, and counted (R6). With `verify` the
// checksum is compared every time, and another one is an error.
//
// Note [Who runs calls again]: whoever announces an operator, lends memory or ends a step does so itself: the kernels find
// the same threads as the first time. At a fault that is not possible: the thread that is interrupted may be in the
// middle of a kernel. A thread of ours does it meanwhile, and needs nothing that the other may hold: no GIL, which is given
// up by whoever waits, and no room, because there it may pass the budget, which is counted and raised (see
// Note [Who may wait]).
#pragma once
#include "call.h"
#include "neighbourhoods.h"

#include <unordered_set>

namespace lowtide {

// A storage that a plan discards, and the operators that make it again.
struct Decision {
  std::vector<int64_t> ops;
  uint64_t key = 0;  // the same for the same decision of another plan
};

// How a discarded range is made again.
struct Recipe {
  int64_t serial = 0;
  int64_t version = 0;  // `written_at` of the range
  int64_t nbytes = 0;   // of its storage
  std::vector<std::shared_ptr<Call>> calls;
  std::vector<int64_t> reads;  // ranges with a lien for it
  bool trial = false;
  bool reactive = false;  // of a victim: no plan says when it is due
  uint64_t checksum = 0, key = 0;
};

struct RemakeCounters {
  int64_t discarded = 0;  // bytes
  int64_t calls = 0;      // that ran again
  int64_t ns = 0;         // that took
  int64_t trials = 0, refused = 0;  // ranges that were swapped instead: for the first time, or because they have to be
};

// Everything is guarded by `pages().mutex`, except where calls run.
class Remakes {
 public:
  RemakeCounters counted;
  bool discards_victims = false;  // what is given up because memory runs out, as far as it can be made again

  // Give a range up. False: it cannot be made again; it is where it was.
  bool discard(Range* range, int32_t tier, const Decision& decision, const std::vector<std::shared_ptr<Call>>& calls);
  // Whether a victim could be made again by calls of the step, and what that would cost with all that is discarded around it.
  bool is_makeable(const Range* range) const;
  double cost_ns(const Range* range) const;
  // Give a victim up. False: it cannot be made again, or not now; it is where it was.
  bool discard_victim(Range* range, int32_t tier);
  // A call of the step has ended: what it made or changed can be made again by it.
  void note_makers(const std::shared_ptr<Call>& call);
  void forget_makers();
  // The ranges that have to be made before this one changes.
  std::vector<int64_t> dependents(Range* range);
  // The range is no more, or will not be made: what its recipe reads is free again.
  void forget(Range* range);
  void forget_trials();
  // Make ranges that are discarded, on this thread; without the lock. What cannot be made is trouble (ranges.h).
  void remake(const std::vector<int64_t>& serials);
  void remake_all();
  // Have ranges made that are discarded, by this thread if it can. `may_be_refused`: where there is no room, the next
  // allocation is refused; else the budget is passed, because they could not be made later.
  void have_waiting(std::vector<int64_t> serials, std::unique_lock<std::mutex>& guard, bool may_be_refused);
  // Have ranges made by a thread of ours.
  void ask(const std::vector<int64_t>& serials);
  void start();
  // The thread of ours is not there, and whoever ran calls again neither.
  void abandon_in_child();
  void forget_experience() {
    experience_.clear();
  }
  bool any() const {
    return recipes_ > 0;
  }

 private:
  // The calls that make a range, and what they read that is freed.
  std::vector<std::shared_ptr<Call>> calls_for(const Range* range) const;
  bool resolve(Recipe& recipe, const Range* range, const std::vector<std::shared_ptr<Call>>& calls) const;
  void attach(Range* range, std::shared_ptr<Recipe> recipe);
  void take_lien(Range* range);
  void give_lien(int64_t serial);
  // Both return 0 or what is wrong: ENOMEM, or kNotRemade.
  int run(const std::vector<std::shared_ptr<Recipe>>& recipes);  // reruns.cpp
  int put(const Recipe& recipe, const void* made, int64_t nbytes, bool is_alone);
  void help();

  int64_t recipes_ = 0;
  Neighbourhoods neighbourhoods_;  // of what is discarded
  // Of a step whose victims are discarded: the calls that wrote a range, in order, also of one that is freed.
  std::unordered_map<int64_t, std::vector<std::shared_ptr<Call>>> makers_;
  std::unordered_map<uint64_t, bool> experience_;  // whether a decision's range came back the same; see Note [Trial]
  std::vector<int64_t> asked_;
  std::condition_variable asked_changed_;
  bool started_ = false;
};

Remakes& remakes();

// Whether this thread runs calls again: they are no operators of the program's.
extern thread_local bool remaking;
// Whether all that it makes is on trial: where there is no room for that, nobody needs it.
extern thread_local bool only_trying;
// Whether it does so for a thread that cannot be refused.
extern thread_local bool may_pass_budget;

}  // namespace lowtide
