// Asynchronous kernels. The first call with a given signature runs at once, and the metadata of its results is kept;
// later calls allocate their results from it and queue the CPU kernel on the stream, as a launch on a device does.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clone.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

#include "call.h"

namespace lowtide::sim {

using at::Tensor;
using c10::IValue;
using c10::Storage;
using c10::StorageImpl;
using torch::jit::Stack;

struct Result {
  enum Kind { kUndefined, kOperand, kView, kNew } kind = kUndefined;
  size_t of = 0;  // which operand, which memory, or which new storage
  caffe2::TypeMeta dtype;
  c10::DimVector sizes, strides;
  int64_t offset = 0;
};

struct Recipe {
  bool known = false;
  std::vector<Result> results;
  std::vector<int> shape;            // for each return: -1 a tensor, else the length of a list
  std::vector<size_t> fresh_nbytes;  // new storages
  size_t scratch_nbytes = 0;
};

namespace {

using Key = std::vector<int64_t>;
struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t hash = 1469598103934665603ull;
    for (int64_t part : key) hash = (hash ^ static_cast<uint64_t>(part)) * 1099511628211ull;
    return hash ^ (hash >> 31);
  }
};
std::mutex recipes_mutex;
std::unordered_map<Key, Recipe, KeyHash>& recipes() {
  static auto* instance = new std::unordered_map<Key, Recipe, KeyHash>;
  return *instance;
}

enum Mark : int64_t {
  kUndefinedTensor = -1, kNone = -3, kDouble = -4, kInt = -5, kTrue = -6, kFalse = -7, kInts = -8, kBools = -9,
  kDoubles = -10, kText = -11, kDevice = -12, kTensors = -13, kOptionalTensors = -14, kList = -15, kComplex = -16,
};

bool add_tensor(Key& key, const Tensor& t, const Call& call, bool host_scalar_allowed) {
  if (!t.defined()) {
    key.push_back(kUndefinedTensor);
    return true;
  }
  int64_t memory = -1;
  auto* storage = t.storage().unsafeGetStorageImpl();
  for (size_t i = 0; i < call.memories.size(); ++i)
    if (call.memories[i].cpu.unsafeGetStorageImpl() == storage) memory = static_cast<int64_t>(i);
  // A host operand may have changed by the time the kernel runs; a scalar is copied at launch.
  if (memory < 0 && !(host_scalar_allowed && t.dim() == 0)) return false;
  auto wrapped = static_cast<int64_t>(t.unsafeGetTensorImpl()->is_wrapped_number());
  key.push_back(static_cast<int64_t>(t.scalar_type()) | (memory + 1) << 8 | t.dim() << 40 | wrapped << 56);
  key.insert(key.end(), t.sizes().begin(), t.sizes().end());
  key.insert(key.end(), t.strides().begin(), t.strides().end());
  key.push_back(t.storage_offset());
  return true;
}

bool add_value(Key& key, const IValue& value, const Call& call) {
  auto mark = [&](Mark m) { key.push_back(m); return true; };
  if (value.isTensor()) return add_tensor(key, value.toTensor(), call, true);
  if (value.isNone()) return mark(kNone);
  if (value.isBool()) return mark(value.toBool() ? kTrue : kFalse);
  if (value.isInt()) {
    mark(kInt);
    key.push_back(value.toInt());
    return true;
  }
  // Floating-point numbers decide no shapes (a launch checks that), and a learning rate changes from step to step.
  if (value.isDouble()) return mark(kDouble);
  if (value.isComplexDouble()) return mark(kComplex);
  if (value.isDoubleList()) return mark(kDoubles);
  if (value.isDevice()) return mark(kDevice);
  if (value.isString()) {
    mark(kText);
    key.push_back(static_cast<int64_t>(std::hash<std::string>()(value.toStringRef())));
    return true;
  }
  if (value.isIntList()) {
    mark(kInts);
    auto list = value.toIntVector();
    key.push_back(static_cast<int64_t>(list.size()));
    key.insert(key.end(), list.begin(), list.end());
    return true;
  }
  if (value.isBoolList()) {
    mark(kBools);
    for (bool item : value.toBoolList()) key.push_back(item);
    return true;
  }
  if (value.isTensorList()) {
    mark(kTensors);
    for (const Tensor& t : value.toTensorVector())
      if (!add_tensor(key, t, call, false)) return false;
    return true;
  }
  if (value.isOptionalTensorList()) {
    mark(kOptionalTensors);
    for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
      if (!add_tensor(key, t.value_or(Tensor()), call, false)) return false;
    return true;
  }
  if (value.isList()) {
    mark(kList);
    for (const IValue& item : value.toListRef())
      if (!add_value(key, item, call)) return false;
    return true;
  }
  return false;
}

template <class F>
void for_each_result(const Stack& stack, size_t returns, F visit) {
  for (size_t i = stack.size() - returns; i < stack.size(); ++i) {
    if (stack[i].isTensor()) {
      visit(stack[i].toTensor());
    } else if (stack[i].isTensorList()) {
      for (const Tensor& t : stack[i].toTensorVector()) visit(t);
    }
  }
}

Result describe(const Tensor& t, const Call& call, size_t memories, std::vector<StorageImpl*>& fresh) {
  Result result;
  if (!t.defined()) return result;
  result.dtype = t.dtype();
  result.sizes = t.sizes();
  result.strides = t.strides();
  result.offset = t.storage_offset();
  for (size_t i = 0; i < call.operands.size(); ++i)
    if (call.operands[i].cpu.unsafeGetTensorImpl() == t.unsafeGetTensorImpl()) {
      result.kind = Result::kOperand;
      result.of = i;
      return result;
    }
  auto* storage = t.storage().unsafeGetStorageImpl();
  for (size_t i = 0; i < memories; ++i)
    if (call.memories[i].cpu.unsafeGetStorageImpl() == storage) {
      result.kind = Result::kView;
      result.of = i;
      return result;
    }
  result.kind = Result::kNew;
  auto found = std::find(fresh.begin(), fresh.end(), storage);
  result.of = static_cast<size_t>(found - fresh.begin());
  if (found == fresh.end()) fresh.push_back(storage);
  return result;
}

// Scalars in host memory belong to the host: the kernel gets copies.
void copy_host_scalars(Stack& arguments) {
  for (IValue& value : arguments) {
    if (!value.isTensor()) continue;
    Tensor t = value.toTensor();
    if (!t.defined() || t.dim() > 0 || !t.has_storage() || device_of_kernel_address(t.storage().data())) continue;
    Tensor copy = t.clone();
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    value = copy;
  }
}

// A launched kernel, on the worker of its stream.
struct Launched {
  c10::OperatorHandle op;
  Stack arguments;
  const Recipe& recipe;
  std::vector<Prepared> outputs;
  Device& on;
  StreamId stream;

  void operator()() {
    const std::string& name = op.schema().name();
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    follow_thread_count();
    ensure_front();
    auto start = on.activity.begin(Work::kKernel);
    try {
      prepared = &outputs;
      {
        Untouched allocations(info_of(op).untouched_allocations);
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
      }
      prepared = nullptr;
      settle();
    } catch (const c10::Error& error) {
      prepared = nullptr;
      on.keep_error(name + ": " + error.what_without_backtrace());
    } catch (const std::exception& error) {
      prepared = nullptr;
      on.keep_error(name + ": " + error.what());
    }
    arguments.clear();
    end_kernel(on, start, stream, name);
  }

 private:
  // See that every result is where its tensor expects it: outputs of one size may have taken each other's block.
  void settle() {
    size_t next = 0;
    std::set<const void*> found;
    std::vector<std::pair<void*, std::string>> moves;  // all are read before any is written
    for_each_result(arguments, op.schema().returns().size(), [&](const Tensor& t) {
      const Result& expected = recipe.results[next++];
      if (expected.kind == Result::kOperand || expected.kind == Result::kView)
        TORCH_CHECK(!t.storage().nbytes() || on.arena.holds_kernel_address(t.storage().data()),
                    "sim: the kernel moved an operand's memory; this operator cannot run asynchronously");
      if (expected.kind != Result::kNew) return;
      size_t nbytes = recipe.fresh_nbytes[expected.of];
      TORCH_CHECK(t.sizes() == at::IntArrayRef(expected.sizes) && t.strides() == at::IntArrayRef(expected.strides) &&
                      t.storage().nbytes() == nbytes,
                  "sim: the same operands gave a result of another shape; this operator cannot run asynchronously");
      const void* data = t.storage().data();
      found.insert(data);
      if (data != outputs[expected.of].block)
        moves.emplace_back(outputs[expected.of].block, std::string(static_cast<const char*>(data), nbytes));
    });
    for (const Prepared& output : outputs)
      TORCH_CHECK(!output.taken || !output.nbytes || found.count(output.block), "sim: the kernel kept an output's memory");
    for (auto& [to, bytes] : moves) std::memcpy(to, bytes.data(), bytes.size());
  }
};

void queue(const c10::OperatorHandle& op, Stack* stack, Call& call, const Recipe& recipe) {
  Device& on = device(call.device_index);
  c10::OptionalDeviceGuard guard(c10::Device(kSim, static_cast<DeviceIndex>(call.device_index)));
  std::vector<Storage> fresh;
  std::vector<Prepared> outputs;
  for (size_t nbytes : recipe.fresh_nbytes) {  // may raise OutOfMemoryError, at launch, as on a GPU
    fresh.emplace_back(c10::make_intrusive<StorageImpl>(
        StorageImpl::use_byte_size_t(), nbytes, device_allocator()->allocate(nbytes), device_allocator(), true));
    outputs.push_back({fresh.back().data_ptr().get_context(), nbytes, false});
  }
  // The kernel takes its scratch from the host's heap; the device pays for it here, until the launch returns.
  at::DataPtr scratch = device_allocator()->allocate(recipe.scratch_nbytes);

  size_t count = op.schema().arguments().size(), next = 0;
  Stack arguments(stack->end() - static_cast<int64_t>(count), stack->end());
  copy_host_scalars(arguments);
  torch::jit::drop(*stack, count);
  std::vector<races::Access> accesses;
  bool racing = races::enabled();
  if (racing) accesses = call.accesses();
  auto make = [&]() -> Tensor {
    const Result& result = recipe.results[next++];
    if (result.kind == Result::kUndefined) return Tensor();
    if (result.kind == Result::kOperand) return call.operands[result.of].device;
    Storage storage = result.kind == Result::kView ? call.memories[result.of].device : fresh[result.of];
    auto t = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype);
    t.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes, result.strides, result.offset);
    if (racing && result.kind == Result::kNew) add_access(accesses, t, true);
    return t;
  };
  for (int length : recipe.shape) {
    if (length < 0) {
      stack->emplace_back(make());
    } else {
      std::vector<Tensor> list;
      for (int i = 0; i < length; ++i) list.push_back(make());
      stack->emplace_back(std::move(list));
    }
  }
  Stream& stream = on.current_stream();
  // std::function wants to be copyable, and copies of the arguments would keep them alive.
  auto job = std::make_shared<Launched>(Launched{op, std::move(arguments), recipe, std::move(outputs), on, stream.id()});
  stream.push([job = std::move(job)] { (*job)(); },
              [&] { races::submit(stream.agent(), op.schema().name(), accesses.data(), accesses.size()); }, true);
}

}  // namespace

bool launch(const c10::OperatorHandle& op, Stack* stack, Call& call, Recipe** recipe) {
  *recipe = nullptr;
  Key key;
  key.reserve(64);
  key.push_back(reinterpret_cast<int64_t>(&op.schema()));
  key.push_back(call.device_index);
  size_t count = op.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i)
    if (!add_value(key, (*stack)[i], call)) return false;
  {
    std::lock_guard<std::mutex> guard(recipes_mutex);
    *recipe = &recipes()[std::move(key)];  // stays where it is: nothing is ever erased
    if (!(*recipe)->known) return false;
  }
  queue(op, stack, call, **recipe);
  return true;
}

void learn(Recipe* recipe, const Stack& stack, size_t returns, const Call& call, size_t memories) {
  Recipe learnt;
  for (size_t i = stack.size() - returns; i < stack.size(); ++i) {
    if (stack[i].isTensor())
      learnt.shape.push_back(-1);
    else if (stack[i].isTensorList())
      learnt.shape.push_back(static_cast<int>(stack[i].toTensorVector().size()));
    else
      return;
  }
  std::vector<StorageImpl*> fresh;
  for_each_result(stack, returns, [&](const Tensor& t) { learnt.results.push_back(describe(t, call, memories, fresh)); });
  int64_t fresh_total = 0;
  for (auto* storage : fresh) {
    learnt.fresh_nbytes.push_back(storage->nbytes());
    fresh_total += static_cast<int64_t>(storage->nbytes());
  }
  learnt.scratch_nbytes = static_cast<size_t>(std::max<int64_t>(0, kernel_peak_bytes - fresh_total));
  learnt.known = true;
  std::lock_guard<std::mutex> guard(recipes_mutex);
  if (!recipe->known) *recipe = std::move(learnt);
}

}  // namespace lowtide::sim
