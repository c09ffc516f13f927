// Every operator that has no kernel of its own: the CPU's kernel on device memory, without a copy.
#include <ATen/core/dispatch/Dispatcher.h>

#include "call.h"

namespace lowtide::sim {

using at::Tensor;
using c10::IValue;

namespace {

struct Dressed {
  bool to_cpu = false;     // a device argument asks for a result in host memory
  bool has_host = false;   // an operand lives in host memory, other than a scalar
  bool first_is_host = false;
  int target = -1;         // the device that an argument names
};

Dressed dress_arguments(torch::jit::Stack& stack, size_t first, const OpInfo& info, Call& call) {
  Dressed found;
  bool any = false;
  for (size_t i = 0; first + i < stack.size(); ++i) {
    auto dressed = [&](const Tensor& t) -> Tensor {
      if (!t.defined()) return t;
      if (t.is_privateuseone()) {
        any = true;
        return call.to_cpu(t, info.reads[i], info.writes[i]);
      }
      if (t.dim() > 0 && t.is_cpu()) {
        found.has_host = true;
        if (!any) found.first_is_host = true;
      }
      any = true;
      return t;
    };
    IValue& value = stack[first + i];
    if (value.isTensor()) {
      value = dressed(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (Tensor& t : list) t = dressed(t);
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> t : value.toOptionalTensorVector()) {
        if (t && t->defined()) t = dressed(*t);
        list.push_back(t);
      }
      value = list;
    } else if (value.isDevice()) {
      if (value.toDevice().type() == kSim) {
        found.target = index_of(value.toDevice());
        value = c10::Device(c10::DeviceType::CPU);
      } else {
        found.to_cpu = true;
      }
    } else if (value.isGenerator() && value.toGenerator().device().type() == kSim) {
      value = inner_generator(value.toGenerator());
    }
  }
  if (call.device_index < 0) call.device_index = found.target >= 0 ? found.target : current_device;
  return found;
}

void undress_results(torch::jit::Stack& stack, size_t returns, Call& call) {
  for (size_t i = stack.size() - returns; i < stack.size(); ++i) {
    IValue& value = stack[i];
    if (value.isTensor()) {
      value = call.to_device(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (Tensor& t : list) t = call.to_device(t);
      value = list;
    }
  }
}

// A kernel that the host ran itself is reported as the launch that it would be on a device: see races.h.
void report(const std::string& name, const OpInfo& info, const Call& call, size_t memories,
            const torch::jit::Stack& stack, size_t returns, bool to_cpu) {
  auto accesses = call.accesses();
  for (size_t i = stack.size() - returns; i < stack.size() && !to_cpu; ++i) {
    auto add = [&](const Tensor& t) {
      if (!t.defined()) return;
      for (size_t k = 0; k < memories; ++k)  // an operand, or a view of one
        if (call.memories[k].device.unsafeGetStorageImpl() == t.storage().unsafeGetStorageImpl()) return;
      add_access(accesses, t, true);
    };
    if (stack[i].isTensor()) add(stack[i].toTensor());
    if (stack[i].isTensorList())
      for (const Tensor& t : stack[i].toTensorVector()) add(t);
  }
  Stream& stream = device(call.device_index).current_stream();
  stream.announce([&] { races::submit(stream.agent(), name, accesses.data(), accesses.size()); });
  if (info.host_waits || to_cpu) races::sync_stream(stream.agent());
}

}  // namespace

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const OpInfo& info = info_of(op);
  const size_t count = schema.arguments().size(), first = stack->size() - count, returns = schema.returns().size();
  Call call;
  Dressed dressed = dress_arguments(*stack, first, info, call);
  if (dressed.has_host && !call.operands.empty() && knobs().strict)
    TORCH_CHECK(info.indices_may_be_on_host && !dressed.first_is_host,
                "Expected all tensors to be on the same device, but found at least two devices, sim:", call.device_index,
                " and cpu! (in ", schema.name(), ")");
  for (size_t i : info.generators)
    if ((*stack)[first + i].isNone()) (*stack)[first + i] = inner_generator(default_generator(call.device_index));
  follow_thread_count();
  Recipe* recipe = nullptr;
  bool queueable = !info.must_run_now && !dressed.to_cpu && !dressed.has_host && !call.operands.empty();
  if (queueable && kernel_device < 0 && !is_worker && launch(op, stack, call, &recipe)) return;

  BorrowedGenerator generator(info.draws_from_default, call.device_index);
  KernelScope scope(call.device_index, schema.name());
  const size_t memories = call.memories.size();
  {
    Untouched allocations(info.untouched_allocations);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  bool resized = call.pass_on_resizes();
  if (!dressed.to_cpu) {
    if (recipe && !resized) learn(recipe, *stack, returns, call, memories);
    undress_results(*stack, returns, call);
  }
  if (races::enabled() && !is_worker) report(schema.name(), info, call, memories, *stack, returns, dressed.to_cpu);
}

}  // namespace lowtide::sim
