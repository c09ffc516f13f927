// The log of a step: operators, allocations, operands, what autograd saved, and waits; in C++, so that watching a step
// hardly changes it. PyTorch's own observer interface (RecordFunction) reports every dispatched operator, forward,
// backward and optimizer, without changing how anything is dispatched.
#include "lowtide.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace lowtide {

std::atomic<bool> logging{false};

namespace {

struct Entry {
  int32_t kind;
  int32_t thread;
  int64_t at_ns;
  int64_t a, b, c;
};
static_assert(sizeof(Entry) == 40);

constexpr size_t kMostEntries = 2'000'000;  // 80 MB: some hundred thousand operators

std::mutex log_mutex;
std::vector<Entry> entries;
std::unordered_map<std::string, int64_t> name_ids;
std::vector<std::string> names;
std::atomic<int32_t> thread_count{0};
std::atomic<bool> with_operands{false};
at::CallbackHandle handle = 0;

int32_t thread_number() {
  thread_local int32_t number = thread_count++;
  return number;
}

thread_local std::vector<const char*> running;

int64_t name_id(const std::string& name) {
  auto found = name_ids.find(name);
  if (found != name_ids.end()) return found->second;
  int64_t id = static_cast<int64_t>(names.size());
  names.push_back(name);
  name_ids.emplace(name, id);
  return id;
}

void log_tensor(Event kind, const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!impl->has_storage() || impl->device_type() != c10::DeviceType::CPU) return;
  if (kind == Event::kRead && impl->is_wrapped_number()) return;  // a Python number, not memory that somebody made
  const c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (!storage) return;
  const auto& version = impl->version_counter();
  log_event(
      kind, serial_of(storage), version.enabled() ? version.current_version() : 0,
      static_cast<int64_t>(storage->nbytes()));
}

void log_value(Event kind, const c10::IValue& value) {
  if (value.isTensor()) {
    log_tensor(kind, value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) log_tensor(kind, tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor) log_tensor(kind, *tensor);
  }
}

struct Context : at::ObserverContext {};

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& fn) {
  running.push_back(fn.name());
  if (logging.load(std::memory_order_relaxed)) {
    int64_t id;
    {
      std::lock_guard<std::mutex> guard(log_mutex);
      id = name_id(fn.name());
    }
    log_event(Event::kOpBegin, id, static_cast<int64_t>(fn.scope()));
    if (with_operands && fn.scope() == at::RecordScope::FUNCTION)
      for (const auto& value : fn.inputs()) log_value(Event::kRead, value);
  }
  return nullptr;
}

void on_end(const at::RecordFunction& fn, at::ObserverContext*) {
  // Not always the last: a range of the user's is opened inside an operator that ends before it does.
  for (size_t at = running.size(); at-- > 0;)
    if (running[at] == fn.name() || std::strcmp(running[at], fn.name()) == 0) {
      running.erase(running.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    }
  if (logging.load(std::memory_order_relaxed)) {
    if (with_operands && fn.scope() == at::RecordScope::FUNCTION)
      for (const auto& value : fn.outputs()) log_value(Event::kWrite, value);
    int64_t id;
    {
      std::lock_guard<std::mutex> guard(log_mutex);
      id = name_id(fn.name());
    }
    log_event(Event::kOpEnd, id, static_cast<int64_t>(fn.scope()));
  }
}

}  // namespace

void log_event(Event kind, int64_t a, int64_t b, int64_t c) {
  Entry entry{static_cast<int32_t>(kind), thread_number(), now_ns(), a, b, c};
  std::lock_guard<std::mutex> guard(log_mutex);
  if (entries.size() < kMostEntries)
    entries.push_back(entry);
  else
    logging = false;  // not a training step: nobody plans from this
}

const char* current_op() {
  for (const char* name : running)
    if (std::strstr(name, "::") && std::strncmp(name, "autograd::", 10) != 0) return name;
  return running.empty() ? "" : running.back();
}

}  // namespace lowtide

using namespace lowtide;

extern "C" {

// Watch operators: 0 not at all, 1 only which one runs, 2 with their operands.
//
// Note [Observers and forks]: each thread copies PyTorch's list of observers at its first operator after a change, under a
// lock that a fork does not respect: a child forked at that moment could never run an operator. So the list changes only
// when it has to, and this thread, which runs the operators, copies it here, while it holds the GIL and nobody can fork.
void lt_observe(int detail) {
  static int observed = 0;
  running.clear();
  if (detail == observed) return;
  observed = detail;
  if (handle) {
    at::removeCallback(handle);
    handle = 0;
  }
  with_operands = detail == 2;
  if (detail > 0)
    handle = at::addGlobalCallback(at::RecordFunctionCallback(&on_begin, &on_end)
                                       .needsInputs(detail == 2)
                                       .needsOutputs(detail == 2)
                                       .scopes({at::RecordScope::FUNCTION,
                                                at::RecordScope::BACKWARD_FUNCTION,
                                                at::RecordScope::USER_SCOPE}));
  at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
}

void lt_log_start() {
  {
    std::lock_guard<std::mutex> guard(log_mutex);
    entries.clear();
    entries.reserve(1 << 16);
  }
  logging = true;
}

// Stop; the entries stay until the next start. Returns how many there are, or -1 if there was no room for all.
int64_t lt_log_stop() {
  logging = false;
  std::lock_guard<std::mutex> guard(log_mutex);
  return entries.size() < kMostEntries ? static_cast<int64_t>(entries.size()) : -1;
}

void lt_log_copy(void* out) {
  std::lock_guard<std::mutex> guard(log_mutex);
  std::memcpy(out, entries.data(), entries.size() * sizeof(Entry));
}

void lt_log_clear() {
  std::lock_guard<std::mutex> guard(log_mutex);
  std::vector<Entry>().swap(entries);
}

int64_t lt_name_count() {
  std::lock_guard<std::mutex> guard(log_mutex);
  return static_cast<int64_t>(names.size());
}

void lt_name(int64_t id, char* out, int64_t bytes) {
  std::lock_guard<std::mutex> guard(log_mutex);
  std::snprintf(out, bytes, "%s", names.at(id).c_str());
}

void lt_mark_module(const char* name) {
  if (!logging.load(std::memory_order_relaxed)) return;
  int64_t id;
  {
    std::lock_guard<std::mutex> guard(log_mutex);
    id = name_id(name);
  }
  log_event(Event::kModule, id);
}

// Note which of the step's calls the operator that runs is.
void lt_mark_call(int64_t number) {
  if (logging.load(std::memory_order_relaxed)) log_event(Event::kCall, number);
}
}
