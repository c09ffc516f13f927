// Calls of operators, remembered so that they can run again: through the dispatcher's boxed interface, below autograd.
//
// Note [What a call remembers]: no memory that could leave or be freed is kept alive for it. An operand in a range is
// remembered by the range's number, the number of its last write, and its layout: views need not run again. It is mapped
// read-only, and so is what the call makes: a write that no operator announces faults, and is seen. What is too small to
// be a range is copied. The copies are under the budget; without room for them the call is not remembered.
#pragma once
#include "ranges.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <optional>

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

struct Layout {
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;
  bool conj = false, neg = false, wrapped = false, requires_grad = false;
};

// Small memory as it was.
class Copy {
 public:
  // nullptr: there is no room under the budget. With `pages().mutex` held.
  static std::shared_ptr<Copy> of(const void* data, int64_t bytes);
  ~Copy();
  std::vector<char> bytes;

 private:
  Copy() = default;
};

// A tensor that a call was given: in a range, in a copy, by its layout only, or none at all.
struct Operand {
  bool defined = false;
  bool written = false;
  int64_t serial = 0;   // of its range; 0: it is in none
  int64_t version = 0;  // the range's `written_at` before the call
  int64_t nbytes = 0;   // of its storage
  Layout layout;
  std::shared_ptr<Copy> copy;
};

struct Argument {
  enum Kind { kValue, kTensor, kTensors, kOptionalTensors };
  Kind kind = kValue;
  c10::IValue value;  // kValue only
  std::vector<Operand> operands;
};

// What the schema says, for those who want to run an operator again.
struct Repeats {
  std::optional<c10::OperatorHandle> op;  // none: it cannot be run again, whatever it is given
  std::vector<bool> writes;               // by argument
  std::vector<bool> statistics;  // by argument: written unsaid if `training` is true, and without influence then
  int training = -1;             // which argument
  int dropout = -1;              // which argument has to be 0, or it draws random numbers
  bool by_layout = false;        // it looks at no bytes of its operands
};

Repeats repeats_of(const c10::OperatorHandle& op, bool by_layout);

// A storage that a call made. `position`: which of its tensors it is behind, counted through lists.
struct Product {
  size_t position;
  int64_t serial, nbytes;
};

struct Call {
  c10::OperatorHandle op;
  int64_t stamp = 0;  // `written_at` of whatever it wrote
  std::vector<Argument> arguments;
  std::shared_ptr<const Settings> settings;
  std::vector<Product> products;
  bool finished = false;
  int64_t number = 0;  // of the operator in its step
  int64_t ns = 0;      // that it took

  template <typename Visit>
  void each_operand(Visit visit) const {
    for (const Argument& argument : arguments)
      for (const Operand& operand : argument.operands)
        if (operand.defined) visit(operand);
  }
};

// The call that begins, of operator `number`; nullptr: it cannot be run again. With `pages().mutex` held.
std::shared_ptr<Call> remember(
    const at::RecordFunction& fn, const Repeats& repeats, int64_t stamp, int64_t number);
// Its results are there. With `pages().mutex` held.
void note_products(Call& call, const at::RecordFunction& fn);

// The storage that an operand is on while its call runs again.
using StorageOf = std::function<c10::Storage(const Operand&)>;
// Run a call again; returns its tensors, through lists, in order. Throws what the operator throws.
std::vector<at::Tensor> run_again(const Call& call, const StorageOf& storage_of);

// Flush no denormal numbers on this thread, nor on those that it starts.
void use_usual_rounding();

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit);

}  // namespace lowtide
