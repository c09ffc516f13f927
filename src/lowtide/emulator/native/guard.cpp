// What PyTorch asks of a device: the current one, streams, events, generators, pinned memory.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "device.h"

namespace lowtide::sim {
namespace {

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto before = current_device;
    setDevice(d);
    return c10::Device(kSim, before);
  }
  c10::Device getDevice() const override { return c10::Device(kSim, current_device); }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() >= 0 && d.index() < knobs().devices, "sim: there is no device ", d, ", only ", knobs().devices);
    current_device = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current_device = d.index(); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(knobs().devices); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return c10::DeviceCapability(); }

  c10::Stream getStream(c10::Device d) const override { return to_stream(index_of(d), current_streams[index_of(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return to_stream(index_of(d), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    return to_stream(index_of(d), 1 + device(index_of(d)).next_stream++ % (kStreams - 1));
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = current_streams[s.device_index()];
    current_streams[s.device_index()] = s.id();
    return to_stream(s.device_index(), before);
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return &stream(s); }
  bool queryStream(const c10::Stream& s) const override {
    bool idle = stream(s).idle();
    if (idle && races::enabled()) races::sync_stream(stream(s).agent());
    return idle;
  }
  void synchronizeStream(const c10::Stream& s) const override {
    stream(s).drain();
    if (races::enabled()) races::sync_stream(stream(s).agent());
    device(s.device_index()).raise_pending_error();
  }
  void synchronizeDevice(const DeviceIndex i) const override { device(i < 0 ? current_device : i).synchronize(); }

  void record(void** event, const c10::Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->latest = stream(s).record();
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) stream(s).wait(static_cast<Event*>(event)->latest);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    Moment& moment = *static_cast<Event*>(event)->latest;
    if (!moment.done) return false;
    if (races::enabled()) races::sync(moment.stamp);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Moment& moment = *static_cast<Event*>(event)->latest;
    moment.wait();
    if (races::enabled()) races::sync(moment.stamp);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    TORCH_CHECK(first && second, "both events must be recorded before the time between them can be told");
    Moment &from = *static_cast<Event*>(first)->latest, &to = *static_cast<Event*>(second)->latest;
    TORCH_CHECK(from.done && to.done, "both events must be completed before the time between them can be told");
    return std::chrono::duration<double, std::milli>(to.at - from.at).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    device_allocator()->recordStream(data, s);
  }

 private:
  static Stream& stream(const c10::Stream& s) { return device(s.device_index()).streams[s.id()]; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(knobs().devices); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex i) const override { Guard().setDevice(c10::Device(kSim, i)); }
  DeviceIndex exchangeDevice(DeviceIndex i) const override {
    auto before = current_device;
    setCurrentDevice(i);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override {
    auto before = current_device;
    if (i >= 0 && i < knobs().devices) current_device = i;
    return before;
  }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* p) const override {
    Device* on = device_of_tensor_address(p);
    TORCH_CHECK(on, "sim: ", p, " is no address of a sim device");
    return c10::Device(kSim, static_cast<DeviceIndex>(on->index));
  }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override {
    return default_generator(i < 0 ? current_device : i);
  }
  at::Generator getNewGenerator(DeviceIndex i) const override { return new_generator(i < 0 ? current_device : i); }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    resize_storage(s.unsafeGetStorageImpl(), n);
  }
};

struct Registration {
  Registration() {
    c10::SetAllocator(kSim, device_allocator());
    ensure_front();
    register_pinned_allocator();
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
  }
} registration;

}  // namespace
}  // namespace lowtide::sim
