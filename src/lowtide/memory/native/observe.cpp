// The log of a step: operators, allocations, operands and waits; in C++, so that watching a step
// hardly changes it. PyTorch's own observer interface (RecordFunction) reports every dispatched operator, forward,
// backward and optimizer, without changing how anything is dispatched.
//
// Note [Announcing]: before an operator runs, its operands are pinned and brought back; what it allocates is pinned too;
// when it ends, all of it may leave again. Views touch no bytes, and what is composed of other operators leaves it to
// them. A list of tensors too long for memory (a fused optimizer's) is not pinned: faults bring its tensors one by one.
//
// Note [Rows]: a kernel over several lists uses the tensors at one place of each of them at once, a row. Memory that cannot
// hold the largest row is refused like memory that cannot hold an operator's single operands: by faults alone, the tensors of
// a row would give each other up for every few elements.
#include "calls.h"
#include "remakes.h"
#include "schedule.h"
#include "updates.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <pthread.h>

#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace lowtide {

std::atomic<bool> logging{false};

namespace {

struct Entry {
  int32_t kind;
  int32_t thread;
  int64_t at_ns;
  int64_t a, b, c;
};
static_assert(sizeof(Entry) == 40);

constexpr size_t kMostEntries = 2'000'000;  // 80 MB: some hundred thousand operators

std::mutex log_mutex;
std::vector<Entry> entries;
std::unordered_map<std::string, int64_t> name_ids;
std::vector<std::string> names;
std::atomic<int32_t> thread_count{0};
std::atomic<bool> with_operands{false};
std::atomic<bool> interrupted_log{false};  // operators may have run unseen since it began

std::mutex observer_mutex;  // guards the next three
int observed = 0;           // the detail that lt_observe was asked for last
at::CallbackHandle handle = 0;
std::thread::id observing;  // who asked for it

int32_t thread_number() {
  thread_local int32_t number = thread_count++;
  return number;
}

thread_local std::vector<const char*> running;

int64_t name_id(const std::string& name) {
  auto found = name_ids.find(name);
  if (found != name_ids.end()) return found->second;
  int64_t id = static_cast<int64_t>(names.size());
  names.push_back(name);
  name_ids.emplace(name, id);
  return id;
}

void log_tensor(Event kind, const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!impl->has_storage() || impl->device_type() != c10::DeviceType::CPU) return;
  if (kind == Event::kRead && impl->is_wrapped_number()) return;  // a Python number, not memory that somebody made
  const c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (!storage) return;
  const auto& version = impl->version_counter();
  log_event(
      kind, serial_of(storage), version.enabled() ? version.current_version() : 0,
      static_cast<int64_t>(storage->nbytes()));
}

void log_value(Event kind, const c10::IValue& value) {
  if (value.isTensor()) {
    log_tensor(kind, value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) log_tensor(kind, tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor) log_tensor(kind, *tensor);
  }
}

// What the observer has to know of an operator, from its schema.
struct Facts {
  std::string name, overload;
  int64_t id = -1;
  bool computes = false;  // neither a view nor composed of others: an operator of a trace
  bool touches = false;   // and it reads or writes the bytes of what it is given
  bool goes_on = false;   // after it has returned, too: a collective, which the kernel reads and writes for
  size_t results = 0;
  std::vector<bool> writes;   // by argument
  std::vector<bool> changes;  // by argument: those, and what may be written though nothing says so
  Repeats repeats;
};

bool ends_with(const std::string& text, const char* end) {
  size_t n = std::strlen(end);
  return text.size() >= n && text.compare(text.size() - n, n, end) == 0;
}

Facts facts_from_schema(const at::RecordFunction& fn) {
  Facts facts;
  facts.name = fn.name();
  facts.overload = overload_of(fn);
  {
    std::lock_guard<std::mutex> guard(log_mutex);
    facts.id = name_id(facts.name);
  }
  auto name = fn.operator_name();
  if (!name || facts.name == "aten::empty") return facts;
  auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op) return facts;
  // Some have a kernel of their own besides (`silu_backward`).
  if (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
      !op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
    return facts;
  const auto& schema = op->schema();
  const auto& returns = schema.returns();
  bool view = !returns.empty() && std::all_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
  if (view) return facts;
  facts.computes = true;
  facts.results = returns.size();
  // These look at shapes only.
  facts.touches = !ends_with(facts.name, "_like") && facts.name.find("::new_") == std::string::npos;
  facts.goes_on = facts.name.compare(0, 6, "c10d::") == 0;
  facts.repeats = repeats_of(*op, !facts.touches);
  bool silent = facts.name.compare(0, 6, "aten::") != 0;  // collectives, for one, write what they do not say they write
  bool backward = ends_with(facts.name, "_backward");
  for (const auto& argument : schema.arguments()) {
    bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    bool statistics = !backward && argument.name().compare(0, 8, "running_") == 0;
    facts.writes.push_back(writes);
    facts.changes.push_back(writes || statistics || silent);
  }
  return facts;
}

// Schemas live as long as the process, and so do their names: a name's address tells the operator, if the text agrees.
const Facts& facts_of(const at::RecordFunction& fn) {
  thread_local std::unordered_map<const char*, Facts> known;
  const char* overload = overload_of(fn);
  auto found = known.find(fn.name());
  if (found != known.end() && found->second.name == fn.name() && found->second.overload == overload)
    return found->second;
  return known[fn.name()] = facts_from_schema(fn);
}

// What an operator holds until it ends.
struct Hold {
  Range* range;
  int64_t serial;
};

struct Use : at::ObserverContext {
  std::vector<Hold> holds;
  std::vector<Excerpt> excerpts;  // if it is the outermost; see Note [Excerpts]
  SlowUse slow;                // if it is the outermost, and some of its operands are in slow memory
  const SlowRates* rates = nullptr;
  int64_t began_ns = 0, stalled_ns = 0;
  bool computes = false;
  int64_t stamp = 0;           // of what it writes, if it is the outermost
  std::shared_ptr<Call> call;  // if it is to be run again
};

std::atomic<bool> touching{false};
std::string marked_module;              // guarded by log_mutex
std::atomic<int64_t> stress_one_in{0};  // for tests: one operator in so many makes everything leave
thread_local Use* outermost = nullptr;
thread_local uint64_t dice = 0x9E3779B97F4A7C15ull;

struct Touched {
  Range* range;
  int64_t serial;  // another thread may free it while this one waits
  bool writes, changes;
  bool demanded = false;  // it is away, and nobody has asked for it
  int64_t row = 0;        // its place in a list
};

// Large memory of CPU tensors that no range is, by address: it cannot leave, and is told (R6). With `pages().mutex` held.
std::unordered_set<const void*> strangers;

Range* range_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!impl->has_storage() || impl->device_type() != c10::DeviceType::CPU) return nullptr;
  const c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  // What was taken over from another allocator is a little smaller than its block; our own blocks of that size are no ranges.
  if (!storage || storage->nbytes() < static_cast<size_t>(kLarge / 2) || !storage->data()) return nullptr;
  Range* range = ranges().of_data(storage->data());
  bool large = storage->nbytes() >= static_cast<size_t>(kLarge);
  if (!range && large && strangers.size() < 4096) strangers.insert(storage->data());
  return range;
}

// With `pages().mutex` held.
void collect(
    const c10::IValue& value, bool writes, bool changes, std::vector<Touched>& single, std::vector<Touched>& listed) {
  auto add = [&](const at::Tensor& tensor, std::vector<Touched>& into, int64_t row = 0) {
    Range* range = range_of(tensor);
    if (!range) return;
    if (tensor.scalar_type() != at::kFloat) {
      range->mixed = true;
    } else if (!range->floats) {
      range->floats = true;
      range->used_bytes = static_cast<int64_t>(tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes());
    }
    into.push_back({range, range->serial, writes, changes, false, row});
  };
  int64_t row = 0;
  if (value.isTensor()) {
    add(value.toTensor(), single);
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) add(tensor, listed, row++);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor) add(*tensor, listed, row);
      ++row;
    }
  }
}

// See Note [Rows]. With `pages().mutex` held.
std::vector<Touched> largest_row(const std::vector<Touched>& listed, int64_t* most_bytes) {
  std::unordered_map<int64_t, std::vector<Touched>> rows;
  const std::vector<Touched>* largest = nullptr;
  for (const Touched& each : listed) rows[each.row].push_back(each);
  *most_bytes = 0;
  for (const auto& [place, row] : rows) {
    std::unordered_set<const Range*> counted;
    int64_t bytes = 0;
    for (const Touched& each : row)
      if (counted.insert(each.range).second) bytes += each.range->bytes;
    if (largest && bytes <= *most_bytes) continue;
    largest = &row;
    *most_bytes = bytes;
  }
  return largest ? *largest : std::vector<Touched>();
}

// Whether memory can hold all of `row` at one time. If so, it does for a moment.
bool fits_waiting(const std::vector<Touched>& row, std::unique_lock<std::mutex>& guard) {
  Ranges& all = ranges();
  bool here = true;
  for (const Touched& each : row) all.pin(each.range);
  for (const Touched& each : row)
    here = (Ranges::is_reachable(each.range) || all.bring_waiting(each.range, guard, true)) && here;
  for (const Touched& each : row)
    if (each.range->serial == each.serial) all.unpin(each.range);
  return here;
}

// Note what the outermost operator has in slow memory, and how far what it reads is in the cache. With `pages().mutex` held.
void note_slow(Use& use, Range* range, bool reads, bool writes) {
  Ranges& all = ranges();
  int32_t tier = all.slow_tier();
  if (tier < 0 || !all.tiers[tier].rates.charges()) return;
  use.rates = &all.tiers[tier].rates;
  if (range->noted_by == use.stamp) return;
  range->noted_by = use.stamp;
  bool slow = range->place == Place::kSlow;
  int64_t since = range->cached_at < 0 ? use.rates->cache_bytes : all.touched_bytes - range->cached_at;
  bool cached = since + range->bytes <= use.rates->cache_bytes;
  use.slow.add(static_cast<double>(range->bytes), reads, writes, slow, cached);
  all.touched_bytes += range->bytes;
  range->cached_at = all.touched_bytes;
}

bool is_gather(const char* name) {
  for (const char* gather : {"aten::embedding", "aten::index_select", "aten::gather", "aten::index"})
    if (std::strcmp(name, gather) == 0) return true;
  return false;
}

// See Note [Charging].
void charge(Use& use, const at::RecordFunction& fn) {
  if (!use.rates || !use.slow.operands) return;
  int64_t now = now_ns(), stalled = counters.stall_ns.load() - use.stalled_ns;
  int64_t due = charge_ns(*use.rates, use.slow, is_gather(fn.name()), std::max<int64_t>(0, now - use.began_ns - stalled));
  if (due > 0) pass_until(now + due);
  {
    std::lock_guard<std::mutex> guard(pages().mutex);
    ranges().counted.charged_ns += due;
    ++ranges().counted.in_place;
  }
  if (due > 0 && logging.load(std::memory_order_relaxed)) log_event(Event::kStall, due);
}

// When the step's first operator began that autograd follows; 0: none has.
std::atomic<int64_t> grad_began_ns{0};

// A boxed caller, TorchScript's interpreter for one, shows its whole stack: the operator's own are the last of it.
c10::ArrayRef<const c10::IValue> arguments_of(const at::RecordFunction& fn, const Facts& facts) {
  auto stack = fn.inputs();
  size_t count = facts.writes.size();
  return facts.computes && stack.size() > count ? stack.slice(stack.size() - count) : stack;
}

bool is_followed(const at::RecordFunction& fn) {
  if (!c10::GradMode::is_enabled()) return false;
  for (const auto& value : fn.inputs())
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().requires_grad()) return true;
  return false;
}

// For tests: every call that can run again does so at once, and is compared.
std::atomic<bool> checking_calls{false};

// What must be made before an operator may begin.
struct Due {
  std::vector<int64_t> used;      // by itself
  std::vector<int64_t> tried;     // the same, and they are on their tiers too
  std::vector<int64_t> computed;  // from what it changes
};

Due due_before(const std::vector<Touched>& single, const std::vector<Touched>& listed) {
  Due due;
  if (!remakes().any()) return due;
  for (const auto* touched : {&single, &listed})
    for (const Touched& each : *touched) {
      const Recipe* recipe = each.range->recipe.get();
      if (recipe && !recipe->trial && !each.range->lost) due.used.push_back(each.serial);
      if (recipe && recipe->trial && recipe->reactive) due.tried.push_back(each.serial);
      if (!each.changes) continue;
      std::vector<int64_t> dependents = remakes().dependents(each.range);
      due.computed.insert(due.computed.end(), dependents.begin(), dependents.end());
    }
  return due;
}

const Excerpt* excerpt_of(const Use* use, const void* data) {
  if (!use) return nullptr;
  for (const Excerpt& excerpt : use->excerpts)
    if (excerpt.data == data) return &excerpt;
  return nullptr;
}

bool is_excerpted(const c10::IValue& value) {
  if (!outermost || outermost->excerpts.empty() || !value.isTensor() || !value.toTensor().defined()) return false;
  const at::Tensor& tensor = value.toTensor();
  return tensor.has_storage() && excerpt_of(outermost, tensor.storage().data());
}

// The pages of the rows that `indices` look up. False: it cannot be told.
bool add_rows(Excerpt& excerpt, const at::Tensor& table, const at::Tensor& indices) {
  constexpr int64_t kMost = 4096;
  if (!indices.defined() || !indices.device().is_cpu() || indices.layout() != at::kStrided || !indices.is_contiguous())
    return false;
  bool wide = indices.scalar_type() == at::kLong;
  if ((!wide && indices.scalar_type() != at::kInt) || indices.numel() > kMost) return false;
  if (table.dim() < 1 || !table.is_contiguous() || table.numel() == 0) return false;
  // Memory that could be away itself is not looked at here, under a lock that its fault would need.
  if (indices.storage().nbytes() >= static_cast<size_t>(kLarge / 2)) return false;
  int64_t rows = table.size(0), row = static_cast<int64_t>(table.nbytes()) / rows;
  int64_t first = table.storage_offset() * static_cast<int64_t>(table.itemsize());
  const void* data = indices.const_data_ptr();
  for (int64_t i = 0; i < indices.numel(); ++i) {
    int64_t index = wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
    if (index < 0 || index >= rows) return false;  // the operator's error
    add_bytes(excerpt, first + index * row, first + (index + 1) * row);
  }
  join_runs(excerpt.runs);
  return true;
}

// The pages that a tensor which is a slice of its storage lies in.
void add_slice(Excerpt& excerpt, const at::Tensor& slice) {
  int64_t last = 0;
  for (int64_t i = 0; i < slice.dim(); ++i) last += (slice.size(i) - 1) * slice.stride(i);
  auto itemsize = static_cast<int64_t>(slice.itemsize());
  add_bytes(excerpt, slice.storage_offset() * itemsize, (slice.storage_offset() + last + 1) * itemsize);
}

// The tables and blocks of which an operator reads a part only: it has no other operand in them, and changes none.
std::vector<Excerpt> excerpts_of(
    const at::RecordFunction& fn, c10::ArrayRef<const c10::IValue> inputs, const std::vector<Touched>& single,
    const std::vector<Touched>& listed) {
  std::vector<Excerpt> found;
  size_t indices = std::strcmp(fn.name(), "aten::embedding") == 0 ? 1
      : std::strcmp(fn.name(), "aten::index_select") == 0          ? 2
                                                                  : 0;
  bool of_rows = indices == 1 || (indices == 2 && inputs.size() > 1 && inputs[1].isInt() && inputs[1].toInt() == 0);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].isTensor()) continue;
    const at::Tensor& tensor = inputs[i].toTensor();
    Range* range = range_of(tensor);
    if (!range || !ranges().has_excerpts(range) || tensor.layout() != at::kStrided || tensor.numel() == 0) continue;
    if (range->place != Place::kAway && range->place != Place::kHere) continue;
    auto is_it = [&](const Touched& each) { return each.range == range; };
    auto once = std::find_if(single.begin(), single.end(), is_it);
    if (once == single.end() || once->changes || std::any_of(std::next(once), single.end(), is_it) ||
        std::any_of(listed.begin(), listed.end(), is_it))
      continue;
    Excerpt excerpt{range, range->serial, range->data, of_rows && i == 0, {}};
    if (excerpt.rows) {
      bool known = indices < inputs.size() && inputs[indices].isTensor() &&
          add_rows(excerpt, tensor, inputs[indices].toTensor());
      if (known && is_worth(excerpt, 2)) found.push_back(std::move(excerpt));
    } else {
      add_slice(excerpt, tensor);
      if (is_worth(excerpt, 5) && !ranges().all_fits()) found.push_back(std::move(excerpt));
    }
  }
  return found;
}

// Hold what an operator needs only a part of, and take it out of what is brought back whole.
void excerpt(
    const at::RecordFunction& fn, c10::ArrayRef<const c10::IValue> inputs, std::vector<Touched>& single,
    const std::vector<Touched>& listed, Use& use, std::unique_lock<std::mutex>& guard) {
  std::vector<Excerpt> wanted = excerpts_of(fn, inputs, single, listed);
  for (Excerpt& each : wanted) {
    ranges().pin(each.range);
    bool held = each.range->place == Place::kHere || ranges().excerpt_waiting(each, guard);
    if (held) {
      use.excerpts.push_back(each);
      std::erase_if(single, [&](const Touched& touched) { return touched.range == each.range; });
    } else if (each.range->serial == each.serial) {
      ranges().unpin(each.range);
    }
  }
}

// See Note [Announcing].
void announce(const at::RecordFunction& fn, const Facts& facts, Use& use) {
  Ranges& all = ranges();
  thread_local std::vector<Touched> single, listed;
  std::unique_lock<std::mutex> guard(pages().mutex);
  bool begins = !outermost && facts.computes;
  bool of_step = begins && !remaking && schedule().in_step();
  if (begins) use.stamp = ++all.write_clock;
  if (of_step) {
    if (!grad_began_ns && is_followed(fn)) grad_began_ns = now_ns();
    remakes().have_waiting(schedule().on_operator(facts.id), guard, true);
    schedule().migrations_waiting(guard);
    int64_t one_in = stress_one_in.load(std::memory_order_relaxed);
    dice = dice * 6364136223846793005ull + 1442695040888963407ull;
    if (one_in && (dice >> 33) % one_in == 0) all.leave_all();
  }
  // Of forward only: what backward makes from it would keep all of it.
  bool remembers_all = of_step && remakes().discards_victims && c10::GradMode::is_enabled();
  bool remembers = (of_step && schedule().remembers()) || remembers_all || (begins && !remaking && checking_calls);
  if (!facts.touches || !all.announcing) {
    if (remembers && all.announcing) use.call = remember(fn, facts.repeats, use.stamp, schedule().operators());
    if (of_step) schedule().on_call(use.call);
    return;
  }
  auto inputs = arguments_of(fn, facts);
  for (bool refused = false;;) {
    single.clear();
    listed.clear();
    for (size_t i = 0; i < inputs.size(); ++i)
      collect(
          inputs[i], i < facts.writes.size() && facts.writes[i], i < facts.changes.size() && facts.changes[i], single,
          listed);
    Due due = due_before(single, listed);
    if (remaking || (due.computed.empty() && due.tried.empty() && (due.used.empty() || refused))) break;
    refused = !due.used.empty();
    std::vector<Touched> wanted = single;  // what is here must not be discarded for what is not
    wanted.insert(wanted.end(), listed.begin(), listed.end());
    for (const Touched& each : wanted) ++each.range->wanted;
    remakes().have_waiting(std::move(due.tried), guard, true);
    remakes().have_waiting(std::move(due.used), guard, true);
    remakes().have_waiting(std::move(due.computed), guard, false);
    for (const Touched& each : wanted)
      if (each.range->serial == each.serial) --each.range->wanted;
  }
  if (remembers) use.call = remember(fn, facts.repeats, use.stamp, schedule().operators());
  if (of_step) schedule().on_call(use.call);
  if (begins && !remaking && !remembers && !c10::GradMode::is_enabled())
    excerpt(fn, inputs, single, listed, use, guard);
  else if (outermost && !outermost->excerpts.empty())
    std::erase_if(single, [](const Touched& each) { return !each.changes && excerpt_of(outermost, each.range->data); });
  int64_t stamp = outermost ? outermost->stamp : begins ? use.stamp : ++all.write_clock;
  int64_t list_bytes = 0;
  for (const Touched& operand : listed) {
    list_bytes += operand.range->bytes;
    if (operand.changes) all.note_write(operand.range, stamp);
  }
  for (const Touched& operand : single)
    if (operand.changes) all.note_write(operand.range, stamp);
  int64_t budget = counters.budget.load(std::memory_order_relaxed);
  if (!budget || list_bytes <= budget / 2 || facts.goes_on) {
    single.insert(single.end(), listed.begin(), listed.end());
  } else {
    int64_t row_bytes = 0;
    std::vector<Touched> row = largest_row(listed, &row_bytes);
    // What does not fit is pinned: faults then pass the budget, which is raised.
    bool whole = row.size() == listed.size();
    if (whole || (row_bytes > budget / 4 && !fits_waiting(row, guard))) single.insert(single.end(), row.begin(), row.end());
    if (begins && !whole)
      for (const Touched& operand : listed) note_slow(use, operand.range, true, operand.writes);
  }
  if (single.empty()) return;
  ++all.counted.touches;
  for (const Touched& operand : single) {
    all.pin(operand.range);
    if (facts.goes_on)
      ++operand.range->lent;  // the kernel writes there when nobody is told
    else
      use.holds.push_back({operand.range, operand.serial});
  }
  for (Touched& operand : single) {
    operand.demanded = operand.range->place == Place::kAway;
    if (operand.demanded) all.prefetch(operand.range);  // all of them at once, where there is room
  }
  for (const Touched& operand : single) {
    int64_t waited_ns = 0;
    bool here = Ranges::is_reachable(operand.range) || all.bring_waiting(operand.range, guard, true, &waited_ns);
    if (!here || operand.range->serial != operand.serial) continue;
    all.touch(operand.range, operand.writes);
    if (begins) note_slow(use, operand.range, true, operand.writes);
    if (waited_ns && !remaking && schedule().in_step())
      schedule().on_wait(operand.range, waited_ns, operand.demanded);
  }
  all.read_on();
}

// ---- calls that are checked ----

struct Checked {
  int64_t same = 0, other = 0, failed = 0;
  std::vector<std::string> names;  // of those that are not the same
};
std::mutex checked_mutex;
Checked checked;

bool is_same(const at::Tensor& one, const at::Tensor& other) {
  if (!one.defined() || !other.defined()) return one.defined() == other.defined();
  if (one.sizes() != other.sizes() || one.scalar_type() != other.scalar_type() || one.layout() != other.layout())
    return false;
  if (one.layout() != at::kStrided || one._is_zerotensor()) return true;
  if (one.strides() != other.strides() || one.is_conj() != other.is_conj() || one.is_neg() != other.is_neg())
    return false;
  c10::InferenceMode plain(false);
  at::NoGradGuard no_grad;
  at::Tensor a = one.resolve_conj().resolve_neg().contiguous(), b = other.resolve_conj().resolve_neg().contiguous();
  return a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

void check(const Call& call, const at::RecordFunction& fn) {
  bool large = false;
  call.each_operand([&](const Operand& operand) { large |= operand.serial != 0; });
  bool raised = fn.outputs().size() != call.op->schema().returns().size();
  if (large || raised) return;
  std::vector<at::Tensor> outputs, again;
  for (const auto& value : fn.outputs())
    each_tensor(value, [&](const at::Tensor& tensor) { outputs.push_back(tensor); });
  Aside aside;
  remaking = true;
  int64_t Checked::*result = &Checked::same;
  try {
    again = run_again(call, [](const Operand&) { return c10::Storage(); });
    bool same = again.size() == outputs.size();
    for (size_t i = 0; same && i < again.size(); ++i) same = is_same(outputs[i], again[i]);
    if (!same) result = &Checked::other;
  } catch (const std::exception&) {
    result = &Checked::failed;
  }
  again.clear();
  remaking = false;
  std::lock_guard<std::mutex> guard(checked_mutex);
  ++(checked.*result);
  if (result != &Checked::same) checked.names.emplace_back(fn.name());
}

// Run the updates that were put off and that an operator's operands wait for.
void run_updates_before(const at::RecordFunction& fn) {
  const Facts& facts = facts_of(fn);
  if (!facts.touches) return;
  std::vector<std::shared_ptr<Update>> due;
  {
    std::lock_guard<std::mutex> guard(pages().mutex);
    if (!ranges().announcing) return;
    auto inputs = arguments_of(fn, facts);
    for (size_t i = 0; i < inputs.size(); ++i)
      each_tensor(inputs[i], [&](const at::Tensor& tensor) {
        Range* range = range_of(tensor);
        auto update = range ? updates().due(range, i < facts.changes.size() && facts.changes[i]) : nullptr;
        if (update && std::find(due.begin(), due.end(), update) == due.end()) due.push_back(std::move(update));
      });
  }
  for (const auto& update : due) updates().run(update);
}

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& fn) {
  bool log = logging.load(std::memory_order_relaxed), touch = touching.load(std::memory_order_relaxed);
  bool program = touch && !putting_off && !updating && !at::in_parallel_region();
  if (program && updates().any() && fn.scope() == at::RecordScope::FUNCTION) run_updates_before(fn);
  running.push_back(fn.name());
  if ((!log && !touch) || putting_off) return nullptr;
  bool function = fn.scope() == at::RecordScope::FUNCTION;
  const Facts& facts = facts_of(fn);
  if (log) log_event(Event::kOpBegin, facts.id, static_cast<int64_t>(fn.scope()), touch ? (facts.computes ? 1 : 2) : 0);
  std::unique_ptr<Use> use;
  if (touch && function) {
    use = std::make_unique<Use>();
    use->computes = facts.computes;
    announce(fn, facts, *use);
    if (!outermost && facts.computes) {
      outermost = use.get();
      use->stalled_ns = counters.stall_ns.load();
      use->began_ns = now_ns();
    }
  }
  if (log && with_operands && function && (!touch || facts.touches || !facts.computes))
    for (const auto& value : arguments_of(fn, facts))
      if (!is_excerpted(value)) log_value(Event::kRead, value);
  return use;
}

void end_use(Use& use, const at::RecordFunction& fn) {
  if (use.call && checking_calls) check(*use.call, fn);
  bool ends = outermost == &use;
  if (ends) outermost = nullptr;
  if (ends && !remaking) charge(use, fn);
  if (use.holds.empty() && use.excerpts.empty() && !ends) return;
  Ranges& all = ranges();
  std::lock_guard<std::mutex> guard(pages().mutex);
  if (ends && !remaking && schedule().in_step()) schedule().on_operator_end();
  if (use.call) {
    note_products(*use.call, fn);
    int64_t stalled = counters.stall_ns.load() - use.stalled_ns;
    use.call->ns = std::max<int64_t>(0, now_ns() - use.began_ns - stalled);
    if (remakes().discards_victims && use.call->finished && schedule().in_step()) remakes().note_makers(use.call);
  }
  for (const Excerpt& excerpt : use.excerpts) {
    all.end_excerpt(excerpt);
    if (excerpt.range->serial == excerpt.serial) all.unpin(excerpt.range);
  }
  for (const Hold& hold : use.holds)
    if (hold.range->serial == hold.serial) all.unpin(hold.range);
}

void on_end(const at::RecordFunction& fn, at::ObserverContext* context) {
  if (context) end_use(*static_cast<Use*>(context), fn);
  // Not always the last: a range of the user's is opened inside an operator that ends before it does.
  for (size_t at = running.size(); at-- > 0;)
    if (running[at] == fn.name() || std::strcmp(running[at], fn.name()) == 0) {
      running.erase(running.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    }
  if (logging.load(std::memory_order_relaxed) && !putting_off) {
    if (with_operands && fn.scope() == at::RecordScope::FUNCTION) {
      const Facts& facts = facts_of(fn);
      const auto& stack = fn.outputs();
      size_t first = facts.computes && stack.size() > facts.results ? stack.size() - facts.results : 0;
      for (size_t i = first; i < stack.size(); ++i)
        if (!is_excerpted(stack[i])) log_value(Event::kWrite, stack[i]);  // a view of it, inside its operator
    }
    int64_t id;
    {
      std::lock_guard<std::mutex> guard(log_mutex);
      id = name_id(fn.name());
    }
    log_event(Event::kOpEnd, id, static_cast<int64_t>(fn.scope()));
  }
}

// Guarded by observer_mutex.
void add_observer() {
  if (observed == 0) return;
  bool operands = observed == 2;
  handle = at::addGlobalCallback(at::RecordFunctionCallback(&on_begin, &on_end)
                                     .needsInputs(operands)
                                     .needsOutputs(operands)
                                     .scopes({at::RecordScope::FUNCTION,
                                              at::RecordScope::BACKWARD_FUNCTION,
                                              at::RecordScope::USER_SCOPE}));
}

// Guarded by observer_mutex.
void remove_observer() {
  if (handle) at::removeCallback(handle);
  handle = 0;
}

// Note [Observers and forks]: PyTorch copies its list of observers under a lock of its own, at the first operator of a
// thread, after a change, and at every node of backward. A list with an observer is copied to the heap; fork() makes the
// heap read-only before it reaches that lock's page, so a thread that copies meanwhile waits for the fork with the lock
// held, and the child finds it locked for ever at its first operator. An empty list is copied without touching the heap.
// So there is no observer during a fork. The operators of other threads that begin meanwhile are not seen, and nobody
// may plan from such a log; where the observed thread forks itself, it runs none meanwhile.
void withdraw_for_fork() {
  observer_mutex.lock();
  if (std::this_thread::get_id() != observing) interrupted_log = true;
  remove_observer();
  at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);  // so that the child need not, at its first operator
}
void return_after_fork() {
  add_observer();
  observer_mutex.unlock();
}
void forget_observer() {
  observed = 0;  // the parent's log: nobody reads it here
  observer_mutex.unlock();
}

}  // namespace

void log_event(Event kind, int64_t a, int64_t b, int64_t c) {
  if (remaking) return;  // none of it is the program's doing
  Entry entry{static_cast<int32_t>(kind), thread_number(), now_ns(), a, b, c};
  std::lock_guard<std::mutex> guard(log_mutex);
  if (!logging) return;  // it was stopped meanwhile, and somebody has counted the entries
  if (entries.size() < kMostEntries)
    entries.push_back(entry);
  else
    logging = false;  // not a training step: nobody plans from this
}

void lock_log_for_fork() {
  log_mutex.lock();
}
void unlock_log_after_fork() {
  log_mutex.unlock();
}

int32_t birth_tier(int64_t bytes) {
  bool planned = touching.load(std::memory_order_relaxed) && bytes >= kLarge && !remaking;
  return planned && schedule().in_step() ? schedule().birth_tier(bytes) : -1;
}

void note_made(Range* range) {
  range->written_at = outermost ? outermost->stamp : ++ranges().write_clock;
  if (outermost) {
    ranges().pin(range);
    outermost->holds.push_back({range, range->serial});
    note_slow(*outermost, range, false, true);
  }
  if (touching.load(std::memory_order_relaxed) && range->bytes >= kLarge && !remaking &&
      schedule().in_step())
    schedule().on_born(range);
}

Aside::Aside() : outermost_(outermost) {
  outermost = nullptr;
}
Aside::~Aside() {
  outermost = static_cast<Use*>(outermost_);
}

const char* current_op() {
  // An update that was put off runs before an operator that others may run in.
  auto is_step = [](const char* name) { return std::strncmp(name, "Optimizer.step#", 15) == 0; };
  auto begin = std::find_if(running.rbegin(), running.rend(), is_step).base();
  if (begin == running.end()) begin = running.begin();
  for (auto name = begin; name != running.end(); ++name)
    if (std::strstr(*name, "::") && std::strncmp(*name, "autograd::", 10) != 0) return *name;
  return running.empty() ? "" : running.back();
}

std::string current_module() {
  bool in_backward = std::any_of(
      running.begin(), running.end(), [](const char* name) { return std::strncmp(name, "autograd::", 10) == 0; });
  std::lock_guard<std::mutex> guard(log_mutex);
  return in_backward ? std::string() : marked_module;
}

bool autograd_has_begun() {
  return grad_began_ns.load(std::memory_order_relaxed) != 0;
}

const char* current_optimizer() {
  for (const char* name : running)
    if (std::strncmp(name, "Optimizer.step#", 15) == 0) return name + 15;
  return "";
}

}  // namespace lowtide

using namespace lowtide;

extern "C" {

// Watch operators: 0 not at all, 1 only which one runs, 2 with their operands.
void lt_observe(int detail) {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(&withdraw_for_fork, &return_after_fork, &forget_observer); });
  running.clear();
  std::lock_guard<std::mutex> guard(observer_mutex);
  observing = std::this_thread::get_id();
  if (detail == observed) return;  // every thread copies the list after a change
  remove_observer();
  observed = detail;
  with_operands = detail == 2;
  add_observer();
}

void lt_log_start() {
  {
    std::lock_guard<std::mutex> guard(log_mutex);
    entries.clear();
    entries.reserve(1 << 16);
  }
  interrupted_log = false;
  logging = true;
  if (!touching) return;
  std::lock_guard<std::mutex> guard(pages().mutex);
  ranges().each([](Range* range) { log_event(Event::kExists, range->serial, range->block); });
}

// When the running step's first operator began that autograd follows, by the clock of the log; 0: none has.
int64_t lt_grad_began_ns() {
  return grad_began_ns;
}

void lt_grad_forget() {
  grad_began_ns = 0;
}

// Announce operators' operands to their ranges, or do not.
void lt_touch(int on) {
  touching = on != 0;
}

// How many blocks of other allocators operators have used since the last call.
int64_t lt_take_strangers() {
  std::lock_guard<std::mutex> guard(pages().mutex);
  auto count = static_cast<int64_t>(strangers.size());
  strangers.clear();
  return count;
}

// For tests: one operator in `one_in` makes everything leave that may (0: none).
void lt_stress(int64_t one_in, uint64_t seed) {
  stress_one_in = one_in;
  dice = seed * 2 + 1;
}

// For tests: run every call that can be run again once more, at once, on small operands; or stop that.
void lt_check_calls(int on) {
  checking_calls = on != 0;
}

// Calls that made the same again, something else, or failed, since the last time. Returns the names of the last two, each
// with an end of line, as far as they fit.
void lt_take_checked(int64_t* out, char* names, int64_t bytes) {
  std::lock_guard<std::mutex> guard(checked_mutex);
  int64_t values[] = {checked.same, checked.other, checked.failed};
  std::memcpy(out, values, sizeof(values));
  std::string all;
  for (const std::string& name : checked.names) all += name + "\n";
  std::snprintf(names, bytes, "%s", all.c_str());
  checked = Checked{};
}

int64_t lt_name_id(const char* name) {
  std::lock_guard<std::mutex> guard(log_mutex);
  return name_id(name);
}

// Stop; the entries stay until the next start. Returns how many there are, or -1 if they are not all: there was no room,
// or another thread forked.
int64_t lt_log_stop() {
  logging = false;
  std::lock_guard<std::mutex> guard(log_mutex);
  bool whole = entries.size() < kMostEntries && !interrupted_log;
  return whole ? static_cast<int64_t>(entries.size()) : -1;
}

void lt_log_copy(void* out) {
  std::lock_guard<std::mutex> guard(log_mutex);
  std::memcpy(out, entries.data(), entries.size() * sizeof(Entry));
}

void lt_log_clear() {
  std::lock_guard<std::mutex> guard(log_mutex);
  std::vector<Entry>().swap(entries);
}

int64_t lt_name_count() {
  std::lock_guard<std::mutex> guard(log_mutex);
  return static_cast<int64_t>(names.size());
}

void lt_name(int64_t id, char* out, int64_t bytes) {
  std::lock_guard<std::mutex> guard(log_mutex);
  std::snprintf(out, bytes, "%s", names.at(id).c_str());
}

void lt_mark_module(const char* name) {
  if (!logging.load(std::memory_order_relaxed)) return;
  int64_t id;
  {
    std::lock_guard<std::mutex> guard(log_mutex);
    id = name_id(name);
    marked_module = name;
  }
  log_event(Event::kModule, id);
}
}
