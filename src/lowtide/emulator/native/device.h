// A device: its memory, streams and copy engines; and the allocators that PyTorch knows it by.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "arena.h"
#include "engine.h"

namespace lowtide::sim {

struct Device {
  explicit Device(int index);
  Stream& current_stream() { return streams[current_streams[index]]; }
  void synchronize();
  // Raise what a kernel raised after its launch had returned. As on a GPU, it surfaces at the next synchronisation.
  void raise_pending_error();
  void keep_error(const std::string& text);

  int index;
  Stream streams[kStreams];
  Arena arena;
  Activity activity;
  Engine h2d, d2h;
  std::atomic<uint32_t> next_stream{0};
  at::Generator generator;

 private:
  std::mutex error_mutex_;
  std::string error_;
  std::atomic<bool> has_error_{false};
};

// Throws for an index that does not exist, and in a forked child.
Device& device(int index);
// The device whose memory holds `p`, or nullptr. Works in a forked child as well.
Device* device_of_kernel_address(const void* p);
Device* device_of_tensor_address(const void* p);
inline DeviceIndex index_of(c10::Device d) {
  return d.index() < 0 ? current_device : d.index();
}
inline c10::Stream to_stream(int device, StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, static_cast<DeviceIndex>(device)), id);
}

c10::DeviceAllocator* device_allocator();
// A tensor's memory from a block of the arena: the data pointer is the tensor's address, the context the kernel's.
at::DataPtr own_block(Device& on, void* block);
void resize_storage(c10::StorageImpl* storage, size_t nbytes);

// The allocator that stands before the CPU's: inside a kernel "CPU" memory is device memory.
c10::Allocator* front_allocator();
// Make it the CPU's allocator again if somebody (Lowtide's own budget) has put another in its place, and stand before that.
void ensure_front();

// An output that was allocated when its kernel was launched, and the running kernel shall take when it asks for as much.
struct Prepared {
  void* block;
  size_t nbytes;
  bool taken;
};
inline thread_local std::vector<Prepared>* prepared = nullptr;
// How many allocations of the kernel on this thread, from the next on, it will let go untouched: no device memory.
inline thread_local int untouched_allocations = 0;
struct Untouched {
  explicit Untouched(int allocations) { untouched_allocations = allocations; }
  ~Untouched() { untouched_allocations = 0; }
};
// Arena bytes that the kernel on this thread holds now, and the most it held.
inline thread_local int64_t kernel_bytes = 0, kernel_peak_bytes = 0;

// ---- pinned host memory (pinned.cpp) ----
bool is_pinned(const void* p);
at::Allocator* pinned_allocator();
void register_pinned_allocator();
// A copy queued on `stream` uses this pinned tensor: keep its block until then.
void keep_until_copied(const at::Tensor& host, const c10::Stream& stream);
// Tell the race detector what the host's own operators do to pinned memory.
void watch_host(bool on);

// ---- random numbers (random.cpp) ----
at::Generator& default_generator(int index);
at::Generator new_generator(int index);
// The CPU generator that the kernels draw from.
at::Generator inner_generator(const at::Generator& generator);
// For its lifetime the default CPU generator has the device's state: some kernels draw from no other.
class BorrowedGenerator {
 public:
  BorrowedGenerator(bool on, int index);
  ~BorrowedGenerator();

 private:
  void swap();
  at::Generator host_, device_;
};

}  // namespace lowtide::sim
