// What both observers share: how to call Python from an operator's begin and end.
#pragma once

#include <Python.h>

#include <ATen/core/ivalue.h>

namespace lowtide {

// An operator may end because Python raises in one of autograd's hooks: that error is put aside meanwhile.
class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {
    PyErr_Fetch(&type_, &value_, &traceback_);
  }
  ~WithGil() {
    PyErr_Restore(type_, value_, traceback_);
    PyGILState_Release(state_);
  }
  WithGil(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
  PyObject *type_, *value_, *traceback_;
};

// Call Python and return a new reference; nullptr if it raised.
inline PyObject* tell(PyObject* function, PyObject* first, PyObject* second) {
  PyObject* result = second ? PyObject_CallFunctionObjArgs(function, first, second, nullptr) : nullptr;
  if (result) return result;
  bool interrupted = PyErr_ExceptionMatches(PyExc_KeyboardInterrupt);
  if (interrupted)
    PyErr_Clear();
  else
    PyErr_WriteUnraisable(function);
  if (interrupted) PyErr_SetInterrupt();
  return nullptr;
}

// The overload's name; "" in torch 2.6, which does not tell it: there the address of the operator's name has to do.
template <typename Function>
const char* overload_of(const Function& fn) {
  if constexpr (requires { fn.overload_name(); })
    return fn.overload_name() ? fn.overload_name() : "";
  else
    return "";
}

// Whether what this thread runs is not to be seen: it is not the program's.
bool is_unseen();

using Values = c10::ArrayRef<const c10::IValue>;

// Whoever calls through the boxed interface, as TorchScript does, shows the whole stack: the last values are the call's.
inline Values last(Values values, size_t count) {
  return values.slice(values.size() - count);
}

}  // namespace lowtide
