// See updates.h.
#include "updates.h"

#include "calls.h"
#include "remakes.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <cstring>

namespace lowtide {

thread_local bool putting_off = false;
thread_local bool updating = false;

struct Held {
  std::unordered_map<int64_t, c10::Storage> storages;  // by serial
  std::unordered_map<int64_t, c10::Storage> made;      // in passing, by the serial of what is vacant
};

namespace {

using c10::DispatchKey;

// PyTorch keeps this key for modes of its tests: whoever includes it on a thread is called before every operator, natively,
// and no formula of autograd's depends on it.
constexpr DispatchKey kPutOffKey = DispatchKey::TESTING_ONLY_GenericMode;

// Sets a flag of this thread for its lifetime.
class Flag {
 public:
  Flag(bool& flag, bool value) : flag_(flag), before_(flag) {
    flag_ = value;
  }
  ~Flag() {
    flag_ = before_;
  }
  Flag(const Flag&) = delete;

 private:
  bool& flag_;
  bool before_;
};

bool begins_with(const std::string& text, const char* begin) {
  return text.compare(0, std::strlen(begin), begin) == 0;
}

// Operators that may be put off: what they do to an element depends on the same element of others only, so that what they
// make looks as what they are given says.
bool is_elementwise(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (begins_with(name, "aten::_fused_ada") || name == "aten::_fused_sgd_") return true;
  if (begins_with(name, "aten::_foreach_"))
    return !begins_with(name, "aten::_foreach_norm") && !begins_with(name, "aten::_foreach_powsum") &&
        name != "aten::_foreach_max";
  return begins_with(name, "aten::") && op.hasTag(at::Tag::pointwise) && !op.hasTag(at::Tag::nondeterministic_seeded);
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

bool is_tensors(const c10::TypePtr& type) {
  return type->isSubtypeOf(*c10::TensorType::get()) || type->isSubtypeOf(*c10::ListType::ofTensors());
}

// What the schema says of an operator that may be put off; without `op`: it may not.
const Repeats& elementwise(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, Repeats> known;
  auto [found, fresh] = known.try_emplace(&op.schema());
  Repeats& repeats = found->second;
  if (!fresh) return repeats;
  const auto& schema = op.schema();
  bool tensors = std::all_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    return is_tensors(result.type()) && (!result.alias_info() || result.alias_info()->isWrite());
  });
  for (const c10::Argument& argument : schema.arguments()) repeats.writes.push_back(is_written(argument));
  if (tensors && is_elementwise(op)) repeats.op = std::make_shared<const c10::OperatorHandle>(op);
  return repeats;
}

// What the operator would make of tensors like these, without any bytes.
std::vector<at::Tensor> shapes_of_results(const c10::OperatorHandle& op, c10::ArrayRef<const c10::IValue> inputs) {
  at::DisableRecordFunctionGuard unseen;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto shape = [](const at::Tensor& tensor) {
    // Numbers take part in another way than tensors of no dimension do.
    if (!tensor.defined() || tensor.dim() == 0) return tensor;
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
  };
  torch::jit::Stack stack;
  for (const c10::IValue& value : inputs) {
    if (value.isTensor()) {
      stack.emplace_back(shape(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(shape(tensor));
      stack.emplace_back(std::move(list));
    } else {
      stack.push_back(value);
    }
  }
  op.callBoxed(&stack);
  std::vector<at::Tensor> shapes;
  for (const c10::IValue& value : stack)
    each_tensor(value, [&](const at::Tensor& tensor) { shapes.push_back(tensor); });
  return shapes;
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

Range* range_behind(const at::Tensor& tensor) {
  const c10::StorageImpl* storage = storage_of(tensor);
  return storage->nbytes() >= static_cast<size_t>(kLarge / 2) && storage->data() ? ranges().of_data(storage->data())
                                                                                 : nullptr;
}

// Whether Python has an object for a storage that nobody in Python holds: it counts as a use of it (torch 2.10 on).
template <typename Slot>
bool is_idle_object(const Slot* slot) {
  if constexpr (requires { slot->has_unique_reference(); })
    return slot->has_unique_reference();
  else
    return false;
}

// Whether anybody holds it besides the one update that does.
bool is_held_by_others(const c10::Storage& storage) {
  size_t idle = is_idle_object(storage.unsafeGetStorageImpl()->pyobj_slot()) ? 1 : 0;
  return storage.use_count() > 1 + idle;
}

// What an operator that writes returns: the arguments that it has written to.
c10::IValue written_result(
    const c10::FunctionSchema& schema, const c10::Argument& result, c10::ArrayRef<const c10::IValue> inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite() && alias->beforeSets() == result.alias_info()->beforeSets()) return inputs[i];
  }
  return {};
}

Settings settings_below() {
  Settings settings = Settings::now();
  const c10::DispatchKeySet ours(kPutOffKey);
  settings.keys.included_ = settings.keys.included_ - ours;
  settings.keys.excluded_ = settings.keys.excluded_ - ours;
  return settings;
}

void bar(Range* range) {
  if (range->barred) return;
  range->barred = true;
  if (range->place == Place::kHere && mprotect(range->start, range->bytes, PROT_NONE) != 0) std::abort();
}

void unbar(Range* range) {
  if (!range->barred) return;
  range->barred = false;
  int access = range->writable ? PROT_READ | PROT_WRITE : PROT_READ;
  if (range->place == Place::kHere && mprotect(range->start, range->bytes, access) != 0) std::abort();
}

void put_off_or_run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(kPutOffKey);
  Flag at_once(putting_off, false);
  if (!updates().put_off(op, *stack)) op.callBoxed(stack);
}

// Whether an update may use a range, and write it.
bool is_fit(const Range* range, bool written) {
  bool idle = !range->update || (!range->update->running && range->update->next == 0);
  // Of another allocator's block the first and the last page are others' too, and cannot be barred.
  bool ours = !range->foreign && range->lent == 0 && !range->lost && !range->recipe && !range->filled &&
      range->place != Place::kSlow && !pages().is_of_file(range->start);
  return idle && ours && (!written || range->liens == 0 || range->update);
}

// What a call is given.
struct Given {
  Held ranges;
  std::vector<at::Tensor> written;
};

// False: the call has to run.
bool collect(Given& given, c10::ArrayRef<const c10::IValue> inputs, const Repeats& how) {
  if (!ranges().running() || !ranges().announcing || ranges().slow_tier() >= 0 || in_forked_child()) return false;
  bool fit = true;
  for (size_t i = 0; i < inputs.size(); ++i)
    each_tensor(inputs[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !fit) return;
      bool plain = is_plain(tensor);
      Range* range = plain ? range_behind(tensor) : nullptr;
      fit = range ? is_fit(range, how.writes[i]) : plain && !how.writes[i];
      if (range) given.ranges.storages.emplace(range->serial, tensor.storage());
      if (how.writes[i]) given.written.push_back(tensor);
    });
  return fit && !given.ranges.storages.empty();
}

// What the call makes, with addresses and without bytes; see Note [Vacant]. Throws where there is no room for addresses.
std::vector<at::Tensor> vacant_results(const c10::OperatorHandle& op, c10::ArrayRef<const c10::IValue> inputs) {
  Aside aside;
  Flag unseen(remaking, true);
  std::vector<at::Tensor> results;
  for (const at::Tensor& shape : shapes_of_results(op, inputs)) {
    results.push_back(at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(c10::kCPU)));
    std::lock_guard<std::mutex> guard(pages().mutex);
    Range* range = range_behind(results.back());
    TORCH_CHECK(range && !range->foreign && ranges().discard(range), "lowtide: too small to be put off");
    range->vacant = true;
  }
  return results;
}

}  // namespace

Updates& updates() {
  static Updates* instance = new Updates;
  return *instance;
}

// ---- putting off ----

bool Updates::put_off(const c10::OperatorHandle& op, std::vector<c10::IValue>& stack) {
  const Repeats& how = elementwise(op);
  if (!how.op || c10::GradMode::is_enabled() || stack.size() < how.writes.size()) return false;
  const auto& schema = op.schema();
  size_t count = how.writes.size();
  c10::ArrayRef<const c10::IValue> inputs(stack.data() + (stack.size() - count), count);
  Given given;
  std::vector<at::Tensor> results;
  if (!schema.returns().empty() && !schema.returns()[0].alias_info()) {
    {
      Given first;
      std::unique_lock<std::mutex> guard(pages().mutex);
      bool fit = collect(first, inputs, how);
      guard.unlock();  // no storage is given back with it
      if (!fit) return false;
    }
    try {
      results = vacant_results(op, inputs);
    } catch (const std::exception&) {
      return false;  // whoever runs it says why
    }
  }
  {
    std::lock_guard<std::mutex> guard(pages().mutex);
    std::shared_ptr<Call> call;
    if (collect(given, inputs, how)) call = remember(inputs, how, settings_below(), ++ranges().write_clock);
    if (!call) return false;
    for (size_t i = 0; i < results.size(); ++i) {
      int64_t serial = range_behind(results[i])->serial;
      given.ranges.storages.emplace(serial, results[i].storage());
      call->products.push_back({i, serial, static_cast<int64_t>(results[i].storage().nbytes())});
    }
    attach(call, given.ranges);
  }
  for (const at::Tensor& tensor : given.written) tensor.unsafeGetTensorImpl()->bump_version();
  std::vector<c10::IValue> returned;
  size_t next = 0;
  for (const c10::Argument& result : schema.returns()) {
    if (result.alias_info()) {
      returned.push_back(written_result(schema, result, inputs));
    } else if (result.type()->isSubtypeOf(*c10::TensorType::get())) {
      returned.emplace_back(results[next++]);
    } else {
      returned.emplace_back(c10::List<at::Tensor>(std::vector<at::Tensor>(results.begin() + next, results.end())));
      next = results.size();
    }
  }
  stack.resize(stack.size() - count);
  for (c10::IValue& value : returned) stack.push_back(std::move(value));
  return true;
}

void Updates::attach(const std::shared_ptr<Call>& call, const Held& given) {
  std::shared_ptr<Update> update;
  for (const auto& [serial, storage] : given.storages)
    if (std::shared_ptr<Update> other = ranges().of_serial(serial)->update; other && other != update)
      update = update ? merged(update, other) : other;
  if (!update) {
    update = std::make_shared<Update>();
    update->held = std::make_shared<Held>();
    if (std::string optimizer = current_optimizer(); !optimizer.empty()) update->optimizer = "Optimizer.step#" + optimizer;
    pending_.emplace(update.get(), update);
  }
  for (const auto& [serial, storage] : given.storages) {
    ranges().of_serial(serial)->update = update;
    update->held->storages.emplace(serial, storage);
  }
  call->each_operand([&](const Operand& operand) {
    Range* range = operand.serial ? ranges().of_serial(operand.serial) : nullptr;
    if (!range) return;
    if (operand.written) {
      range->liens -= static_cast<int>(update->reads.erase(range->serial));
      bar(range);
      ranges().note_write(range, call->stamp);
    } else if (!range->barred && update->reads.insert(range->serial).second) {
      ++range->liens;  // it is read-only: see Note [What a call remembers]
    }
  });
  for (const Product& product : call->products) bar(ranges().of_serial(product.serial));
  update->calls.push_back(call);
  ++counted.put_off;
  pending_count_ = static_cast<int64_t>(pending_.size());
}

// The first of them takes over what the other has: from here on they share ranges.
std::shared_ptr<Update> Updates::merged(std::shared_ptr<Update> update, const std::shared_ptr<Update>& other) {
  for (const auto& [serial, storage] : other->held->storages) ranges().of_serial(serial)->update = update;
  update->held->storages.merge(other->held->storages);
  update->reads.merge(other->reads);
  update->calls.insert(update->calls.end(), other->calls.begin(), other->calls.end());
  std::sort(update->calls.begin(), update->calls.end(), [](const auto& a, const auto& b) { return a->stamp < b->stamp; });
  pending_.erase(other.get());
  return update;
}

// ---- running ----

std::shared_ptr<Update> Updates::due(const Range* range, bool changes) const {
  if (!range->update) return nullptr;
  bool touched = changes || range->barred || range->update->running;
  return touched ? range->update : nullptr;
}

bool Updates::run_for(int64_t serial, bool changes) {
  std::shared_ptr<Update> update;
  {
    std::lock_guard<std::mutex> guard(pages().mutex);
    if (const Range* range = ranges().of_serial(serial)) update = due(range, changes);
  }
  return !update || run(update);
}

bool Updates::run_all() {
  Flag whatever_it_takes(may_pass_budget, true);
  std::vector<std::shared_ptr<Update>> all;
  {
    std::lock_guard<std::mutex> guard(pages().mutex);
    for (const auto& [address, update] : pending_) all.push_back(update);
  }
  bool done = true;
  for (const auto& update : all) done &= run(update);
  return done;
}

bool Updates::run(const std::shared_ptr<Update>& update) {
  {
    std::unique_lock<std::mutex> guard(pages().mutex);
    while (update->running) ranges().change_waiting(guard, true);
    if (update->done) return true;
    if (update->failed) return false;
    update->running = true;
    for (const auto& [serial, storage] : update->held->storages) unbar(ranges().of_serial(serial));
  }
  int error = 0;
  {
    Aside aside;
    Flag marked(updating, true);
    c10::InferenceMode usual(false);
    at::RecordFunction step(at::RecordScope::USER_SCOPE);
    if (step.isActive() && !update->optimizer.empty()) step.before(update->optimizer.c_str());
    try {
      while (!error && update->next < update->calls.size()) error = run_next(*update);
    } catch (const c10::OutOfMemoryError&) {
      error = ENOMEM;
    } catch (const std::exception&) {
      error = kNotRemade;
    }
  }
  std::shared_ptr<Held> freed;
  {
    std::lock_guard<std::mutex> guard(pages().mutex);
    update->running = false;
    if (!error) {
      update->done = true;
      freed = detach(*update);
    } else {
      update->failed = error != ENOMEM;  // else it can be tried again: what fails is the next allocation
      ranges().note_trouble({error, false, ranges().of_serial(update->held->storages.begin()->first)->bytes, 0});
      bar_all(*update);
    }
    ranges().progress();
  }
  return !error;
}

namespace {

// What a call has made that ran now.
void keep_results(Update& update, const Call& call, const std::vector<at::Tensor>& results) {
  for (const Product& product : call.products) {
    c10::Storage made = results.at(product.position).storage();
    if (!is_held_by_others(update.held->storages.at(product.serial))) {
      update.held->made.insert_or_assign(product.serial, std::move(made));  // the optimizer has forgotten it
      continue;
    }
    std::unique_lock<std::mutex> guard(pages().mutex);
    Range* source = ranges().of_data(made.data());
    Range* range = ranges().of_serial(product.serial);
    TORCH_CHECK(source && source->bytes == range->bytes, "lowtide: an operator that was put off made something else");
    ranges().pin(source);
    bool here = ranges().bring_waiting(source, guard, !may_pass_budget);
    if (here) {
      ranges().transplant(source, range);
      range->vacant = false;
    }
    ranges().unpin(source);
    if (!here) C10_THROW_ERROR(OutOfMemoryError, "lowtide: no room for what an optimizer makes");
  }
  // What no later call uses is given back at once.
  std::erase_if(update.held->made, [&](const auto& made) {
    return std::none_of(update.calls.begin() + update.next + 1, update.calls.end(), [&](const auto& later) {
      bool used = false;
      later->each_operand([&](const Operand& operand) { used |= operand.serial == made.first; });
      return used;
    });
  });
}

}  // namespace

// An errno, or one of tier.h's codes.
int Updates::run_next(Update& update) {
  const Call& call = *update.calls[update.next];
  std::vector<int64_t> pinned;
  int error = 0;
  {
    std::unique_lock<std::mutex> guard(pages().mutex);
    int64_t bytes = 0, budget = counters.budget.load(std::memory_order_relaxed);
    call.each_operand([&](const Operand& operand) {
      if (!operand.serial || update.held->made.count(operand.serial)) return;
      if (std::find(pinned.begin(), pinned.end(), operand.serial) != pinned.end()) return;
      bytes += ranges().of_serial(operand.serial)->bytes;
      pinned.push_back(operand.serial);
    });
    update.faults = budget && bytes > budget / 2;  // see Note [Announcing]
    if (update.faults) pinned.clear();
    for (int64_t serial : pinned) ranges().pin(ranges().of_serial(serial));
    for (int64_t serial : pinned) ranges().prefetch(ranges().of_serial(serial));  // all of them at once, where there is room
    for (int64_t serial : pinned) {
      Range* range = ranges().of_serial(serial);
      if (!error && !ranges().bring_waiting(range, guard, !may_pass_budget)) error = range->lost ? range->lost : ENOMEM;
    }
    // Whether or not it is announced, its kernels have all that they use.
    call.each_operand([&](const Operand& operand) {
      bool held = !error && std::find(pinned.begin(), pinned.end(), operand.serial) != pinned.end();
      if (held) ranges().touch(ranges().of_serial(operand.serial), operand.written);
    });
  }
  if (!error) {
    std::vector<at::Tensor> results = run_again(call, [&](const Operand& operand) {
      auto made = update.held->made.find(operand.serial);
      return made != update.held->made.end() ? made->second : update.held->storages.at(operand.serial);
    });
    keep_results(update, call, results);
  }
  std::lock_guard<std::mutex> guard(pages().mutex);
  for (int64_t serial : pinned) ranges().unpin(ranges().of_serial(serial));
  if (error) return error;
  ++update.next;
  ++counted.run;
  return 0;
}

std::shared_ptr<Held> Updates::detach(Update& update) {
  for (const auto& [serial, storage] : update.held->storages) {
    Range* range = ranges().of_serial(serial);
    if (update.reads.count(serial)) --range->liens;
    unbar(range);
    range->update = nullptr;
  }
  pending_.erase(&update);
  pending_count_ = static_cast<int64_t>(pending_.size());
  return std::move(update.held);
}

void Updates::bar_all(const Update& update) {
  for (const auto& call : update.calls) {
    call->each_operand([&](const Operand& operand) {
      if (operand.serial && operand.written) bar(ranges().of_serial(operand.serial));
    });
    for (const Product& product : call->products) bar(ranges().of_serial(product.serial));
  }
}

// ---- what goes wrong ----

void Updates::go_without_waiting(Range* range, bool changes, std::unique_lock<std::mutex>& guard) {
  if (changes || range->vacant) {
    give_up_waiting(range->update, guard);
    return;
  }
  range->writable = false;
  unbar(range);
}

void Updates::give_up_all() {
  std::unique_lock<std::mutex> guard(pages().mutex);
  while (!pending_.empty()) give_up_waiting(pending_.begin()->second, guard);
}

void Updates::give_up_waiting(std::shared_ptr<Update> update, std::unique_lock<std::mutex>& guard) {
  for (const auto& [serial, storage] : update->held->storages) {
    Range* each = ranges().of_serial(serial);
    if (update->reads.count(serial)) continue;
    each->barred = false;
    if (each->vacant) {
      each->lost = kNotRemade;
      continue;
    }
    if (!ranges().bring_waiting(each, guard, false)) continue;  // see Note [Lost]
    ranges().touch(each, true);
    if (mprotect(each->start, each->bytes, PROT_READ | PROT_WRITE) != 0) std::abort();
    each->writable = true;
    std::memset(each->start, 0xFF, each->bytes);
  }
  update->done = true;
  std::shared_ptr<Held> freed = detach(*update);
  guard.unlock();
  freed.reset();
  guard.lock();
}

void Updates::forgive() {
  for (const auto& [address, update] : pending_) {
    if (!update->failed) continue;
    update->failed = false;
    bar_all(*update);
  }
}

void Updates::forget_unseen() {
  if (!any()) return;
  std::vector<std::shared_ptr<Held>> freed;
  {
    std::lock_guard<std::mutex> guard(pages().mutex);
    std::vector<std::shared_ptr<Update>> unseen;
    for (const auto& [address, update] : pending_) {
      bool seen = update->running;
      for (const auto& [serial, storage] : update->held->storages)
        seen |= !update->reads.count(serial) && is_held_by_others(storage);
      if (!seen) unseen.push_back(update);
    }
    for (const auto& update : unseen) {
      update->done = true;
      freed.push_back(detach(*update));
    }
  }
}

void Updates::abandon_in_child() {
  // Never given back: others may hold what giving it back takes.
  auto* kept = new std::unordered_map<const Update*, std::shared_ptr<Update>>(std::move(pending_));
  pending_.clear();
  pending_count_ = 0;
  for (const auto& [address, update] : *kept)
    for (const auto& [serial, storage] : update->held->storages)
      if (Range* range = ranges().of_serial(serial)) {
        if (range->barred) range->lost = kNotRemade;
        range->barred = false;
        range->update = nullptr;
      }
}

}  // namespace lowtide

using namespace lowtide;

extern "C" {

// Put the operators off that this thread calls from here on, as far as they can be, or do not any more.
void lt_put_off(int on) {
  static std::once_flag once;
  std::call_once(once, [] {
    new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerFallback(
        kPutOffKey, c10::KernelFunction::makeFromBoxedFunction<&put_off_or_run>(), "lowtide"));
    std::lock_guard<std::mutex> guard(pages().mutex);
    remakes().start();
  });
  putting_off = on != 0;
  c10::impl::tls_set_dispatch_key_included(kPutOffKey, on != 0);
}

// Run all updates that were put off. Returns 0, or -1: some cannot be run.
int lt_run_updates() {
  WithoutGil released;
  return updates().run_all() ? 0 : -1;
}

// Calls that were put off, calls of them that have run, updates that a fault had to ask for, updates that wait.
void lt_update_counters(int64_t* out) {
  std::lock_guard<std::mutex> guard(pages().mutex);
  const UpdateCounters& c = updates().counted;
  int64_t values[] = {c.put_off, c.run, c.asked, updates().count()};
  std::memcpy(out, values, sizeof(values));
}
}
