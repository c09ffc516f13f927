#include "device.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <cstring>

namespace lowtide::sim {
namespace {

std::atomic<std::vector<Device*>*> all_devices{nullptr};

std::vector<Device*>& devices() {
  if (auto* made = all_devices.load()) return *made;
  static std::mutex mutex;
  std::lock_guard<std::mutex> guard(mutex);
  if (!all_devices.load()) {
    auto* made = new std::vector<Device*>;
    for (int i = 0; i < knobs().devices; ++i) made->push_back(new Device(i));
    all_devices = made;
  }
  return *all_devices.load();
}

void free_block(void* block) {
  if (block && !forked)
    if (Device* on = device_of_kernel_address(block)) on->arena.free(block);
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  at::DataPtr allocate(size_t n) override {
    Device& on = device(current_device);
    return own_block(on, on.arena.allocate(n));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override {
    Device *target = device_of_tensor_address(to), *source = device_of_tensor_address(from);
    TORCH_CHECK(target && source, "sim: copy_data needs memory of a sim device on both sides");
    source->current_stream().drain();
    target->current_stream().drain();
    std::memcpy(target->arena.kernel_address(to), source->arena.kernel_address(from), n);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (Device* on : devices()) on->arena.trim();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get_context()) device(data.device().index()).arena.record_stream(data.get_context(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex i) override { return device(i).arena.stats(); }
  void resetAccumulatedStats(DeviceIndex i) override { device(i).arena.reset_stats(false); }
  void resetPeakStats(DeviceIndex i) override { device(i).arena.reset_stats(true); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex i) override {
    size_t capacity = knobs().capacity_bytes;
    return {capacity - std::min(capacity, device(i).arena.active_bytes()), capacity};
  }
};

void delete_front(void* block);

void delete_prepared(void* block) {
  if (!prepared) return;
  for (auto& output : *prepared)
    if (output.block == block) output.taken = false;
}

class Front final : public c10::Allocator {
 public:
  std::atomic<c10::Allocator*> behind{c10::GetDefaultCPUAllocator()};

  at::DataPtr allocate(size_t n) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (untouched_allocations > 0) {
      --untouched_allocations;
      return behind.load()->allocate(n);
    }
    if (prepared)
      for (auto& output : *prepared)
        if (!output.taken && output.nbytes == n) {
          output.taken = true;
          return {output.block, output.block, &delete_prepared, cpu};
        }
    if (kernel_device < 0) return behind.load()->allocate(n);
    void* block = device(kernel_device).arena.allocate(n);
    kernel_bytes += static_cast<int64_t>(n);
    kernel_peak_bytes = std::max(kernel_peak_bytes, kernel_bytes);
    return {block, block, &delete_front, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &delete_front; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};

Front& front() {
  static Front* instance = new Front;
  return *instance;
}

void delete_front(void* block) {
  // oneDNN takes and gives back its scratch with raw_allocate and raw_deallocate: that may be a prepared output as well.
  if (prepared && block)
    for (auto& output : *prepared)
      if (output.block == block) {
        output.taken = false;
        return;
      }
  if (Device* on = device_of_kernel_address(block)) {
    if (!forked) on->arena.free(block);
  } else {
    front().behind.load()->raw_deleter()(block);
  }
}

}  // namespace

Device::Device(int index)
    : index(index),
      arena(index, streams),
      h2d(Work::kHostToDevice, index, activity),
      d2h(Work::kDeviceToHost, index, activity) {
  for (int id = 0; id < kStreams; ++id) streams[id].name(index, id);
}

void Device::synchronize() {
  for (Stream& stream : streams) stream.drain();
  if (races::enabled()) races::sync_device(index);
  raise_pending_error();
}

void Device::raise_pending_error() {
  if (!has_error_) return;
  std::string text;
  {
    std::lock_guard<std::mutex> guard(error_mutex_);
    text.swap(error_);
    has_error_ = false;
  }
  TORCH_CHECK(false, "sim: a kernel failed after its launch: ", text);
}

void Device::keep_error(const std::string& text) {
  std::lock_guard<std::mutex> guard(error_mutex_);
  if (!has_error_) error_ = text;
  has_error_ = true;
}

Device& device(int index) {
  TORCH_CHECK(!forked, "sim: this process was forked from one that used the device, and cannot use it: start it with "
                       "the 'spawn' or 'forkserver' method");
  auto& all = devices();
  TORCH_CHECK(index >= 0 && index < static_cast<int>(all.size()), "sim: there is no device sim:", index, ", only ",
              all.size());
  return *all[index];
}

Device* device_of_kernel_address(const void* p) {
  if (auto* all = all_devices.load())
    for (Device* on : *all)
      if (on->arena.holds_kernel_address(p)) return on;
  return nullptr;
}

Device* device_of_tensor_address(const void* p) {
  if (auto* all = all_devices.load())
    for (Device* on : *all)
      if (on->arena.holds_device_address(p)) return on;
  return nullptr;
}

c10::DeviceAllocator* device_allocator() {
  static DeviceMemory* instance = new DeviceMemory;
  return instance;
}

at::DataPtr own_block(Device& on, void* block) {
  return {on.arena.device_address(block), block, &free_block, c10::Device(kSim, static_cast<DeviceIndex>(on.index))};
}

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  Device& on = device(storage->device().index());
  c10::OptionalDeviceGuard guard(storage->device());
  auto made = device_allocator()->allocate(nbytes);
  if (size_t kept = std::min(nbytes, storage->nbytes())) {
    Stream& stream = on.current_stream();
    void *to = made.get_context(), *from = storage->data_ptr().get_context();
    auto announce = [&] { races::submit(stream.agent(), "resize_", {{from, kept, false}, {to, kept, true}}); };
    // In stream order: the old block is freed below, and only jobs of its own stream may use it again before this ran.
    stream.push([to, from, kept] { std::memcpy(to, from, kept); }, announce);
  }
  storage->set_data_ptr_noswap(std::move(made));
  storage->set_nbytes(nbytes);
}

c10::Allocator* front_allocator() {
  return &front();
}

void ensure_front() {
  constexpr uint8_t kPriority = 100;  // that of Lowtide's own allocator; a lower one would be refused
  c10::Allocator* now = c10::GetCPUAllocator();
  if (now == &front()) return;
  static std::mutex mutex;
  std::lock_guard<std::mutex> guard(mutex);
  now = c10::GetCPUAllocator();
  if (now == &front()) return;
  front().behind = now;
  c10::SetCPUAllocator(&front(), kPriority);
}

}  // namespace lowtide::sim
