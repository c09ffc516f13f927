// The operators that need a kernel of their own, and the registration of all.
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "call.h"
#include "copies.h"
#include "recurrent.h"

namespace lowtide::sim {
namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
using c10::Storage;
using c10::StorageImpl;
using MaybeDevice = std::optional<c10::Device>;
using MaybeType = std::optional<at::ScalarType>;
using MaybeLayout = std::optional<at::Layout>;
using MaybeFormat = std::optional<at::MemoryFormat>;

const c10::DispatchKeySet kKey(c10::DispatchKey::PrivateUse1);

int64_t plain(const SymInt& n) {
  return n.guard_int(__FILE__, __LINE__);
}

Tensor empty(at::IntArrayRef size, MaybeType dtype, MaybeLayout, MaybeDevice where, std::optional<bool> pin, MaybeFormat format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(where);
  return at::detail::empty_generic(size, device_allocator(), kKey, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, MaybeType dtype, MaybeLayout, MaybeDevice where,
                     std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(where);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKey, c10::dtype_or_default(dtype));
}

// Zeros without memory, which gradients are where they vanish.
Tensor zeros_without_memory(at::IntArrayRef size, MaybeType dtype, MaybeLayout, MaybeDevice where, std::optional<bool>) {
  at::native::ZeroTensorAllocator allocator(c10::Device(kSim, where ? index_of(*where) : current_device));
  return at::detail::empty_generic(
      size, &allocator, kKey | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor), c10::dtype_or_default(dtype), std::nullopt);
}

const Tensor& resize_(const Tensor& self, SymIntArrayRef wanted, MaybeFormat format) {
  auto size = C10_AS_INTARRAYREF_SLOW(wanted);
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  size_t need =
      at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.element_size(), self.storage_offset());
  if (need > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), need);
  return self;
}

Tensor& set_storage_(Tensor& self, Storage storage, SymInt offset, SymIntArrayRef sizes, SymIntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  auto size = C10_AS_INTARRAYREF_SLOW(sizes), stride = C10_AS_INTARRAYREF_SLOW(strides);
  impl->set_storage_offset(plain(offset));
  if (stride.empty() && !size.empty())
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride, plain(offset));
  return self;
}

Tensor& set_to_empty_(Tensor& self) {
  Storage none(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), 0, device_allocator(), true));
  return set_storage_(self, std::move(none), 0, {SymInt(0)}, {SymInt(1)});
}

Tensor as_strided(const Tensor& self, SymIntArrayRef sizes, SymIntArrayRef strides, std::optional<SymInt> offset) {
  auto at = offset ? std::optional<int64_t>(plain(*offset)) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), at);
}

Tensor view(const Tensor& self, SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

Tensor reshape_alias(const Tensor& self, SymIntArrayRef sizes, SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

// `p.data = cpu_tensor`, which model.to(device) does, is refused for an unknown device.
bool may_swap_data(const Tensor&, const Tensor&) {
  return true;
}

void record_stream(Tensor& self, c10::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

// As the CPU computes it, so that both give the same bits: PyTorch takes a fused operator for accelerators.
Tensor dropout(const Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.sym_numel() == 0) return input;
  if (p == 1) return input.mul(at::zeros({}, input.options()));
  return input.mul(at::empty_like(input).bernoulli_(1 - p).div_(1 - p));
}

// Attention takes the CPU's choice of kernels: by default an unknown device gets the slowest one.
int64_t attention_choice(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double dropout_p, bool is_causal, std::optional<double> scale, bool grouped) {
  Call call;
  auto dressed = [&](const Tensor& t) {
    Tensor alias = call.to_cpu(t.detach());
    alias.set_requires_grad(t.requires_grad());
    return alias;
  };
  std::optional<Tensor> its_mask;
  if (mask && mask->defined()) its_mask = dressed(*mask);
  return at::_fused_sdp_choice(dressed(query), dressed(key), dressed(value), its_mask, dropout_p, is_causal, scale, grouped);
}

Tensor get_rng_state(int64_t index) {
  auto generator = default_generator(static_cast<int>(index));
  std::lock_guard<std::mutex> guard(generator.mutex());
  return Tensor(generator.get_state());
}
void set_rng_state(const Tensor& state, int64_t index) {
  auto generator = default_generator(static_cast<int>(index));
  std::lock_guard<std::mutex> guard(generator.mutex());
  generator.set_state(state);
}
void manual_seed(int64_t seed, int64_t index) {
  auto generator = default_generator(static_cast<int>(index));
  std::lock_guard<std::mutex> guard(generator.mutex());
  generator.set_current_seed(static_cast<uint64_t>(seed));
}

TORCH_LIBRARY(lowtide_sim, m) {
  auto anywhere = c10::DispatchKey::CompositeExplicitAutograd;
  m.def("host_window(Tensor(a) self) -> Tensor(a)");
  m.def("get_rng_state(int index) -> Tensor", torch::dispatch(anywhere, &get_rng_state));
  m.def("set_rng_state(Tensor state, int index) -> ()", torch::dispatch(anywhere, &set_rng_state));
  m.def("manual_seed(int seed, int index) -> ()", torch::dispatch(anywhere, &manual_seed));
}
TORCH_LIBRARY_IMPL(lowtide_sim, PrivateUse1, m) {
  m.impl("host_window", &host_window);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &zeros_without_memory);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, Storage)>(&at::native::set_));
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", &set_to_empty_);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &may_swap_data);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("dropout", &dropout);
  m.impl("lstm.input", &lstm);
  m.impl("gru.input", &gru);
  m.impl("rnn_tanh.input", &rnn_tanh);
  m.impl("rnn_relu.input", &rnn_relu);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  // Where the CPU has a kernel beside a composite one, an unknown device would get the composite one: other bits, or more
  // and smaller kernels. The composite convolution would even refuse the device.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    bool on_cpu = op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
                  (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
                   op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
                   op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd));
    bool whole = name.name.rfind("aten::_foreach_", 0) == 0 || name.name == "aten::convolution" ||
                 name.name == "aten::convolution_backward";
    if (!on_cpu && !whole) continue;
    auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}
// Copies know what a conjugate or negative view means. Resolving one first would be a copy itself, and never end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
// Composed of operators that autograd knows.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("dropout", &dropout);
  m.impl("lstm.input", &lstm);
  m.impl("gru.input", &gru);
  m.impl("rnn_tanh.input", &rnn_tanh);
  m.impl("rnn_relu.input", &rnn_relu);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define SIM_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FLOAT)
  KERNEL_PRIVATEUSEONE(binary_cross_entropy, fp32)
}

}  // namespace
}  // namespace lowtide::sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &lowtide::sim::attention_choice)
}
