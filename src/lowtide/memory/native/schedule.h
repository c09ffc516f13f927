// The plan of a step, compiled: what leaves and what comes back when its i-th operator begins.
//
// A step follows a plan while its operators have the plan's names, in order, and its blocks the plan's sizes. At the first
// that does not, another plan with the same beginning takes over. Where there is none and an operator has another name, the
// step goes on by touches and faults, and gives up the least recently touched (R8). Where only a block has another size (a
// batch that is not full, a cache that grows) the plan goes on without it: weights come and go as planned.
// Guarded by `pages().mutex`.
#pragma once
#include "remakes.h"

namespace lowtide {

// What a plan does with a storage when an operator begins.
struct Action {
  // kPlace: leave to slow memory, to be touched in place. kLanded: the operator waits until it is there. kReturn: it comes
  // back before the operator begins, if room for it is on its way.
  enum Kind : int32_t { kLeave = 0, kFetch = 1, kDiscard = 2, kRemake = 3, kPlace = 4, kLanded = 5, kReturn = 6 };
  int32_t kind;
  int32_t tier;
  int64_t storage;
  int64_t decision;  // of kDiscard
  int32_t coder = 0;  // of kLeave
};

// An operator of a planned step that waited for a storage; `demanded`: nobody had asked for it before.
struct Wait {
  int64_t op, storage, begin_ns, end_ns;
  bool demanded;
};

struct Plan {
  int64_t id;
  std::vector<int64_t> names;                // of the operators, by the log's numbers
  std::vector<std::vector<Action>> actions;  // by operator
  std::vector<Decision> decisions;           // what is discarded
  std::vector<bool> remembered;              // by operator: some decision runs it again
  std::vector<std::vector<int64_t>> uses;    // operators that touch a storage, by storage
  std::vector<int64_t> bytes;                // by storage
  std::vector<int32_t> tier;                 // by storage: where it leaves to if memory runs out
  std::vector<bool> leaves_again;            // by storage: worth knowing whether it changes
  std::vector<int32_t> birth_tier;           // by storage: the slow memory that it is made in, or begins the step in; or -1
  std::unordered_map<int64_t, int64_t> by_serial;              // storages from before the step
  std::vector<std::unordered_map<int64_t, int64_t>> by_birth;  // by operator + 1: the k-th large block made since it began
};

class Schedule {
 public:
  bool following() const {
    return plan_ != nullptr;
  }
  int64_t add(std::unique_ptr<Plan> plan);
  void clear();
  // A step begins on this thread, with plan `id` (-1: with none).
  void begin_step(int64_t id);
  // The step has ended. Returns the plan that it followed to its end, or -1.
  int64_t end_step();
  void abandon_step();
  // Whether a plan says what comes back when.
  bool leads() const {
    return in_step_ && plan_;
  }
  bool in_step() const {
    return in_step_ && std::this_thread::get_id() == thread_;
  }
  // An operator of the step begins: `name` is its number in the log. Returns the ranges that have to be made before.
  std::vector<int64_t> on_operator(int64_t name);
  // Wait for the migrations that the operator has to wait for.
  void migrations_waiting(std::unique_lock<std::mutex>& guard);
  // The slow memory that the block of `bytes` that is made next is to be allocated in, or -1.
  int32_t birth_tier(int64_t bytes) const;
  // Whether its call is to be remembered.
  bool remembers() const {
    return plan_ && plan_->remembered[cursor_];
  }
  // It is, or cannot be (nullptr).
  void on_call(std::shared_ptr<Call> call) {
    if (remembers()) calls_[cursor_] = std::move(call);
  }
  void on_operator_end() {
    running_ = false;
  }
  // The operator that begins has waited for a range.
  void on_wait(const Range* range, int64_t waited_ns, bool demanded);
  const std::vector<Wait>& waits() const {
    return waits_;
  }
  // A block of the step was made.
  void on_born(Range* range);
  // Whether the plan that is followed knows when a range is used next.
  bool knows(const Range* range) const {
    return plan_ && range->storage >= 0 && !plan_->uses[range->storage].empty();
  }
  // The operator, counted on from now, that will use a range next, which the plan `knows`.
  int64_t next_use(const Range* range) const;
  int32_t tier_of(const Range* range) const {
    return plan_ && range->storage >= 0 ? plan_->tier[range->storage] : ranges().home_tier;
  }
  int64_t operators() const {
    return cursor_ + 1;
  }
  // Whether the step had the plan's operators, and blocks of other sizes.
  bool resized() const {
    return resized_ && is_whole();
  }
  int64_t diverged_at() const {
    return diverged_at_;
  }
  int64_t deferred() const {
    return static_cast<int64_t>(deferred_.size());
  }

 private:
  void follow(Plan* plan);
  void diverge();
  std::vector<int64_t> do_actions();
  void discard(Range* range, const Action& action);
  bool starts_alike(const Plan& plan) const;
  Plan* other_plan() const;
  bool is_whole() const {
    return plan_ && cursor_ + 1 == static_cast<int64_t>(plan_->names.size());
  }

  std::vector<std::unique_ptr<Plan>> plans_;
  Plan* plan_ = nullptr;
  bool in_step_ = false;
  bool running_ = false;  // the operator that began last
  bool resized_ = false;  // a block of another size than the plan's was made
  std::thread::id thread_;
  std::unordered_map<int64_t, std::shared_ptr<Call>> calls_;  // of the step, by operator
  std::vector<int64_t> seen_;  // names of the step's operators
  struct Born {
    int64_t op, number, bytes, serial;
  };
  std::vector<Born> born_;
  int64_t cursor_ = -1, born_since_ = 0, diverged_at_ = -1;
  std::vector<Wait> waits_;
  std::vector<int64_t> bound_;     // serial of the range behind each storage of the plan
  std::vector<int64_t> deferred_;  // storages that are due but found no room
  std::vector<int64_t> landing_, returning_;  // serials of ranges that the operator waits for
};

Schedule& schedule();

}  // namespace lowtide
