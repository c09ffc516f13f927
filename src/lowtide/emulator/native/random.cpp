// The device's random numbers: a CPU generator of its own, in the clothes of the device.
#include <ATen/CPUGeneratorImpl.h>

#include "device.h"

namespace lowtide::sim {
namespace {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  at::Generator inner;
  DeviceGenerator(DeviceIndex index, at::Generator generator)
      : GeneratorImpl(c10::Device(kSim, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(generator)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device().index(), inner.clone()); }
};

}  // namespace

at::Generator new_generator(int index) {
  return at::make_generator<DeviceGenerator>(static_cast<DeviceIndex>(index), at::detail::createCPUGenerator());
}

at::Generator& default_generator(int index) {
  Device& on = device(index);
  static std::mutex mutex;
  std::lock_guard<std::mutex> guard(mutex);
  if (!on.generator.defined()) on.generator = new_generator(index);
  return on.generator;
}

at::Generator inner_generator(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

BorrowedGenerator::BorrowedGenerator(bool on, int index) {
  if (!on) return;
  host_ = at::detail::getDefaultCPUGenerator();
  device_ = inner_generator(default_generator(index));
  swap();
}

BorrowedGenerator::~BorrowedGenerator() {
  if (host_.defined()) swap();
}

void BorrowedGenerator::swap() {
  std::scoped_lock guard(host_.mutex(), device_.mutex());
  at::Tensor of_host(host_.get_state()), of_device(device_.get_state());
  host_.set_state(of_device);
  device_.set_state(of_host);
}

}  // namespace lowtide::sim
