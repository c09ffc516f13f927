// Tells Python of the operators of a thread, and of the backward passes that it starts: see operators.py.
//
// Note [No mode]: PyTorch's observer (at::RecordFunction) changes nothing about how an operator is dispatched. A dispatch
// mode does: with one on, PyTorch takes other formulas for some gradients (`isTensorSubclassLike`), which round otherwise.
//
// Note [Level]: an operator is told if it is the outermost that computes: no view, not made of others (those are told in
// its place), and nothing inside it. Autocast's casts and the operator below them are told for themselves, and so is what a
// device's own autograd, or a mode, a subclass or a transform of the program's makes of an operator.
//
// Note [The GIL here]: an operator begins without the GIL, so it is taken, as autograd's own hooks do. Nothing is thrown
// from here: PyTorch would drop it. Ctrl-C is raised again where the program runs Python next.
#include <Python.h>

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "telling.h"

// Note [References]: torch's Python library exports these two. The headers that declare them take a minute to compile, and
// those of pybind11, whose references they return, are for one version of Python. A reference is a pointer, and how it is
// returned depends on nothing but whether it is trivial to copy: these are returned the same way.
namespace lowtide {

// As pybind11::handle.
struct Borrowed {
  PyObject* object;
};

// As pybind11::object.
class Owned {
 public:
  Owned(const Owned&) = delete;
  ~Owned() {
    Py_XDECREF(object_);
  }
  PyObject* release() {
    return std::exchange(object_, nullptr);
  }

 private:
  PyObject* object_;
};

}  // namespace lowtide

namespace torch::jit {
lowtide::Owned toPyObject(c10::IValue value);
}
namespace torch::detail {
lowtide::Borrowed getTorchApiFunction(const c10::OperatorHandle& op);
}

namespace lowtide {
namespace {

// Set once, before anything is observed, and never freed.
PyObject* began = nullptr;
PyObject* ended = nullptr;

std::atomic<uint64_t> devices{0};  // which types of device Python wants to be told of, by bit

// An operator that runs on this thread.
struct Running : at::ObserverContext {
  PyObject* token = nullptr;  // Python's; nullptr: it was not told, or does not want to know of the end
  const char* name = nullptr;
  ~Running() override {
    if (!token || !Py_IsInitialized()) return;
    WithGil gil;
    Py_DECREF(token);
  }
};

thread_local int unseen = 0;
thread_local Running* outermost = nullptr;

struct Facts {
  std::string name, overload;
  std::optional<c10::OperatorHandle> op;  // none: it is not told
};

bool is_view(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return !returns.empty() && std::all_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
}

// Schemas live as long as the process, and so do their names: a name's address tells the operator, if the text agrees.
const Facts& facts_of(const at::RecordFunction& fn) {
  thread_local std::unordered_map<const char*, Facts> known;
  const char* overload = overload_of(fn);
  auto found = known.find(fn.name());
  if (found != known.end() && found->second.name == fn.name() && found->second.overload == overload)
    return found->second;
  Facts facts{fn.name(), overload, std::nullopt};
  if (auto name = fn.operator_name()) facts.op = c10::Dispatcher::singleton().findSchema(*name);
  bool told = facts.op && !facts.op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
      !is_view(facts.op->schema());
  if (!told) facts.op.reset();
  return known[fn.name()] = facts;
}

bool is_wanted(c10::DeviceType type) {
  return devices.load(std::memory_order_relaxed) >> static_cast<int>(type) & 1;
}

// What autocast, a device's own autograd, or something of the program's makes other operators of; see Note [Level].
bool is_made_into_others(const c10::OperatorHandle& op) {
  const c10::DispatchKeySet others(
      {c10::DispatchKey::Python,
       c10::DispatchKey::PreDispatch,
       c10::DispatchKey::PythonDispatcher,
       c10::DispatchKey::Functionalize,
       c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
       c10::DispatchKey::FuncTorchVmapMode});
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  if ((keys.included_ - keys.excluded_).has_any(others)) return true;
  constexpr std::pair<c10::DeviceType, c10::DispatchKey> own[] = {
      {c10::DeviceType::CUDA, c10::DispatchKey::AutogradCUDA},
      {c10::DeviceType::XPU, c10::DispatchKey::AutogradXPU},
      {c10::DeviceType::PrivateUse1, c10::DispatchKey::AutogradPrivateUse1}};
  for (const auto& [type, autograd] : own)
    if (is_wanted(type) && op.hasKernelForDispatchKey(autograd)) return true;
  for (int i = 0; i < c10::COMPILE_TIME_MAX_DEVICE_TYPES; ++i) {
    auto type = static_cast<c10::DeviceType>(i);
    if (is_wanted(type) && at::autocast::is_autocast_available(type) && at::autocast::is_autocast_enabled(type) &&
        op.hasKernelForDispatchKey(at::autocast::get_autocast_dispatch_key_from_device_type(type)))
      return true;
  }
  return false;
}

struct Operands {
  bool any = false, wanted = false, wrapped = false;

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    any = true;
    wanted |= is_wanted(tensor.device().type());
    wrapped |= tensor.key_set().has(c10::DispatchKey::Python);
  }
};

Operands operands_of(Values inputs) {
  Operands found;
  for (const c10::IValue& value : inputs) {
    if (value.isTensor()) {
      found.add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) found.add(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) found.add(tensor.value_or(at::Tensor()));
    } else if (value.isDevice()) {
      found.any = true;
      found.wanted |= is_wanted(value.toDevice().type());
    }
  }
  if (!found.any) found.wanted = is_wanted(c10::DeviceType::CPU);
  return found;
}

// A value that Python does not know becomes `NotImplemented`.
PyObject* as_python(const c10::IValue& value) {
  try {
    return torch::jit::toPyObject(value).release();
  } catch (...) {
    PyErr_Clear();
    Py_INCREF(Py_NotImplemented);
    return Py_NotImplemented;
  }
}

PyObject* as_tuple(Values values) {
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(values.size()));
  for (size_t i = 0; tuple && i < values.size(); ++i)
    PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(i), as_python(values[i]));
  return tuple;
}

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& fn) {
  if (unseen || outermost || !Py_IsInitialized()) return nullptr;
  const Facts& facts = facts_of(fn);
  if (!facts.op || is_made_into_others(*facts.op)) return nullptr;
  size_t count = facts.op->schema().arguments().size();
  if (fn.inputs().size() < count) return nullptr;
  Values inputs = last(fn.inputs(), count);
  Operands operands = operands_of(inputs);
  if (operands.wrapped) return nullptr;
  auto running = std::make_unique<Running>();
  running->name = facts.op->schema().name().c_str();
  if (operands.wanted) {
    WithGil gil;
    ++unseen;
    PyObject* values = as_tuple(inputs);
    running->token = tell(began, torch::detail::getTorchApiFunction(*facts.op).object, values);
    Py_XDECREF(values);
    if (running->token == Py_None) Py_CLEAR(running->token);
    --unseen;
  }
  outermost = running.get();
  return running;
}

void on_end(const at::RecordFunction& fn, at::ObserverContext* context) {
  if (!context) return;
  auto* running = static_cast<Running*>(context);
  if (outermost == running) outermost = nullptr;
  if (!running->token || !Py_IsInitialized()) return;
  WithGil gil;
  ++unseen;
  size_t count = facts_of(fn).op->schema().returns().size();
  bool raised = fn.outputs().size() < count;
  Values outputs(fn.outputs().data(), fn.outputs().size());
  PyObject* values = raised ? Py_NewRef(Py_None) : as_tuple(last(outputs, count));
  Py_XDECREF(tell(ended, running->token, values));
  Py_XDECREF(values);
  --unseen;
}

// The names of operators alone.
std::unique_ptr<at::ObserverContext> on_begin_named(const at::RecordFunction& fn) {
  if (unseen || outermost) return nullptr;
  const Facts& facts = facts_of(fn);
  if (!facts.op) return nullptr;
  auto running = std::make_unique<Running>();
  running->name = facts.op->schema().name().c_str();
  outermost = running.get();
  return running;
}

void on_end_named(const at::RecordFunction&, at::ObserverContext* context) {
  if (context && outermost == context) outermost = nullptr;
}

}  // namespace

bool is_unseen() {
  return unseen > 0;
}

}  // namespace lowtide

using namespace lowtide;

extern "C" {

// Call these before and after an operator: `began(operator, arguments)`, `ended(what began returned, results or None)`.
void lo_tell(PyObject* call_before, PyObject* call_after) {
  Py_INCREF(call_before);
  Py_INCREF(call_after);
  began = call_before;
  ended = call_after;
}

// The number of a type of device, by its name.
int lo_device_type(const char* name) {
  return static_cast<int>(c10::Device(name).type());
}

// Tell of operators on these types of device, one bit each.
void lo_set_devices(uint64_t types) {
  devices = types;
}

// Watch this thread's operators, with their operands or their names alone; returns what ends it, on the same thread.
uint64_t lo_start(int with_operands) {
  auto callback = with_operands
      ? at::RecordFunctionCallback(&on_begin, &on_end).needsInputs(true).needsOutputs(true)
      : at::RecordFunctionCallback(&on_begin_named, &on_end_named);
  return at::addThreadLocalCallback(callback.scopes({at::RecordScope::FUNCTION}));
}

void lo_stop(uint64_t handle) {
  at::removeCallback(handle);
}

// Do not look (+1) at what this thread runs, or look again (-1).
void lo_look_away(int change) {
  unseen += change;
}

// The operator that this thread runs, or "".
const char* lo_running() {
  return outermost ? outermost->name : "";
}
}
