// See schedule.h.
#include "schedule.h"

namespace lowtide {

Schedule& schedule() {
  static Schedule* instance = new Schedule;
  return *instance;
}

int64_t Schedule::add(std::unique_ptr<Plan> plan) {
  plans_.push_back(std::move(plan));
  return plans_.back()->id = plans_.size() == 1 ? 0 : plans_[plans_.size() - 2]->id + 1;
}

void Schedule::clear() {
  plan_ = nullptr;
  plans_.clear();
  bound_.clear();
  deferred_.clear();
  landing_.clear();
  returning_.clear();
  calls_.clear();
  remakes().forget_experience();
}

void Schedule::begin_step(int64_t id) {
  in_step_ = true;
  thread_ = std::this_thread::get_id();
  seen_.clear();
  born_.clear();
  waits_.clear();
  calls_.clear();
  cursor_ = -1;
  running_ = resized_ = false;
  born_since_ = 0;
  diverged_at_ = -1;
  plan_ = nullptr;
  auto found = std::find_if(plans_.begin(), plans_.end(), [&](auto& plan) { return plan->id == id; });
  follow(found == plans_.end() ? nullptr : found->get());
}

void Schedule::follow(Plan* plan) {
  plan_ = plan;
  deferred_.clear();
  landing_.clear();
  returning_.clear();
  Ranges& all = ranges();
  all.each([](Range* range) {
    range->storage = -1;
    range->tracked = true;
  });
  if (!plan) return;
  bound_.assign(plan->bytes.size(), 0);
  auto bind = [&](int64_t storage, int64_t serial) {
    Range* range = all.of_serial(serial);
    if (!range) return;
    bound_[storage] = serial;
    range->storage = storage;
    range->tracked = plan->leaves_again[storage];
    // Another plan had it in slow memory: it comes back as soon as there is room.
    if (range->place == Place::kSlow && plan->birth_tier[storage] < 0) deferred_.push_back(storage);
  };
  for (auto [serial, storage] : plan->by_serial) bind(storage, serial);
  for (const Born& born : born_) {
    auto& births = plan->by_birth[born.op + 1];
    auto found = births.find(born.number);
    if (found != births.end()) bind(found->second, born.serial);
  }
}

bool Schedule::starts_alike(const Plan& plan) const {
  if (plan.names.size() < seen_.size() || !std::equal(seen_.begin(), seen_.end(), plan.names.begin())) return false;
  return std::all_of(born_.begin(), born_.end(), [&](const Born& born) {
    auto& births = plan.by_birth[born.op + 1];
    auto found = births.find(born.number);
    return found == births.end() || plan.bytes[found->second] == born.bytes;
  });
}

Plan* Schedule::other_plan() const {
  auto other = std::find_if(plans_.rbegin(), plans_.rend(), [&](auto& plan) { return starts_alike(*plan); });
  return other == plans_.rend() ? nullptr : other->get();
}

void Schedule::diverge() {
  if (diverged_at_ < 0) diverged_at_ = cursor_;
  resized_ = false;
  follow(other_plan());
}

int64_t Schedule::end_step() {
  in_step_ = false;
  calls_.clear();
  remakes().forget_makers();
  return is_whole() && !resized_ ? plan_->id : -1;
}

void Schedule::abandon_step() {
  in_step_ = false;
  calls_.clear();
  remakes().forget_makers();
  follow(nullptr);
}

std::vector<int64_t> Schedule::on_operator(int64_t name) {
  ++cursor_;
  running_ = true;
  born_since_ = 0;
  seen_.push_back(name);
  if (!plan_) return {};
  if (cursor_ >= static_cast<int64_t>(plan_->names.size()) || plan_->names[cursor_] != name) {
    diverge();
    if (!plan_) return {};
  }
  return do_actions();
}

void Schedule::on_wait(const Range* range, int64_t waited_ns, bool demanded) {
  if (!plan_ || range->storage < 0) return;
  int64_t now = now_ns();
  waits_.push_back({cursor_, range->storage, now - waited_ns, now, demanded});
}

void Schedule::on_born(Range* range) {
  Born born{cursor_, born_since_++, range->bytes, range->serial};
  born_.push_back(born);
  if (!plan_) return;
  if (born.op + 1 >= static_cast<int64_t>(plan_->by_birth.size())) return;
  auto& births = plan_->by_birth[born.op + 1];
  auto found = births.find(born.number);
  if (found == births.end()) return;
  if (plan_->bytes[found->second] != born.bytes) {
    if (!resized_ && diverged_at_ < 0) diverged_at_ = cursor_;
    if (Plan* other = resized_ ? nullptr : other_plan())
      follow(other);
    else
      resized_ = true;
    return;
  }
  bound_[found->second] = born.serial;
  range->storage = found->second;
  range->tracked = plan_->leaves_again[found->second];
}

// What cannot be given up without a copy leaves with one (R6).
void Schedule::discard(Range* range, const Action& action) {
  const Decision& decision = plan_->decisions[action.decision];
  std::vector<std::shared_ptr<Call>> calls;
  for (int64_t op : decision.ops) {
    auto found = calls_.find(op);
    calls.push_back(found == calls_.end() ? nullptr : found->second);
  }
  if (remakes().discard(range, action.tier, decision, calls)) return;
  if (range->pins > 0 || range->place == Place::kArriving) {
    range->leave_asked = true;
    range->leave_placed = false;
    range->leave_tier = action.tier;
    range->leave_coder = 0;
  } else {
    ranges().leave(range, action.tier);
  }
}

void Schedule::migrations_waiting(std::unique_lock<std::mutex>& guard) {
  std::vector<int64_t> landing = std::move(landing_), returning = std::move(returning_);
  landing_.clear();
  returning_.clear();
  for (int64_t serial : landing) ranges().landing_waiting(serial, guard);
  for (int64_t serial : returning) ranges().fetch_slow_waiting(serial, guard);
}

int32_t Schedule::birth_tier(int64_t bytes) const {
  if (!plan_ || cursor_ + 1 >= static_cast<int64_t>(plan_->by_birth.size())) return -1;
  auto& births = plan_->by_birth[cursor_ + 1];
  auto found = births.find(born_since_);
  return found == births.end() || plan_->bytes[found->second] != bytes ? -1 : plan_->birth_tier[found->second];
}

std::vector<int64_t> Schedule::do_actions() {
  Ranges& all = ranges();
  std::vector<int64_t> due;
  for (const Action& action : plan_->actions[cursor_]) {
    Range* range = all.of_serial(bound_[action.storage]);
    if (!range) continue;
    if (action.kind == Action::kFetch) {
      if (!all.prefetch(range)) deferred_.push_back(action.storage);
      continue;
    }
    if (action.kind == Action::kLanded) {
      landing_.push_back(range->serial);
      continue;
    }
    if (action.kind == Action::kReturn) {
      returning_.push_back(range->serial);
      std::erase(deferred_, action.storage);
      continue;
    }
    if (action.kind == Action::kRemake) {
      if (range->recipe) due.push_back(range->serial);
      if (!Ranges::is_discarded(range)) all.prefetch(range);
      continue;
    }
    std::erase(deferred_, action.storage);
    if (action.kind == Action::kDiscard) {
      discard(range, action);
      continue;
    }
    bool placed = action.kind == Action::kPlace;
    if (range->pins > 0 || range->place == Place::kArriving) {
      range->leave_asked = true;
      range->leave_tier = action.tier;
      range->leave_placed = placed;
      range->leave_coder = action.coder;
    } else if (placed && range->place == Place::kAway && range->slot.tier == action.tier) {
      all.settle_slow(range, nullptr);
    } else {
      all.leave(range, action.tier, placed, action.coder);
    }
  }
  size_t left = 0;
  for (int64_t storage : deferred_) {
    Range* range = all.of_serial(bound_[storage]);
    bool away = range && (range->place == Place::kAway || range->place == Place::kSlow);
    if (away && !all.prefetch(range)) deferred_[left++] = storage;
  }
  deferred_.resize(left);
  return due;
}

int64_t Schedule::next_use(const Range* range) const {
  const auto& uses = plan_->uses[range->storage];
  // An operator that runs uses it still.
  auto found = std::lower_bound(uses.begin(), uses.end(), running_ ? cursor_ : cursor_ + 1);
  if (found != uses.end()) return *found - cursor_;
  return uses.front() + static_cast<int64_t>(plan_->names.size()) - cursor_;
}

}  // namespace lowtide
