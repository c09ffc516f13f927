// See remakes.h.
#include "remakes.h"

#include "checksum.h"
#include "schedule.h"
#include "updates.h"

namespace lowtide {

thread_local bool remaking = false;
thread_local bool may_pass_budget = false;
thread_local bool only_trying = false;

namespace {

std::mutex one_at_a_time;  // whoever runs calls again; nobody waits for it with the GIL

class OneAtATime {
 public:
  OneAtATime() {
    if (!one_at_a_time.try_lock()) {
      WithoutGil released;
      one_at_a_time.lock();
    }
    remaking = true;
  }
  ~OneAtATime() {
    one_at_a_time.unlock();
    remaking = false;
    // The time that a planned step does not take if nothing is discarded.
    if (logging.load(std::memory_order_relaxed)) log_event(Event::kStall, now_ns() - began_);
  }

 private:
  int64_t began_ = now_ns();
  Aside aside_;
};

int64_t own_ns(const std::vector<std::shared_ptr<Call>>& calls) {
  int64_t total = 0;
  for (const auto& call : calls) total += call->ns;
  return total;
}

// The ranges that calls read and do not make.
std::vector<int64_t> sources_of(const std::vector<std::shared_ptr<Call>>& calls) {
  std::unordered_set<int64_t> made, read;
  for (const auto& call : calls) {
    call->each_operand([&](const Operand& operand) {
      if (operand.serial && !made.count(operand.serial)) read.insert(operand.serial);
    });
    for (const Product& product : call->products) made.insert(product.serial);
  }
  return {read.begin(), read.end()};
}

constexpr uint64_t kKeyPrime = 0x100000001B3ull;  // of a hash
constexpr size_t kMostCalls = 64;              // that one victim is made by

// The same for the same storage of another step: by which operators it is made, and which of their results it is.
uint64_t key_of(const Range* range, const std::vector<std::shared_ptr<Call>>& calls) {
  uint64_t key = kKeyPrime;
  auto add = [&](uint64_t value) { key = (key ^ value) * kKeyPrime; };
  for (const auto& call : calls) {
    add(static_cast<uint64_t>(call->number));
    add(std::hash<std::string>()(name_of(*call)));
    for (const Product& product : call->products)
      if (product.serial == range->serial) add(product.position);
  }
  add(static_cast<uint64_t>(range->bytes));
  return key;
}

}  // namespace

Remakes& remakes() {
  static Remakes* instance = new Remakes;
  return *instance;
}

// ---- giving up ----

bool Remakes::resolve(Recipe& recipe, const Range* range, const std::vector<std::shared_ptr<Call>>& calls) const {
  std::unordered_set<int64_t> made;
  for (const auto& call : calls)
    if (call)
      for (const Product& product : call->products) made.insert(product.serial);
  // From the last call to the first: only those that have a part in it.
  std::unordered_set<int64_t> needed = {range->serial};
  for (auto each = calls.rbegin(); each != calls.rend(); ++each) {
    if (!*each) continue;
    const Call& call = **each;
    bool has_part = std::any_of(call.products.begin(), call.products.end(), [&](const Product& product) {
      return needed.count(product.serial) > 0;
    });
    call.each_operand([&](const Operand& operand) {
      has_part |= operand.written && operand.serial && needed.count(operand.serial) > 0;
    });
    if (!has_part) continue;
    recipe.calls.push_back(*each);
    call.each_operand([&](const Operand& operand) {
      if (operand.serial && made.count(operand.serial)) needed.insert(operand.serial);
    });
  }
  std::reverse(recipe.calls.begin(), recipe.calls.end());
  // And forward: each of them finds what it was given.
  std::unordered_map<int64_t, int64_t> version_of;
  std::unordered_set<int64_t> reads;
  for (const auto& call : recipe.calls) {
    bool valid = call->finished;
    call->each_operand([&](const Operand& operand) {
      if (!operand.serial) return;
      auto fresh = version_of.find(operand.serial);
      if (fresh != version_of.end()) {
        valid &= fresh->second == operand.version;
        return;
      }
      const Range* read = ranges().of_serial(operand.serial);
      valid &= !operand.written && read && read != range && read->written_at == operand.version && read->lent == 0;
      reads.insert(operand.serial);
    });
    if (!valid) return false;
    call->each_operand([&](const Operand& operand) {
      if (operand.serial && operand.written) version_of[operand.serial] = call->stamp;
    });
    for (const Product& product : call->products) {
      version_of[product.serial] = call->stamp;
      if (product.serial == range->serial) recipe.nbytes = product.nbytes;
    }
  }
  auto found = version_of.find(range->serial);
  recipe.serial = range->serial;
  recipe.version = range->written_at;
  recipe.reads.assign(reads.begin(), reads.end());
  return recipe.nbytes > 0 && found != version_of.end() && found->second == range->written_at;
}

bool Remakes::discard(
    Range* range, int32_t tier, const Decision& decision, const std::vector<std::shared_ptr<Call>>& calls) {
  auto known = experience_.find(decision.key);
  auto recipe = std::make_shared<Recipe>();
  bool possible = (known == experience_.end() || known->second) && ranges().announcing && !range->foreign &&
      !range->recipe && !range->update && ranges().may_leave(range) && range->lent == 0 && resolve(*recipe, range, calls);
  if (!possible) {
    ++counted.refused;
    return false;
  }
  recipe->key = decision.key;
  recipe->trial = known == experience_.end();
  if (recipe->trial || ranges().verify) recipe->checksum = checksum_of(range->data, recipe->nbytes);
  if (recipe->trial) {
    if (!ranges().leave(range, tier)) return false;
    ++counted.trials;
    attach(range, std::move(recipe));
    return true;
  }
  if (!ranges().discard(range)) return false;
  counted.discarded += range->bytes;
  attach(range, std::move(recipe));
  return true;
}

void Remakes::attach(Range* range, std::shared_ptr<Recipe> recipe) {
  for (int64_t serial : recipe->reads) take_lien(ranges().of_serial(serial));
  if (!recipe->trial) neighbourhoods_.discarded(range->serial, static_cast<double>(own_ns(recipe->calls)), recipe->reads);
  range->recipe = std::move(recipe);
  ++recipes_;
}

void Remakes::take_lien(Range* range) {
  ++range->liens;
  ranges().protect(range);
}

void Remakes::give_lien(int64_t serial) {
  Range* range = ranges().of_serial(serial);
  if (--range->liens > 0 || !range->orphan) return;
  ranges().let_go(range);
}

void Remakes::forget(Range* range) {
  std::shared_ptr<Recipe> recipe = std::move(range->recipe);
  range->recipe = nullptr;
  if (!recipe) return;
  --recipes_;
  neighbourhoods_.remade(recipe->serial);
  for (int64_t serial : recipe->reads) give_lien(serial);
}

void Remakes::forget_trials() {
  std::vector<int64_t> tried;
  ranges().each([&](Range* range) {
    if (range->recipe && range->recipe->trial) tried.push_back(range->serial);
  });
  for (int64_t serial : tried)
    if (Range* range = ranges().of_serial(serial)) forget(range);
}

std::vector<int64_t> Remakes::dependents(Range* range) {
  std::vector<int64_t> found, tried;
  if (range->liens == 0) return found;
  ranges().each([&](Range* each) {
    if (!each->recipe || each->lost) return;
    const auto& reads = each->recipe->reads;
    if (std::find(reads.begin(), reads.end(), range->serial) == reads.end()) return;
    (each->recipe->trial ? tried : found).push_back(each->serial);
  });
  for (int64_t serial : tried) forget(ranges().of_serial(serial));  // its bytes are on its tier
  return found;
}

// ---- victims ----

std::vector<std::shared_ptr<Call>> Remakes::calls_for(const Range* range) const {
  std::map<int64_t, std::shared_ptr<Call>> found;  // by stamp: as they ran
  std::unordered_set<int64_t> seen;
  std::vector<int64_t> waiting = {range->serial};
  while (!waiting.empty()) {
    int64_t serial = waiting.back();
    waiting.pop_back();
    auto makers = makers_.find(serial);
    if (makers == makers_.end() || !seen.insert(serial).second) continue;
    for (const auto& call : makers->second) {
      if (!found.emplace(call->stamp, call).second) continue;
      if (found.size() > kMostCalls) return {};
      call->each_operand([&](const Operand& operand) {
        if (operand.serial && !ranges().of_serial(operand.serial)) waiting.push_back(operand.serial);
      });
    }
  }
  std::vector<std::shared_ptr<Call>> calls;
  for (auto& [stamp, call] : found) calls.push_back(std::move(call));
  return calls;
}

bool Remakes::is_makeable(const Range* range) const {
  if (range->wanted > 0 || range->foreign || range->recipe || range->update || range->lent > 0) return false;
  auto calls = calls_for(range);
  if (calls.empty()) return false;
  auto known = experience_.find(key_of(range, calls));
  Recipe recipe;
  return (known == experience_.end() || known->second) && resolve(recipe, range, calls);
}

double Remakes::cost_ns(const Range* range) const {
  auto calls = calls_for(range);
  return neighbourhoods_.cost_of(range->serial, static_cast<double>(own_ns(calls)), sources_of(calls));
}

bool Remakes::discard_victim(Range* range, int32_t tier) {
  if (!discards_victims || !is_makeable(range)) return false;
  auto calls = calls_for(range);
  Decision decision;
  decision.key = key_of(range, calls);
  if (!discard(range, tier, decision, calls)) return false;
  range->recipe->reactive = true;
  return true;
}

void Remakes::note_makers(const std::shared_ptr<Call>& call) {
  std::unordered_set<int64_t> made;
  for (const Product& product : call->products)
    if (made.insert(product.serial).second) makers_[product.serial] = {call};
  call->each_operand([&](const Operand& operand) {
    auto found = operand.written ? makers_.find(operand.serial) : makers_.end();
    if (found != makers_.end() && made.insert(operand.serial).second) found->second.push_back(call);
  });
}

void Remakes::forget_makers() {
  makers_.clear();
}

// ---- making ----

void Remakes::remake(const std::vector<int64_t>& serials) {
  if (serials.empty()) return;
  OneAtATime only;
  std::vector<std::shared_ptr<Recipe>> recipes;
  std::vector<int64_t> liens;
  std::vector<std::shared_ptr<Recipe>> trials;
  {
    std::lock_guard<std::mutex> guard(pages().mutex);
    // What they read may be discarded too.
    std::unordered_set<int64_t> seen;
    std::vector<int64_t> waiting = serials;
    while (!waiting.empty()) {
      Range* range = ranges().of_serial(waiting.back());
      waiting.pop_back();
      if (!range || !range->recipe || range->lost || !seen.insert(range->serial).second) continue;
      recipes.push_back(range->recipe);
      if (range->recipe->trial) trials.push_back(range->recipe);
      ++range->wanted;
      for (int64_t read : range->recipe->reads) {
        Range* source = ranges().of_serial(read);
        if (source->recipe && !source->recipe->trial) waiting.push_back(read);
        // Of this run: the range may be freed meanwhile, and its recipe with it.
        ++source->liens;
        ++source->wanted;
        liens.push_back(read);
      }
    }
  }
  if (recipes.empty()) return;
  int64_t began = now_ns();
  only_trying = trials.size() == serials.size();
  int error = run(recipes);
  bool tried = only_trying;
  only_trying = false;
  int64_t took = now_ns() - began;
  std::lock_guard<std::mutex> guard(pages().mutex);
  counted.ns += took;
  if (error == ENOMEM && tried) {
    // Another time, when there is more room: what is on trial is on its tier.
    for (const auto& recipe : trials)
      if (Range* range = ranges().of_serial(recipe->serial); range && range->recipe == recipe) forget(range);
  } else if (error == ENOMEM && !may_pass_budget) {
    // It can be tried again: what fails is the next allocation.
    ranges().note_trouble({ENOMEM, false, recipes.front()->nbytes, 0});
  } else if (error) {
    for (const auto& recipe : recipes) {
      Range* range = ranges().of_serial(recipe->serial);
      if (!range || range->recipe != recipe) continue;
      if (recipe->trial) {
        experience_[recipe->key] = false;
        forget(range);
      } else {
        range->lost = kNotRemade;
        ranges().note_trouble({kNotRemade, false, recipe->nbytes, 0});
      }
    }
  }
  for (const auto& recipe : recipes)
    if (Range* range = ranges().of_serial(recipe->serial)) --range->wanted;
  for (int64_t serial : liens) {
    --ranges().of_serial(serial)->wanted;
    give_lien(serial);
  }
  ranges().progress();
}

// What calls that ran again have made, in a block that nobody else holds (`is_alone`).
int Remakes::put(const Recipe& recipe, const void* made, int64_t nbytes, bool is_alone) {
  bool same = nbytes == recipe.nbytes;
  if (recipe.trial || ranges().verify)
    same = same && checksum_of(static_cast<const char*>(made), recipe.nbytes) == recipe.checksum;
  std::unique_lock<std::mutex> guard(pages().mutex);
  if (recipe.trial) experience_[recipe.key] = same;
  Range* range = ranges().of_serial(recipe.serial);
  if (!range || range->recipe.get() != &recipe) return 0;  // freed meanwhile
  if (recipe.trial) {
    forget(range);  // it comes back from its tier
    return 0;
  }
  Range* source = ranges().of_data(made);
  if (!same || !is_alone || !source || source->bytes != range->bytes) return kNotRemade;
  ranges().pin(source);
  bool here = ranges().bring_waiting(source, guard, true);
  range = ranges().of_serial(recipe.serial);
  bool wanted = here && range && range->recipe.get() == &recipe;
  if (wanted) {
    ranges().transplant(source, range);
    forget(range);
  }
  ranges().unpin(source);
  return here ? 0 : ENOMEM;
}

void Remakes::remake_all() {
  std::vector<int64_t> discarded;
  {
    std::lock_guard<std::mutex> guard(pages().mutex);
    forget_trials();
    if (!any()) return;
    ranges().each([&](Range* range) {
      if (range->recipe && !range->orphan) discarded.push_back(range->serial);
    });
  }
  // One by one: each may leave as soon as it is there.
  for (int64_t serial : discarded) remake({serial});
}

// ---- for those who cannot ----

void Remakes::ask(const std::vector<int64_t>& serials) {
  asked_.insert(asked_.end(), serials.begin(), serials.end());
  asked_changed_.notify_one();
}

void Remakes::abandon_in_child() {
  new (&one_at_a_time) std::mutex;
  new (&asked_changed_) std::condition_variable;
  asked_.clear();
  started_ = false;
}

void Remakes::start() {
  if (started_) return;
  started_ = true;
  std::thread([this] { help(); }).detach();
}

// See Note [Who runs calls again].
void Remakes::have_waiting(
    std::vector<int64_t> serials, std::unique_lock<std::mutex>& guard, bool may_be_refused) {
  if (serials.empty() || remaking) return;
  if (!in_parallel_region()) {
    guard.unlock();
    remake(serials);
    guard.lock();
    if (may_be_refused) return;
  }
  for (;;) {
    std::erase_if(serials, [](int64_t serial) {
      Range* range = ranges().of_serial(serial);
      return !range || !Ranges::is_discarded(range) || range->lost;
    });
    if (serials.empty()) return;
    ask(serials);
    ranges().change_waiting(guard, true);
  }
}

void Remakes::help() {
  may_pass_budget = true;
  use_usual_rounding();
  for (;;) {
    std::vector<int64_t> serials;
    {
      std::unique_lock<std::mutex> guard(pages().mutex);
      asked_changed_.wait(guard, [&] { return !asked_.empty(); });
      serials = std::move(asked_);
      asked_.clear();
    }
    for (int64_t serial : serials) updates().run_for(serial, true);
    remake(serials);
  }
}

}  // namespace lowtide
