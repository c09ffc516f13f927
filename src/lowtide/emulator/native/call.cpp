#include "call.h"

#include <c10/core/StorageImpl.h>

#include <shared_mutex>
#include <thread>

#include "span.h"

namespace lowtide::sim {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;
using c10::StorageImpl;

Tensor dress(Storage storage, DispatchKey key, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return made;
}

Tensor Call::to_cpu(const Tensor& t, bool read, bool written) {
  int index = t.device().index();
  TORCH_CHECK(device_index < 0 || device_index == index,
              "Expected all tensors to be on the same device, but found at least two devices, sim:", device_index,
              " and sim:", index, "!");
  device_index = index;
  auto* storage = t.storage().unsafeGetStorageImpl();
  Storage cpu;
  for (auto& memory : memories)
    if (memory.device.unsafeGetStorageImpl() == storage) cpu = memory.cpu;
  if (!cpu) {
    void* block = storage->data_ptr().get_context();
    cpu = Storage(c10::make_intrusive<StorageImpl>(
        StorageImpl::use_byte_size_t(), storage->nbytes(), at::DataPtr(block, c10::Device(c10::DeviceType::CPU)),
        front_allocator(), true));
    memories.push_back({t.storage(), cpu, block});
  }
  auto dressed = dress(cpu, DispatchKey::CPU, t);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) dressed.unsafeGetTensorImpl()->set_wrapped_number(true);
  operands.push_back({t, dressed, read, written});
  return dressed;
}

Tensor Call::to_device(const Tensor& result) {
  if (!result.defined() || !result.device().is_cpu()) return result;
  for (auto& operand : operands)
    if (operand.cpu.unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) return operand.device;
  auto* storage = result.storage().unsafeGetStorageImpl();
  for (auto& memory : memories)
    if (memory.cpu.unsafeGetStorageImpl() == storage) return dress(memory.device, DispatchKey::PrivateUse1, result);
  Storage adopted = adopt(storage);
  memories.push_back({adopted, result.storage(), adopted.data_ptr().get_context()});
  return dress(adopted, DispatchKey::PrivateUse1, result);
}

Storage Call::adopt(StorageImpl* made) {
  Device& on = device(device_index);
  void* block = made->mutable_data();
  size_t nbytes = made->nbytes();
  if (nbytes && on.arena.holds_kernel_address(block) && made->data_ptr().get_context() == block) {
    auto before = made->set_data_ptr(at::DataPtr(block, c10::Device(c10::DeviceType::CPU)));
    before.release_context();
  } else {  // a result that no allocator of ours made, such as a constant of the kernel's
    void* moved = on.arena.allocate(nbytes);
    if (nbytes) std::memcpy(moved, block, nbytes);
    block = moved;
  }
  return Storage(c10::make_intrusive<StorageImpl>(
      StorageImpl::use_byte_size_t(), nbytes, own_block(on, block), device_allocator(), true));
}

bool Call::pass_on_resizes() {
  bool any = false;
  for (auto& memory : memories) {
    auto* cpu = memory.cpu.unsafeGetStorageImpl();
    if (cpu->data() == memory.block && cpu->nbytes() == memory.device.nbytes()) continue;
    any = true;
    Storage adopted = adopt(cpu);
    auto* storage = memory.device.unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(adopted.unsafeGetStorageImpl()->set_data_ptr(
        at::DataPtr(nullptr, c10::Device(kSim, static_cast<DeviceIndex>(device_index)))));
    storage->set_nbytes(cpu->nbytes());
    memory.block = storage->data_ptr().get_context();
  }
  for (auto& operand : operands) {
    const Tensor &t = operand.device, &cpu = operand.cpu;
    if (t.sizes() == cpu.sizes() && t.strides() == cpu.strides() && t.storage_offset() == cpu.storage_offset()) continue;
    any = true;
    t.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }
  return any;
}

void add_access(std::vector<races::Access>& to, const Tensor& t, bool write) {
  if (!t.defined() || !t.is_privateuseone() || t.numel() == 0) return;
  auto* first = static_cast<const char*>(t.storage().data_ptr().get_context());
  if (!first) return;
  Span span = span_of(t, first + t.storage_offset() * t.element_size());
  to.push_back({span.start, span.nbytes, write});
}

std::vector<races::Access> Call::accesses() const {
  std::vector<races::Access> all;
  for (const auto& operand : operands) {
    if (operand.read) add_access(all, operand.device, false);
    if (operand.written) add_access(all, operand.device, true);
  }
  return all;
}

// ---- what a schema tells ----

namespace {

OpInfo read_schema(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  OpInfo info{};
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (auto optional = argument.type()->cast<c10::OptionalType>())
      if (optional->getElementType()->kind() == c10::TypeKind::GeneratorType) info.generators.push_back(i);
    const auto* alias = argument.alias_info();
    info.writes.push_back(alias && alias->isWrite());
    info.reads.push_back(!alias || (alias->isWrite() && !argument.is_out()));
  }
  if (name == "aten::native_batch_norm") info.writes[3] = info.writes[4] = true;  // running statistics; not annotated
  if (name == "aten::native_batch_norm_backward") info.untouched_allocations = 1;
  bool seeded = op.hasTag(at::Tag::nondeterministic_seeded);
  bool decides = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  info.draws_from_default = info.generators.empty() && seeded;
  info.must_run_now = !info.generators.empty() || seeded || decides;
  info.host_waits = decides;
  for (const auto& result : schema.returns()) {
    auto kind = result.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) info.host_waits = true;
  }
  for (const char* lax : {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
                          "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::_pack_padded_sequence"})
    if (name == lax) info.indices_may_be_on_host = true;
  return info;
}

}  // namespace

const OpInfo& info_of(const c10::OperatorHandle& op) {
  static std::shared_mutex mutex;
  static auto* known = new std::unordered_map<const void*, OpInfo>;
  const void* key = &op.schema();
  {
    std::shared_lock guard(mutex);
    if (auto found = known->find(key); found != known->end()) return found->second;
  }
  OpInfo info = read_schema(op);
  std::unique_lock guard(mutex);
  return known->emplace(key, std::move(info)).first->second;
}

// ---- running ----

void end_kernel(Device& on, Clock::time_point start, StreamId stream, const std::string& name) {
  double slowdown = knobs().slowdown;
  if (slowdown > 1) {
    auto took = Clock::now() - start;
    std::this_thread::sleep_for(std::chrono::duration_cast<Clock::duration>(took * (slowdown - 1)));
  }
  auto end = on.activity.end(Work::kKernel, 0);
  trace().add(Work::kKernel, on.index, stream, start, end, 0, name);
}

KernelScope::KernelScope(int index, const std::string& name)
    : before_(kernel_device), outermost_(before_ < 0), device_(device(index)), name_(name) {
  if (outermost_) {
    stream_ = &device_.current_stream();
    stream_->drain();
    device_.raise_pending_error();
    stream_->begin_own();
    kernel_bytes = kernel_peak_bytes = 0;
    ensure_front();
    start_ = device_.activity.begin(Work::kKernel);
  }
  kernel_device = index;
}

KernelScope::~KernelScope() {
  kernel_device = before_;
  if (!outermost_) return;
  end_kernel(device_, start_, stream_->id(), name_);
  stream_->end_own();
}

}  // namespace lowtide::sim
