// Pinned host memory: PyTorch's caching host allocator over pages of ours, and what the race detector hears of it.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/record_function.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <sys/mman.h>

#include <map>
#include <shared_mutex>

#include "device.h"
#include "span.h"

namespace lowtide::sim {
namespace {

std::shared_mutex pins_mutex;
std::map<const char*, size_t>& pins() {
  static auto* instance = new std::map<const char*, size_t>;
  return *instance;
}

class PinnedPages final : public at::CachingHostAllocatorImpl<c10::Stream, MomentPtr> {
 public:
  std::pair<void*, void*> allocate(size_t n) override {
    auto made = CachingHostAllocatorImpl::allocate(n);
    if (races::enabled() && made.first)
      races::alloc(made.first, static_cast<Block*>(made.second)->size_, races::kHost, races::Reuse::kCompleted);
    return made;
  }
  void free(void* context) override {
    if (forked) return;
    if (races::enabled() && context) {
      auto* block = static_cast<Block*>(context);
      std::vector<races::Agent> users;
      {
        std::lock_guard<std::mutex> guard(block->mutex_);
        for (const c10::Stream& user : block->streams_) users.push_back(races::stream(user.device_index(), user.id()));
      }
      races::free(block->ptr_, block->size_, races::kHost, users.data(), users.size());
    }
    CachingHostAllocatorImpl::free(context);
  }

 private:
  using Block = at::HostBlock<c10::Stream>;
  void allocate_host_memory(size_t n, void** p) override {
    *p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    TORCH_CHECK(*p != MAP_FAILED, "sim: cannot allocate ", n, " bytes of pinned host memory");
    std::unique_lock guard(pins_mutex);
    pins()[static_cast<const char*>(*p)] = n;
  }
  void free_block(Block* block) override {
    {
      std::unique_lock guard(pins_mutex);
      pins().erase(static_cast<const char*>(block->ptr_));
    }
    munmap(block->ptr_, block->size_);
  }
  void record_stream(std::optional<std::vector<MomentPtr>>& moments, c10::Stream s) override {
    moments->push_back(device(s.device_index()).streams[s.id()].record());
  }
  bool query_event(MomentPtr& moment) override { return moment->done; }
  c10::Stream get_current_stream() const override { return to_stream(current_device, current_streams[current_device]); }
  bool stream_is_capturing(c10::Stream) const override { return false; }
};

void delete_pinned(void* context);
class PinnedMemory final : public at::CachingHostAllocatorInterface<PinnedPages, delete_pinned> {};
PinnedMemory& pinned_memory() {
  static auto* instance = new PinnedMemory;
  return *instance;
}
void delete_pinned(void* context) {
  pinned_memory().free(context);
}

// ---- what the host does to pinned memory ----

bool only_metadata(const c10::FunctionSchema& schema) {
  std::string_view name = schema.name();
  if (name.substr(0, 6) != "aten::") return false;
  name.remove_prefix(6);
  static const std::set<std::string_view> kNames = {
      "_to_copy", "clone", "_pin_memory", "set_", "resize_", "record_stream", "is_same_size", "_copy_from", "_copy_from_and_resize",
      "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "is_set_to", "_has_same_storage_numel"};
  return kNames.count(name) || name.substr(0, 4) == "new_" || name.substr(0, 5) == "empty";
}

// Composite operators are seen through the operators that they call; views touch no memory.
bool looks_at_data(const c10::OperatorHandle& op, size_t argument) {
  const auto& schema = op.schema();
  const auto* alias = schema.arguments()[argument].alias_info();
  return !alias || alias->isWrite();
}

struct HostView {
  bool relevant;
  std::vector<char> writes, reads;
};

const HostView* host_view(const c10::OperatorName& name) {
  static std::mutex mutex;
  static auto* seen = new std::map<std::pair<std::string, std::string>, HostView>;
  std::lock_guard<std::mutex> guard(mutex);
  auto [found, fresh] = seen->try_emplace({name.name, name.overload_name});
  HostView& view = found->second;
  if (!fresh) return &view;
  auto op = c10::Dispatcher::singleton().findSchema(name);
  view.relevant = false;
  if (!op) return &view;
  bool resolves = name.name == "aten::resolve_conj" || name.name == "aten::resolve_neg";  // tolist reads after these
  bool composite = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  if ((composite && !resolves) || only_metadata(op->schema())) return &view;
  view.relevant = true;
  const auto& arguments = op->schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    view.writes.push_back(alias && alias->isWrite());
    view.reads.push_back(resolves || looks_at_data(*op, i));
  }
  return &view;
}

std::unique_ptr<at::ObserverContext> host_operator(const at::RecordFunction& fn) {
  if (!races::enabled() || kernel_device >= 0 || is_worker || forked) return nullptr;
  auto name = fn.operator_name();
  if (!name) return nullptr;
  const HostView* view = host_view(*name);
  if (!view->relevant) return nullptr;
  struct Touched {
    Span span;
    bool write;
  };
  std::vector<Touched> touched;
  bool on_device = false;
  auto inputs = fn.inputs();
  auto look = [&](const at::Tensor& t, bool write) {
    if (!t.defined() || !t.has_storage()) return;
    if (t.is_privateuseone())
      on_device = true;
    else if (t.is_cpu() && t.numel() > 0 && is_pinned(t.const_data_ptr()))
      touched.push_back({span_of(t, static_cast<const char*>(t.const_data_ptr())), write});
  };
  for (size_t i = 0; i < inputs.size() && i < view->writes.size(); ++i) {
    if (!view->reads[i] && !view->writes[i]) continue;
    if (inputs[i].isTensor()) look(inputs[i].toTensor(), view->writes[i]);
    if (inputs[i].isTensorList())
      for (const at::Tensor& t : inputs[i].toTensorVector()) look(t, view->writes[i]);
  }
  if (on_device) return nullptr;  // a copy to or from the device: reported where it is queued
  for (auto& [span, write] : touched)
    races::host_access(span.start, span.nbytes, write,
                       std::string(write ? "host write of a pinned buffer by " : "host read of a pinned buffer by ") + name->name);
  return nullptr;
}

}  // namespace

bool is_pinned(const void* p) {
  std::shared_lock guard(pins_mutex);
  auto found = pins().upper_bound(static_cast<const char*>(p));
  if (found == pins().begin()) return false;
  --found;
  return static_cast<const char*>(p) < found->first + found->second;
}

at::Allocator* pinned_allocator() {
  return &pinned_memory();
}

void register_pinned_allocator() {
  at::setHostAllocator(kSim, &pinned_memory());
}

void keep_until_copied(const at::Tensor& host, const c10::Stream& stream) {
  pinned_memory().record_event(host.storage().mutable_data(), host.storage().data_ptr().get_context(), stream);
}

void watch_host(bool on) {
  static std::mutex mutex;
  static at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
  std::lock_guard<std::mutex> guard(mutex);
  if (on == (handle != at::INVALID_CALLBACK_HANDLE)) return;
  if (on) {
    handle = at::addGlobalCallback(
        at::RecordFunctionCallback(&host_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  } else {
    at::removeCallback(handle);
    handle = at::INVALID_CALLBACK_HANDLE;
  }
}

}  // namespace lowtide::sim
