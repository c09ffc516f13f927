// One call of an operator: its device operands dressed as CPU tensors over the same bytes, and its results dressed back.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "device.h"

namespace lowtide::sim {

at::Tensor dress(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like);

class Call {
 public:
  struct Memory {
    c10::Storage device, cpu;
    void* block;
  };
  struct Operand {
    at::Tensor device, cpu;
    bool read, written;
  };
  c10::SmallVector<Memory, 8> memories;
  c10::SmallVector<Operand, 8> operands;
  int device_index = -1;

  at::Tensor to_cpu(const at::Tensor& t, bool read = true, bool written = false);
  at::Tensor to_device(const at::Tensor& result);
  // Pass on what resize_ did to out= arguments; true if there was any.
  bool pass_on_resizes();
  // What the race detector hears: operands as they were passed, and `results` as written.
  std::vector<races::Access> accesses() const;

 private:
  c10::Storage adopt(c10::StorageImpl* made);
};

void add_access(std::vector<races::Access>& to, const at::Tensor& on_device, bool write);

// What is known of an operator from its schema.
struct OpInfo {
  std::vector<size_t> generators;      // arguments that take one
  std::vector<char> reads, writes;     // by argument
  bool indices_may_be_on_host;
  bool draws_from_default;             // takes no generator, and draws nevertheless
  bool must_run_now;                   // its results decide what the host does next, or it draws random numbers
  bool host_waits;                     // so it does on a real device: what was queued before is over
  // The CPU's operator begins by allocating what it never touches, and a device's would not: BatchNorm's backward
  // allocates its first result twice. Should another version of it keep the first, it is moved to device memory.
  int untouched_allocations;
};
const OpInfo& info_of(const c10::OperatorHandle& op);

// "The device runs now", on the host's thread, see Note [Jobs of the host's own]; CPU memory is device memory meanwhile.
class KernelScope {
 public:
  KernelScope(int device, const std::string& name);
  ~KernelScope();

 private:
  int before_;
  bool outermost_;
  Device& device_;
  Stream* stream_ = nullptr;
  const std::string& name_;
  Clock::time_point start_;
};
// The end of a kernel: be as slow as the knob says, and account for it.
void end_kernel(Device& on, Clock::time_point start, StreamId stream, const std::string& name);

// What a call with given operands produces, learnt from the first one (launch.cpp).
struct Recipe;
// Queue the call and put its results on the stack, if a call like it was seen before. If not, `recipe` is where to learn it,
// or nullptr if it cannot be learnt.
bool launch(const c10::OperatorHandle& op, torch::jit::Stack* stack, Call& call, Recipe** recipe);
// The call that could not be launched has run: remember what it produced. The first `memories` are its operands'.
void learn(Recipe* recipe, const torch::jit::Stack& stack, size_t returns, const Call& call, size_t memories);

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace lowtide::sim
