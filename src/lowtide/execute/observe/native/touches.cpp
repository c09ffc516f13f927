// Storages whose block is elsewhere, and who is about to touch one: see touches.py.
//
// Note [Shells]: a storage that the program holds stays where it is, with its size, its tensors and their views; its block,
// the memory behind it, is taken out and put back. A storage without its block is a *shell*. Whoever asks a shell for its
// address gets an error: a touch that nobody announced raises, and never computes with other bytes.
//
// Note [Who is told]: every operator on every thread, views apart, is looked at before it runs. Python is told if an operand
// is a shell, or was put back for another operator that still runs: its streams have to be ordered as well. What an
// operator uses is known until it ends, so that no block is taken from under it.
//
// Note [Ticks]: while a step runs, the operators that are looked at are counted, for each device on its own: these are the
// step's ticks, and what they look like is remembered. A step that follows a plan stops at some of them to do what that wants;
// at the first tick that does not look as the plan expects it follows nothing any more. What Lowtide runs itself is no tick.
// An operator looks like its name, without the underscore of one that works in place (autograd adds gradients in place or
// not, as it finds them held), and like the bytes of its operands.
#include <Python.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "telling.h"

namespace lowtide::touches {
namespace {

using c10::StorageImpl;

PyObject* touched = nullptr;  // set once, before anything is looked at, and never freed
PyObject* left = nullptr;
PyObject* ticked = nullptr;

std::atomic<int> device_type{-1};
std::atomic<size_t> least_bytes{0};

// An operator that runs, with the storages that it uses; `told` are those that Python knows it uses.
struct Use : at::ObserverContext {
  std::vector<StorageImpl*> storages, told;
  PyObject* token = nullptr;
  const char* name = nullptr;
  int64_t tick = -1;  // its number in the step; -1: it has none
  ~Use() override;
};

// Guarded by `mutex`, which is held for some instructions and never with the GIL to wait for.
std::mutex mutex;
std::set<Use*> running;
std::unordered_map<StorageImpl*, bool> lent;  // put back for operators that run, and whether one of them writes it
std::set<std::pair<int, int64_t>> streams;    // on which storages were used, by device

// One step on one device; see Note [Ticks].
struct Clock {
  bool running = false, following = false;
  std::vector<uint64_t> seen, expected;
  std::vector<int64_t> stops;  // ascending
  size_t next_stop = 0;

  // Count a tick; returns its number (-1: no step runs).
  int64_t count(uint64_t look) {
    if (!running) return -1;
    size_t number = seen.size();
    seen.push_back(look);
    following = following && number < expected.size() && expected[number] == look;
    return static_cast<int64_t>(number);
  }

  bool stops_at(int64_t number) {
    if (!following) return false;
    while (next_stop < stops.size() && stops[next_stop] < number) ++next_stop;
    return next_stop < stops.size() && stops[next_stop] == number;
  }
};

std::unordered_map<int, Clock> clocks;  // by device; guarded by `mutex`

thread_local std::vector<Use*> mine;

void forget(Use* use) {
  std::lock_guard<std::mutex> guard(mutex);
  running.erase(use);
}

Use::~Use() {
  forget(this);
  mine.erase(std::remove(mine.begin(), mine.end(), this), mine.end());
  if (!token || !Py_IsInitialized()) return;
  WithGil gil;
  Py_DECREF(token);
}

void no_block(void*) {}

bool is_shell(StorageImpl* storage) {
  return storage->_mutable_data_ptr_no_checks().get_deleter() == &no_block;
}

bool is_used(StorageImpl* storage) {
  return std::any_of(running.begin(), running.end(), [storage](Use* use) {
    return std::find(use->storages.begin(), use->storages.end(), storage) != use->storages.end();
  });
}

// Older versions of torch cannot take back that a storage has no address.
template <class S>
constexpr bool can_refuse = requires(S s) {
  s.release_data_and_set_meta_custom_data_ptr_error_msg_(std::nullopt);
  s.clear_data_ptr_access_error_msg_();
};

template <class S>
void refuse(S* storage, const char* why) {
  if constexpr (can_refuse<S>) storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(why));
}

template <class S>
void allow(S* storage) {
  if constexpr (can_refuse<S>) storage->clear_data_ptr_access_error_msg_();
}

struct Facts {
  std::string name, overload;
  std::optional<c10::OperatorHandle> op;  // none: it touches nothing
  uint64_t hash = 0;
  std::vector<bool> writes;
};

bool only_looks(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return !returns.empty() && std::all_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
}

// Operators of other libraries count as writing all they are given; a normalisation does not say that it writes its statistics.
bool may_write(const c10::FunctionSchema& schema, const c10::Argument& argument) {
  if (argument.alias_info()) return argument.alias_info()->isWrite();
  const std::string& name = schema.name();
  if (name.rfind("aten::", 0) != 0) return name.rfind("prims::", 0) != 0;
  bool backward = name.size() > 9 && name.compare(name.size() - 9, 9, "_backward") == 0;
  return !backward && argument.name().rfind("running_", 0) == 0;
}

const Facts& facts_of(const at::RecordFunction& fn) {
  thread_local std::unordered_map<const char*, Facts> known;
  const char* overload = overload_of(fn);
  auto found = known.find(fn.name());
  if (found != known.end() && found->second.name == fn.name() && found->second.overload == overload)
    return found->second;
  Facts facts{fn.name(), overload, std::nullopt, 0, {}};
  std::string name = facts.name.substr(0, facts.name.find_last_not_of('_') + 1);
  facts.hash = std::hash<std::string>()(name);
  if (auto name = fn.operator_name()) facts.op = c10::Dispatcher::singleton().findSchema(*name);
  if (facts.op && only_looks(facts.op->schema())) facts.op.reset();
  if (facts.op)
    for (const c10::Argument& argument : facts.op->schema().arguments())
      facts.writes.push_back(may_write(facts.op->schema(), argument));
  return known[fn.name()] = facts;
}

struct Operand {
  StorageImpl* storage;
  bool written;
};

void add(std::vector<Operand>& to, const at::Tensor& tensor, bool written, std::optional<c10::Device>& where) {
  if (!tensor.defined() || static_cast<int>(tensor.device().type()) != device_type.load(std::memory_order_relaxed)) return;
  if (!tensor.has_storage()) return;
  StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  if (storage->sym_nbytes().is_heap_allocated() || storage->nbytes() < least_bytes.load(std::memory_order_relaxed)) return;
  where = tensor.device();
  for (Operand& known : to)
    if (known.storage == storage) {
      known.written |= written;
      return;
    }
  to.push_back({storage, written});
}

std::vector<Operand> operands_of(const Facts& facts, Values inputs, std::optional<c10::Device>& where) {
  std::vector<Operand> found;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const c10::IValue& value = inputs[i];
    bool written = facts.writes[i];
    if (value.isTensor()) {
      add(found, value.toTensor(), written, where);
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) add(found, tensor, written, where);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        if (tensor) add(found, *tensor, written, where);
    }
  }
  return found;
}

bool is_told_already(StorageImpl* storage) {
  return std::any_of(mine.begin(), mine.end(), [storage](Use* use) {
    return std::find(use->told.begin(), use->told.end(), storage) != use->told.end();
  });
}

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& fn) {
  const Facts& facts = facts_of(fn);
  if (!facts.op || fn.inputs().size() < facts.writes.size()) return nullptr;
  std::optional<c10::Device> where;
  std::vector<Operand> operands = operands_of(facts, last(fn.inputs(), facts.writes.size()), where);
  if (operands.empty() || !Py_IsInitialized()) return nullptr;
  auto use = std::make_unique<Use>();
  for (const Operand& operand : operands) use->storages.push_back(operand.storage);
  c10::Stream stream = c10::impl::getDeviceGuardImpl(where->type())->getStream(*where);
  use->name = fn.name();
  uint64_t look = facts.hash;
  for (const Operand& operand : operands) look = look * 1099511628211u + operand.storage->nbytes();
  bool stops = false;
  {
    std::lock_guard<std::mutex> guard(mutex);
    running.insert(use.get());
    streams.emplace(where->index(), stream.id());
    if (!is_unseen()) {
      Clock& clock = clocks[where->index()];
      use->tick = clock.count(look);
      stops = clock.stops_at(use->tick);
    }
  }
  if (stops) {
    WithGil gil;
    PyObject* index = PyLong_FromLong(where->index());
    PyObject* number = PyLong_FromLongLong(use->tick);
    Py_XDECREF(tell(ticked, index, number));
    Py_XDECREF(index);
    Py_XDECREF(number);
  }
  std::vector<Operand> news;
  {
    std::lock_guard<std::mutex> guard(mutex);
    for (const Operand& operand : operands) {
      auto found = lent.find(operand.storage);
      if (found != lent.end()) found->second |= operand.written;
      if ((found != lent.end() || is_shell(operand.storage)) && !is_told_already(operand.storage)) news.push_back(operand);
    }
  }
  mine.push_back(use.get());
  if (news.empty()) return use;
  for (const Operand& operand : news) use->told.push_back(operand.storage);
  WithGil gil;
  PyObject* list = PyList_New(0);
  for (const Operand& operand : news) {
    PyObject* pair = Py_BuildValue("(nO)", reinterpret_cast<Py_ssize_t>(operand.storage), operand.written ? Py_True : Py_False);
    PyList_Append(list, pair);
    Py_DECREF(pair);
  }
  PyObject* name = PyUnicode_FromString(fn.name());
  use->token = tell(touched, name, list);
  Py_XDECREF(name);
  Py_XDECREF(list);
  if (use->token == Py_None) Py_CLEAR(use->token);
  return use;
}

void on_end(const at::RecordFunction&, at::ObserverContext* context) {
  if (!context) return;
  auto* use = static_cast<Use*>(context);
  forget(use);
  mine.erase(std::remove(mine.begin(), mine.end(), use), mine.end());
  if (!use->token || !Py_IsInitialized()) return;
  WithGil gil;
  Py_XDECREF(tell(left, use->token, Py_None));
}

}  // namespace

extern "C" {

// Whether a storage can be without its block in this version of torch.
int lo_can_be_shell() {
  return can_refuse<StorageImpl>;
}

// Call these before and after an operator that uses a shell: `touched(name, [(storage, written), ...])`, `left(what that
// returned, None)`.
void lo_tell_touches(PyObject* call_before, PyObject* call_after) {
  Py_INCREF(call_before);
  Py_INCREF(call_after);
  touched = call_before;
  left = call_after;
}

// Call `ticked(device, number)` at the ticks at which a followed plan stops.
void lo_tell_ticks(PyObject* call) {
  Py_INCREF(call);
  ticked = call;
}

// Begin to count a device's ticks.
void lo_begin_ticks(int device) {
  std::lock_guard<std::mutex> guard(mutex);
  Clock& clock = clocks[device];
  clock = Clock();
  clock.running = true;
}

// Follow a plan of the step from the next tick on; 0: the step does not look like it so far, and follows none.
int lo_follow_ticks(int device, const uint64_t* expected, size_t count, const int64_t* stops, size_t stop_count) {
  std::lock_guard<std::mutex> guard(mutex);
  Clock& clock = clocks[device];
  clock.expected.assign(expected, expected + count);
  clock.stops.assign(stops, stops + stop_count);
  clock.next_stop = static_cast<size_t>(
      std::lower_bound(clock.stops.begin(), clock.stops.end(), static_cast<int64_t>(clock.seen.size())) - clock.stops.begin());
  clock.following = clock.running && clock.seen.size() <= count &&
      std::equal(clock.seen.begin(), clock.seen.end(), clock.expected.begin());
  return clock.following;
}

// The number of the tick that the operator of this name is which this thread begins, or, if it is none, of the next one.
int64_t lo_tick(int device, const char* name) {
  std::lock_guard<std::mutex> guard(mutex);
  Clock& clock = clocks[device];
  if (!clock.running) return -1;
  if (!mine.empty() && mine.back()->tick >= 0 && std::string(mine.back()->name) == name) return mine.back()->tick;
  return static_cast<int64_t>(clock.seen.size());
}

// Count no more; returns how many ticks there were and, of at most `most`, how they looked. `followed`: all as expected.
size_t lo_end_ticks(int device, uint64_t* seen, size_t most, int* followed) {
  std::lock_guard<std::mutex> guard(mutex);
  Clock& clock = clocks[device];
  clock.running = false;
  *followed = clock.following && clock.seen.size() == clock.expected.size();
  std::copy_n(clock.seen.begin(), std::min(most, clock.seen.size()), seen);
  return clock.seen.size();
}

// Look at the operators of all threads: at their storages of `least` bytes and more on this type of device.
uint64_t lo_start_touches(int type, uint64_t least) {
  device_type = type;
  least_bytes = least;
  auto callback = at::RecordFunctionCallback(&on_begin, &on_end).needsInputs(true);
  return at::addGlobalCallback(callback.scopes({at::RecordScope::FUNCTION}));
}

void lo_stop_touches(uint64_t handle) {
  at::removeCallback(handle);
}

// Whether an operator that runs uses a storage.
int lo_is_used(StorageImpl* storage) {
  std::lock_guard<std::mutex> guard(mutex);
  return is_used(storage);
}

int lo_is_shell(StorageImpl* storage) {
  std::lock_guard<std::mutex> guard(mutex);
  return is_shell(storage);
}

// Take a storage's block into another, empty one, and say `why` to whoever asks for its address; 0: it is used.
int lo_take_block(StorageImpl* storage, StorageImpl* into, const char* why) {
  std::lock_guard<std::mutex> guard(mutex);
  if (is_used(storage) || is_shell(storage) || !storage->data()) return 0;
  at::DataPtr none(nullptr, nullptr, &no_block, storage->device());
  into->set_data_ptr_noswap(storage->set_data_ptr(std::move(none)));
  into->set_nbytes(storage->nbytes());
  refuse(storage, why);
  return 1;
}

// Put a block back; `lend`: for an operator that runs, until `lo_end_lending`.
void lo_put_block(StorageImpl* storage, StorageImpl* from, int lend) {
  std::lock_guard<std::mutex> guard(mutex);
  allow(storage);
  storage->set_data_ptr_noswap(from->set_data_ptr(at::DataPtr(nullptr, from->device())));
  from->set_nbytes(static_cast<size_t>(0));
  if (lend) lent[storage] = false;
}

// Tell whether an operator wrote a storage since its block was put back for one, and watch it no more.
int lo_end_lending(StorageImpl* storage) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = lent.find(storage);
  if (found == lent.end()) return 0;
  bool written = found->second;
  lent.erase(found);
  return written;
}

// Say something else to whoever asks a shell for its address.
void lo_say(StorageImpl* storage, const char* why) {
  std::lock_guard<std::mutex> guard(mutex);
  if (is_shell(storage)) refuse(storage, why);
}

// The streams of a device on which storages were used; returns how many there are.
int lo_streams(int device, int64_t* found, int most) {
  std::lock_guard<std::mutex> guard(mutex);
  int count = 0;
  for (const auto& [index, id] : streams)
    if (index == device && count++ < most) found[count - 1] = id;
  return count;
}
}

}  // namespace lowtide::touches
