// Device memory: blocks in a range of addresses, bounded by the capacity, freed in the order of streams.
//
// Note [Two addresses]
// A tensor's address lies in a range that nobody may touch; kernels and copies use the same bytes through a second range
// at a constant distance. A host read of device memory therefore faults, as it does with a real device.
//
// Note [Frees follow streams]
// A freed block belongs to the stream that it was allocated for. That stream may have it again at once, because its jobs
// run in order; anybody else gets it when that stream, and every stream that record_stream named, has finished what was
// queued at the time of the free.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>

#include <deque>
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "streams.h"

namespace lowtide::sim {

// Asked for `need_bytes` when memory has run out, with no lock held: true if it is worth trying again.
using Pressure = int (*)(int device, int64_t need_bytes);
inline std::atomic<Pressure> pressure{nullptr};

class Arena {
 public:
  Arena(int device, Stream* streams);
  // The kernel's address of a new block, nullptr for no bytes; throws OutOfMemoryError.
  char* allocate(size_t n);
  void free(void* block);
  void record_stream(void* block, StreamId stream);
  void trim();

  char* device_address(void* kernel_address) const {
    return kernel_address ? device_base_ + (static_cast<char*>(kernel_address) - kernel_base_) : nullptr;
  }
  char* kernel_address(const void* device_address) const {
    return device_address ? kernel_base_ + (static_cast<const char*>(device_address) - device_base_) : nullptr;
  }
  bool holds_kernel_address(const void* p) const { return p >= kernel_base_ && p < kernel_base_ + size_; }
  bool holds_device_address(const void* p) const { return p >= device_base_ && p < device_base_ + size_; }

  using Stats = c10::CachingDeviceAllocator::DeviceStats;
  Stats stats();
  void reset_stats(bool peaks);
  size_t active_bytes();

 private:
  struct Block {
    size_t offset, size, requested;
    StreamId home;
    std::set<StreamId> users;
  };
  struct Ticket {  // a point in a stream's queue
    Stream* stream;
    uint64_t jobs;
  };
  struct Pending {
    Block block;
    std::vector<Ticket> tickets;
    bool home_only;  // no other stream is waited for
  };

  void put(size_t offset, size_t size);
  bool take(size_t size, size_t* offset);
  bool take_back(size_t size, bool exact, size_t* offset);
  // Whether a stream is done with what was queued; for a kernel on the host's thread its own stream is, up to itself.
  bool runs_here(const Stream* stream) const;
  bool passed(const Ticket& ticket) const;
  bool ask_for_room(Pressure ask, int64_t need_bytes);
  void release(const Block& block);
  void reap();
  void trim_holes();
  void poison(char* start, size_t size);
  [[noreturn]] void refuse(size_t n);

  int device_;
  Stream* streams_;
  size_t size_;
  char *device_base_, *kernel_base_;  // see Note [Two addresses]
  std::mutex mutex_;
  std::map<size_t, size_t> holes_;                      // offset -> size
  std::set<std::pair<size_t, size_t>> holes_by_size_;   // (size, offset)
  std::unordered_map<size_t, Block> live_;              // offset -> block
  std::deque<Pending> pending_;                         // see Note [Frees follow streams]
  size_t active_ = 0, highest_ = 0, taken_since_trim_ = 0;
  Stats stats_;
};

}  // namespace lowtide::sim
