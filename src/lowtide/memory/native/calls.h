// Calls of operators, remembered so that they can run again: through the dispatcher's boxed interface, below autograd.
#pragma once
#include "call.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>

namespace lowtide {

// What decides besides its operands which kernel computes a call, and so its last bits.
struct Settings {
  bool grad;
  c10::impl::LocalDispatchKeySet keys;
  int threads;
  bool onednn, deterministic, warn_only, fills_uninitialized;
  std::array<int, 3> precisions;  // of oneDNN's convolutions, recurrent layers and products
  caffe2::TypeMeta dtype;
  at::ScalarType autocast_dtype;
  uint32_t rounding;  // the processor's control word: whether denormal numbers are flushed

  static Settings now();
  bool operator==(const Settings& other) const;
};

// The overload's name; "" in torch 2.6, which does not tell it: there the address of the operator's name has to do.
template <typename Function>
const char* overload_of(const Function& fn) {
  if constexpr (requires { fn.overload_name(); })
    return fn.overload_name() ? fn.overload_name() : "";
  else
    return "";
}

// What the schema says, for those who want to run an operator again.
struct Repeats {
  std::shared_ptr<const c10::OperatorHandle> op;  // none: it cannot be run again, whatever it is given
  std::vector<bool> writes;      // by argument
  std::vector<bool> statistics;  // by argument: written unsaid if `training` is true, and without influence then
  int training = -1;             // which argument
  int dropout = -1;              // which argument has to be 0, or it draws random numbers
  bool by_layout = false;        // it looks at no bytes of its operands
};

Repeats repeats_of(const c10::OperatorHandle& op, bool by_layout);

// The call of an operator with `inputs`; nullptr: it cannot be run again. With `pages().mutex` held.
std::shared_ptr<Call> remember(
    c10::ArrayRef<const c10::IValue> inputs, const Repeats& repeats, const Settings& settings, int64_t stamp);
// The call that begins, of operator `number`; nullptr: it cannot be run again. With `pages().mutex` held.
std::shared_ptr<Call> remember(
    const at::RecordFunction& fn, const Repeats& repeats, int64_t stamp, int64_t number);
// Its results are there. With `pages().mutex` held.
void note_products(Call& call, const at::RecordFunction& fn);

// The storage that an operand is on while its call runs again.
using StorageOf = std::function<c10::Storage(const Operand&)>;
// Run a call again; returns its tensors, through lists, in order. Throws what the operator throws.
std::vector<at::Tensor> run_again(const Call& call, const StorageOf& storage_of);

// Whether this is memory that a call can be given again, or that one makes.
bool is_plain(const at::Tensor& tensor);

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit);

}  // namespace lowtide
