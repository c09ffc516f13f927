// See calls.h.
#include "calls.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <typeinfo>

#if __has_include(<torch/headeronly/version.h>)
#include <torch/headeronly/version.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace lowtide {

bool is_plain(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  // Wrappers of all kinds (vmap, functionalization, quantized, nested) have classes of their own.
  return typeid(*impl) == typeid(c10::TensorImpl) && impl->has_storage() &&
      impl->device_type() == c10::DeviceType::CPU && impl->layout() == c10::kStrided &&
      !impl->key_set().has(c10::DispatchKey::Python) && !impl->key_set().has(c10::DispatchKey::ZeroTensor) &&
      !impl->has_symbolic_sizes_strides() && !impl->is_inference();
}

namespace {

constexpr uint32_t kUsualRounding = 0x1F80;
constexpr uint32_t kStatus = 0x3F;  // what happened so far, which is not a setting

uint32_t rounding_now() {
#if defined(__x86_64__)
  return _mm_getcsr() & ~kStatus;
#else
  return kUsualRounding;
#endif
}

void set_rounding(uint32_t rounding) {
#if defined(__x86_64__)
  _mm_setcsr(rounding | (_mm_getcsr() & kStatus));
#else
  (void)rounding;
#endif
}

// How precise oneDNN's convolutions, recurrent layers and products are.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10  // neither is defined in older versions
constexpr std::array<at::Float32Op, 3> kPrecise = {
    at::Float32Op::CONV, at::Float32Op::RNN, at::Float32Op::MATMUL};

std::array<int, 3> precisions_now() {
  std::array<int, 3> found;
  for (size_t i = 0; i < kPrecise.size(); ++i)
    found[i] = static_cast<int>(at::globalContext().float32Precision(at::Float32Backend::MKLDNN, kPrecise[i]));
  return found;
}

void set_precisions(const std::array<int, 3>& wanted, const std::array<int, 3>& now) {
  at::Context& context = at::globalContext();
  auto inherited = context.float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::ALL);
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (wanted[i] == now[i]) continue;
    auto precision = static_cast<at::Float32Precision>(wanted[i]);
    context.setFloat32Precision(
        at::Float32Backend::MKLDNN, kPrecise[i], precision == inherited ? at::Float32Precision::NONE : precision);
  }
}
#else
// Torch 2.9 knows them by words, older versions know that of products alone.
template <class Context>
concept Worded = requires(Context& context, const std::string& word) { context.setFloat32Precision(word, word, word); };

const std::string kOneDnn = "mkldnn";
const std::array<std::string, 3> kPrecise = {"conv", "rnn", "matmul"};
const std::array<std::string, 4> kWords = {"none", "ieee", "tf32", "bf16"};

template <class Context>
std::array<int, 3> precisions_of(Context& context) {
  if constexpr (Worded<Context>) {
    std::array<int, 3> found;
    for (size_t i = 0; i < kPrecise.size(); ++i) {
      auto word = std::find(kWords.begin(), kWords.end(), context.float32Precision(kOneDnn, kPrecise[i]));
      found[i] = static_cast<int>(word - kWords.begin());
    }
    return found;
  } else {
    return {static_cast<int>(context.float32MatmulPrecision()), 0, 0};
  }
}

template <class Context>
void set_precisions_of(Context& context, const std::array<int, 3>& wanted, const std::array<int, 3>& now) {
  if constexpr (Worded<Context>) {
    std::string inherited = context.float32Precision(kOneDnn, "all");
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (wanted[i] == now[i]) continue;
      const std::string& word = kWords.at(wanted[i]);
      context.setFloat32Precision(kOneDnn, kPrecise[i], word == inherited ? "none" : word);
    }
  } else if (wanted != now) {
    context.setFloat32MatmulPrecision(static_cast<at::Float32MatmulPrecision>(wanted[0]));
  }
}

std::array<int, 3> precisions_now() {
  return precisions_of(at::globalContext());
}

void set_precisions(const std::array<int, 3>& wanted, const std::array<int, 3>& now) {
  set_precisions_of(at::globalContext(), wanted, now);
}
#endif

// Those of the process and of this thread, but for what guards see to.
void set(const Settings& wanted, const Settings& now) {
  at::Context& context = at::globalContext();
  if (wanted.threads != now.threads) at::set_num_threads(wanted.threads);
  if (wanted.onednn != now.onednn) context.setUserEnabledMkldnn(wanted.onednn);
  if (wanted.deterministic != now.deterministic || wanted.warn_only != now.warn_only)
    context.setDeterministicAlgorithms(wanted.deterministic, wanted.warn_only);
  if (wanted.fills_uninitialized != now.fills_uninitialized)
    context.setDeterministicFillUninitializedMemory(wanted.fills_uninitialized);
  set_precisions(wanted.precisions, now.precisions);
  if (wanted.dtype != now.dtype) c10::set_default_dtype(wanted.dtype);
  if (wanted.autocast_dtype != now.autocast_dtype) at::autocast::set_autocast_dtype(at::kCPU, wanted.autocast_dtype);
  if (wanted.rounding != now.rounding) set_rounding(wanted.rounding);
}

// Have the settings of a call, and those of before afterwards.
class Under {
 public:
  explicit Under(const Settings& wanted)
      : wanted_(wanted), before_(Settings::now()), grad_(wanted.grad), keys_(wanted.keys),
        caches_(at::autocast::is_autocast_cache_enabled()) {
    // What autocast keeps of parameters is the program's: it would outlive this call.
    at::autocast::set_autocast_cache_enabled(false);
    set(wanted_, before_);
  }
  ~Under() {
    set(before_, wanted_);
    at::autocast::set_autocast_cache_enabled(caches_);
  }
  Under(const Under&) = delete;

 private:
  const Settings& wanted_;
  Settings before_;
  c10::AutoGradMode grad_;
  c10::impl::ForceDispatchKeyGuard keys_;
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  bool caches_;
};

// Nothing that others would see, and no mode of the program's.
bool are_plain(const c10::impl::LocalDispatchKeySet& keys) {
  const c10::DispatchKeySet strange(
      {c10::DispatchKey::Python,
       c10::DispatchKey::PythonTLSSnapshot,
       c10::DispatchKey::PreDispatch,
       c10::DispatchKey::PythonDispatcher,
       c10::DispatchKey::Functionalize,
       c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
       c10::DispatchKey::FuncTorchDynamicLayerBackMode,
       c10::DispatchKey::FuncTorchVmapMode,
       c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchGradWrapper,
       c10::DispatchKey::TESTING_ONLY_GenericMode,
       c10::DispatchKey::Tracer});
  return !keys.included_.has_any(strange);
}

// False: the tensor cannot be had again.
bool describe(const at::Tensor& tensor, bool written, bool by_layout, Operand& into) {
  if (!tensor.defined()) return true;
  if (!is_plain(tensor)) return false;
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  into.defined = true;
  into.written = written;
  into.nbytes = static_cast<int64_t>(storage->nbytes());
  into.layout = {tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(),
                 static_cast<int8_t>(tensor.scalar_type()), tensor.is_conj(), tensor.is_neg(), impl->is_wrapped_number(), tensor.requires_grad()};
  // Whoever does not know conjugated or negated tensors is given them as they are: they are read.
  if (by_layout && !into.layout.conj && !into.layout.neg) return true;
  if (into.nbytes >= kLarge / 2) {
    if (Range* range = ranges().of_data(storage->data())) {
      into.serial = range->serial;
      into.version = range->written_at;
      if (!written) ranges().protect(range);  // see Note [What a call remembers]
      return true;
    }
  }
  if (into.nbytes >= kLarge) return false;  // somebody else's memory, which changes unseen
  into.copy = Copy::of(storage->data(), into.nbytes);
  return into.copy != nullptr;
}

bool describe(const c10::IValue& value, bool written, bool by_layout, Argument& into) {
  auto add = [&](const at::Tensor& tensor) {
    return describe(tensor, written, by_layout, into.operands.emplace_back());
  };
  if (value.isTensor()) {
    into.kind = Argument::kTensor;
    return add(value.toTensor());
  }
  if (value.isTensorList()) {
    into.kind = Argument::kTensors;
    for (const at::Tensor& tensor : value.toTensorVector())
      if (!add(tensor)) return false;
    return true;
  }
  if (value.isOptionalTensorList()) {
    into.kind = Argument::kOptionalTensors;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (!add(tensor.value_or(at::Tensor()))) return false;
    return true;
  }
  bool number = value.isNone() || value.isInt() || value.isDouble() || value.isBool() || value.isComplexDouble();
  if (number || value.isString() || value.isDevice()) {
    into.value = std::make_shared<const c10::IValue>(value);
    return true;
  }
  if (!value.isList()) return false;
  for (const c10::IValue& item : value.toListRef())
    if (!item.isInt() && !item.isDouble() && !item.isBool() && !item.isComplexDouble() && !item.isString()) return false;
  into.value = std::make_shared<const c10::IValue>(value.deepcopy());  // whoever passed it may change it
  return true;
}

at::Tensor tensor_on(c10::Storage storage, const Layout& layout) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage),
      c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(layout.dtype)));
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(layout.sizes, layout.strides, layout.offset);
  if (layout.conj) impl->_set_conj(true);
  if (layout.neg) impl->_set_neg(true);
  if (layout.wrapped) impl->set_wrapped_number(true);
  // Some kernels make more where autograd will want it.
  if (layout.requires_grad) tensor.set_requires_grad(true);
  return tensor;
}

at::Tensor rebuilt(const Operand& operand, const StorageOf& storage_of) {
  if (!operand.defined) return {};
  if (operand.serial) return tensor_on(storage_of(operand), operand.layout);
  size_t bytes = operand.copy ? operand.copy->bytes.size() : 0;
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::GetAllocator(c10::DeviceType::CPU), true);
  if (bytes) std::memcpy(storage.mutable_data(), operand.copy->bytes.data(), bytes);
  return tensor_on(std::move(storage), operand.layout);
}

c10::IValue rebuilt(const Argument& argument, const StorageOf& storage_of) {
  switch (argument.kind) {
    case Argument::kTensor:
      return rebuilt(argument.operands[0], storage_of);
    case Argument::kTensors: {
      c10::List<at::Tensor> list;
      for (const Operand& operand : argument.operands) list.push_back(rebuilt(operand, storage_of));
      return list;
    }
    case Argument::kOptionalTensors: {
      c10::List<std::optional<at::Tensor>> list;
      for (const Operand& operand : argument.operands)
        list.push_back(operand.defined ? std::make_optional(rebuilt(operand, storage_of)) : std::nullopt);
      return list;
    }
    default:
      return argument.value ? *argument.value : c10::IValue();
  }
}

}  // namespace

const std::string& name_of(const Call& call) {
  return call.op->schema().name();
}

bool in_parallel_region() {
  return at::in_parallel_region();
}

void use_usual_rounding() {
  set_rounding(kUsualRounding);
}

Settings Settings::now() {
  at::Context& context = at::globalContext();
  return {
      c10::GradMode::is_enabled(),
      c10::impl::tls_local_dispatch_key_set(),
      at::get_num_threads(),
      context.userEnabledMkldnn(),
      context.deterministicAlgorithms(),
      context.deterministicAlgorithmsWarnOnly(),
      context.deterministicFillUninitializedMemory(),
      precisions_now(),
      c10::get_default_dtype(),
      at::autocast::get_autocast_dtype(at::kCPU),
      rounding_now()};
}

bool Settings::operator==(const Settings& other) const {
  return grad == other.grad && keys.included_ == other.keys.included_ && keys.excluded_ == other.keys.excluded_ &&
      threads == other.threads && onednn == other.onednn && deterministic == other.deterministic &&
      warn_only == other.warn_only && fills_uninitialized == other.fills_uninitialized &&
      precisions == other.precisions && dtype == other.dtype && autocast_dtype == other.autocast_dtype &&
      rounding == other.rounding;
}

std::shared_ptr<Copy> Copy::of(const void* data, int64_t bytes) {
  if (!try_reserve(bytes)) {
    pages().trim_for(bytes);
    if (!try_reserve(bytes)) return nullptr;
  }
  std::shared_ptr<Copy> copy(new Copy);
  auto* begin = static_cast<const char*>(data);
  copy->bytes.assign(begin, begin + bytes);
  return copy;
}

Copy::~Copy() {
  counters.reserved -= static_cast<int64_t>(bytes.size());
}

Repeats repeats_of(const c10::OperatorHandle& op, bool by_layout) {
  Repeats repeats;
  repeats.by_layout = by_layout;
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  // An operator of others may keep a state that no schema tells of. What `empty` makes is anything. Parts of what the
  // next ones make are never written, or differ with what autograd wants of them.
  bool ours = name.compare(0, 6, "aten::") == 0 && name.find("empty") == std::string::npos &&
      name.find("_ctc_loss") == std::string::npos && name != "aten::linalg_lstsq" && name != "aten::_sparse_mm_reduce_impl" &&
      name.find("resize") == std::string::npos && name.find("set_") == std::string::npos;
  if (!ours || schema.returns().empty()) return repeats;
  bool backward = name.size() > 9 && name.compare(name.size() - 9, 9, "_backward") == 0;
  bool unsaid = false;
  int position = 0;
  for (const auto& argument : schema.arguments()) {
    repeats.writes.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    bool statistics = !backward && !argument.alias_info() && argument.name().compare(0, 8, "running_") == 0;
    repeats.statistics.push_back(statistics);
    unsaid |= statistics;
    if (argument.name() == "training") repeats.training = position;
    if (argument.name() == "dropout_p") repeats.dropout = position;
    ++position;
  }
  if (unsaid && repeats.training < 0) return repeats;  // parts of a normalisation over several devices
  // Attention draws random numbers only where dropout is on.
  if (op.hasTag(at::Tag::nondeterministic_seeded) && repeats.dropout < 0) return repeats;
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) repeats.dropout = -1;
  repeats.op = std::make_shared<const c10::OperatorHandle>(op);
  return repeats;
}

std::shared_ptr<Call> remember(
    c10::ArrayRef<const c10::IValue> inputs, const Repeats& repeats, const Settings& settings, int64_t stamp) {
  // Whoever runs it again on a thread of ours has other helpers, which do not know that setting.
  if (!are_plain(settings.keys) || (settings.rounding != kUsualRounding && settings.threads > 1)) return nullptr;
  bool training = repeats.training >= 0 && inputs[repeats.training].isBool() && inputs[repeats.training].toBool();
  auto call = std::make_shared<Call>(Call{repeats.op, stamp});
  for (size_t i = 0; i < inputs.size(); ++i) {
    Argument& argument = call->arguments.emplace_back();
    if (training && repeats.statistics[i]) continue;  // they would move along once more
    if (!describe(inputs[i], repeats.writes[i], repeats.by_layout, argument)) return nullptr;
  }
  thread_local std::shared_ptr<const Settings> last;
  if (!last || !(*last == settings)) last = std::make_shared<const Settings>(settings);
  call->settings = last;
  return call;
}

std::shared_ptr<Call> remember(
    const at::RecordFunction& fn, const Repeats& repeats, int64_t stamp, int64_t number) {
  if (!repeats.op) return nullptr;
  auto inputs = fn.inputs();
  if (inputs.size() != repeats.writes.size()) return nullptr;
  if (repeats.dropout >= 0 && !(inputs[repeats.dropout].isDouble() && inputs[repeats.dropout].toDouble() == 0.0))
    return nullptr;
  auto call = remember(inputs, repeats, Settings::now(), stamp);
  if (call) call->number = number;
  return call;
}

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) visit(tensor.value_or(at::Tensor()));
  }
}

void note_products(Call& call, const at::RecordFunction& fn) {
  auto outputs = fn.outputs();
  call.finished = outputs.size() == call.op->schema().returns().size();  // else it raised
  size_t position = 0;
  for (const auto& value : outputs)
    each_tensor(value, [&](const at::Tensor& tensor) {
      size_t at = position++;
      if (!tensor.defined() || !is_plain(tensor)) return;
      const c10::StorageImpl* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
      Range* range = storage->data() ? ranges().of_data(storage->data()) : nullptr;
      if (!range || range->foreign || range->written_at != call.stamp) return;
      bool given = false;
      call.each_operand([&](const Operand& operand) { given |= operand.serial == range->serial; });
      if (given) return;
      call.products.push_back({at, range->serial, static_cast<int64_t>(storage->nbytes())});
      ranges().protect(range);
    });
}

std::vector<at::Tensor> run_again(const Call& call, const StorageOf& storage_of) {
  torch::jit::Stack stack;
  for (const Argument& argument : call.arguments) stack.push_back(rebuilt(argument, storage_of));
  {
    Under settings(*call.settings);
    call.op->callBoxed(&stack);
  }
  std::vector<at::Tensor> made;
  for (const c10::IValue& value : stack) each_tensor(value, [&](const at::Tensor& tensor) { made.push_back(tensor); });
  return made;
}

}  // namespace lowtide
