// A call of an operator, remembered so that it can run again (calls.h).
//
// Note [What a call remembers]: no memory that could leave or be freed is kept alive for it. An operand in a range is
// remembered by the range's number, the number of its last write, and its layout: views need not run again. It is mapped
// read-only, and so is what the call makes: a write that no operator announces faults, and is seen. What is too small to
// be a range is copied. The copies are under the budget; without room for them the call is not remembered.
#pragma once
#include "ranges.h"

namespace c10 {
struct IValue;
class OperatorHandle;
}  // namespace c10

namespace lowtide {

struct Settings;

struct Layout {
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  int8_t dtype = 0;  // a c10::ScalarType
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
  std::shared_ptr<const c10::IValue> value;  // kValue only
  std::vector<Operand> operands;
};

// A storage that a call made. `position`: which of its tensors it is behind, counted through lists.
struct Product {
  size_t position;
  int64_t serial, nbytes;
};

struct Call {
  std::shared_ptr<const c10::OperatorHandle> op;
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

// ---- calls.cpp ----

const std::string& name_of(const Call& call);
// Whether this thread is inside a kernel that runs on several.
bool in_parallel_region();
// Flush no denormal numbers on this thread, nor on those that it starts.
void use_usual_rounding();

}  // namespace lowtide
