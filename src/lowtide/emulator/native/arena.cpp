#include "arena.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace lowtide::sim {
namespace {

constexpr size_t kAlign = 512;  // as CUDA's caching allocator rounds
constexpr size_t kPage = 4096;

thread_local bool asking_for_room = false;

std::string readable(size_t n) {
  return c10::CachingAllocator::format_size(n);
}

}  // namespace

Arena::Arena(int device, Stream* streams) : device_(device), streams_(streams), size_(knobs().reserve_bytes) {
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* kernels = mmap(nullptr, size_, PROT_READ | PROT_WRITE, flags, -1, 0);
  void* tensors = mmap(nullptr, size_, PROT_NONE, flags, -1, 0);
  TORCH_CHECK(kernels != MAP_FAILED && tensors != MAP_FAILED, "sim: cannot reserve ", readable(2 * size_),
              " of addresses: raise the limit on the address space (ulimit -v, ulimit -d, vm.overcommit_memory)");
  madvise(kernels, size_, MADV_HUGEPAGE);
  kernel_base_ = static_cast<char*>(kernels);
  device_base_ = static_cast<char*>(tensors);
  put(0, size_);
}

// Add a hole, joined with its neighbours.
void Arena::put(size_t offset, size_t size) {
  auto next = holes_.lower_bound(offset);
  if (next != holes_.end() && offset + size == next->first) {
    size += next->second;
    holes_by_size_.erase({next->second, next->first});
    next = holes_.erase(next);
  }
  if (next != holes_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      size += before->second;
      holes_by_size_.erase({before->second, before->first});
      holes_.erase(before);
    }
  }
  holes_[offset] = size;
  holes_by_size_.insert({size, offset});
}

// Best fit within the capacity.
bool Arena::take(size_t size, size_t* offset) {
  size_t capacity = limit_bytes(device_);
  if (active_ + size > capacity) return false;
  for (auto hole = holes_by_size_.lower_bound({size, 0}); hole != holes_by_size_.end(); ++hole) {
    auto [length, start] = *hole;
    if (knobs().fragmentation && start + size > capacity) continue;
    holes_by_size_.erase(hole);
    holes_.erase(start);
    if (length > size) {
      holes_[start + size] = length - size;
      holes_by_size_.insert({length - size, start + size});
    }
    *offset = start;
    highest_ = std::max(highest_, start + size);
    taken_since_trim_ += size;
    // What is scarce on a device is bytes, here it is also pages: holes must not keep more of them than the device has.
    if (highest_ > capacity + capacity / 2 && taken_since_trim_ > capacity / 2) trim_holes();
    return true;
  }
  return false;
}

// A block that this stream freed and nobody else holds: its next job comes after those that still use it.
bool Arena::take_back(size_t size, bool exact, size_t* offset) {
  StreamId home = current_streams[device_];
  auto best = pending_.end();
  for (auto it = pending_.begin(); it != pending_.end(); ++it) {
    if (!it->home_only || it->block.home != home) continue;
    if (exact ? it->block.size != size : it->block.size < size) continue;
    if (best == pending_.end() || it->block.size < best->block.size) best = it;
  }
  if (best == pending_.end()) return false;
  *offset = best->block.offset;
  if (best->block.size == size) {
    pending_.erase(best);
  } else {
    best->block.offset += size;
    best->block.size -= size;
    stats_.active[0].increase(1);
  }
  return true;
}

void Arena::release(const Block& block) {
  put(block.offset, block.size);
  active_ -= block.size;
  stats_.active[0].decrease(1);
  stats_.active_bytes[0].decrease(block.size);
  stats_.reserved_bytes[0].decrease(block.size);
}

bool Arena::runs_here(const Stream* stream) const {
  return kernel_device == device_ && stream == &streams_[current_streams[device_]];
}

bool Arena::passed(const Ticket& ticket) const {
  return ticket.stream->finished() >= ticket.jobs || runs_here(ticket.stream);
}

// What the callback does comes before the kernel that is waiting for memory: the kernel steps out of its stream's way.
bool Arena::ask_for_room(Pressure ask, int64_t need_bytes) {
  Stream* paused = kernel_device == device_ ? &streams_[current_streams[device_]] : nullptr;
  int before = kernel_device;
  kernel_device = -1;
  asking_for_room = true;
  if (paused) paused->end_own();
  bool again = ask(device_, need_bytes) != 0;
  if (paused) paused->begin_own();
  asking_for_room = false;
  kernel_device = before;
  return again;
}

void Arena::reap() {
  for (auto it = pending_.begin(); it != pending_.end();) {
    if (std::all_of(it->tickets.begin(), it->tickets.end(), [this](const Ticket& t) { return passed(t); })) {
      release(it->block);
      it = pending_.erase(it);
    } else {
      ++it;
    }
  }
}

char* Arena::allocate(size_t n) {
  if (n == 0) return nullptr;
  size_t size = (n + kAlign - 1) / kAlign * kAlign, offset = 0;
  Lock lock(mutex_);
  reap();
  bool taken_back = false, last_try = false;
  for (;;) {
    if ((taken_back = take_back(size, true, &offset)) || take(size, &offset)) break;
    if ((taken_back = take_back(size, false, &offset))) break;
    if (!pending_.empty()) {
      ++stats_.num_alloc_retries;
      auto tickets = pending_.front().tickets;
      lock.unlock();
      for (auto& ticket : tickets)
        if (!passed(ticket)) ticket.stream->wait_until(ticket.jobs);
      lock.lock();
      reap();
      continue;
    }
    Pressure ask = pressure.load();
    if (!ask || last_try || asking_for_room || is_worker) refuse(n);
    size_t capacity = limit_bytes(device_);
    auto need = static_cast<int64_t>(active_ + size) - static_cast<int64_t>(capacity);
    lock.unlock();
    last_try = !ask_for_room(ask, std::max<int64_t>(need, 1));
    lock.lock();
    reap();
  }
  StreamId home = current_streams[device_];
  live_[offset] = Block{offset, size, n, home, {}};
  stats_.allocation[0].increase(1);
  stats_.allocated_bytes[0].increase(size);
  stats_.requested_bytes[0].increase(n);
  ++stats_.num_device_alloc;
  if (!taken_back) {
    active_ += size;
    stats_.active[0].increase(1);
    stats_.active_bytes[0].increase(size);
    stats_.reserved_bytes[0].increase(size);
  }
  char* start = kernel_base_ + offset;
  if (races::enabled())
    races::alloc(start, size, streams_[home].agent(),
                 taken_back ? races::Reuse::kStreamOrdered : races::Reuse::kCompleted);
  lock.unlock();
  if (knobs().poison) poison(start, size);
  return start;
}

void Arena::poison(char* start, size_t size) {
  Stream& home = streams_[current_streams[device_]];
  if (runs_here(&home) || home.idle())
    std::memset(start, 0xFF, size);
  else
    home.push([start, size] { std::memset(start, 0xFF, size); }, [] {});
}

void Arena::refuse(size_t n) {
  ++stats_.num_ooms;
  size_t capacity = limit_bytes(device_);
  TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", readable(n), ". sim:", device_,
                   " has a total capacity of ", readable(capacity), " of which ",
                   readable(capacity - std::min(capacity, active_)), " is free; ",
                   readable(stats_.allocated_bytes[0].current), " is allocated by tensors.");
}

void Arena::free(void* block) {
  if (!block) return;
  std::lock_guard<std::mutex> guard(mutex_);
  auto found = live_.find(static_cast<size_t>(static_cast<char*>(block) - kernel_base_));
  if (found == live_.end()) return;
  Block freed = std::move(found->second);
  live_.erase(found);
  stats_.allocation[0].decrease(1);
  stats_.allocated_bytes[0].decrease(freed.size);
  stats_.requested_bytes[0].decrease(freed.requested);
  ++stats_.num_device_free;
  if (races::enabled()) {
    std::vector<races::Agent> recorded;
    for (StreamId user : freed.users) recorded.push_back(streams_[user].agent());
    races::free(block, freed.size, streams_[freed.home].agent(), recorded.data(), recorded.size());
  }
  std::vector<Ticket> tickets;
  bool home_only = true;
  freed.users.insert(freed.home);
  for (StreamId user : freed.users) {
    if (streams_[user].idle() || runs_here(&streams_[user])) {
      if (races::enabled()) races::reached(block, streams_[user].agent());
      continue;
    }
    tickets.push_back({&streams_[user], streams_[user].queued()});
    if (user != freed.home) home_only = false;
  }
  if (tickets.empty())
    release(freed);
  else
    pending_.push_back({std::move(freed), std::move(tickets), home_only});
}

void Arena::record_stream(void* block, StreamId stream) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto found = live_.find(static_cast<size_t>(static_cast<char*>(block) - kernel_base_));
  if (found != live_.end() && stream != found->second.home) found->second.users.insert(stream);
}

void Arena::trim_holes() {
  taken_since_trim_ = 0;
  for (auto [offset, size] : holes_) {
    size_t first = (offset + kPage - 1) & ~(kPage - 1), last = std::min(offset + size, highest_) & ~(kPage - 1);
    if (last > first) madvise(kernel_base_ + first, last - first, MADV_DONTNEED);
  }
}

void Arena::trim() {
  std::lock_guard<std::mutex> guard(mutex_);
  reap();
  trim_holes();
}

Arena::Stats Arena::stats() {
  std::lock_guard<std::mutex> guard(mutex_);
  reap();
  return stats_;
}

void Arena::reset_stats(bool peaks) {
  std::lock_guard<std::mutex> guard(mutex_);
  reap();
  for (auto* array : {&stats_.allocation, &stats_.active, &stats_.allocated_bytes, &stats_.reserved_bytes,
                      &stats_.active_bytes, &stats_.requested_bytes})
    for (auto& stat : *array) peaks ? stat.reset_peak() : stat.reset_accumulated();
}

size_t Arena::active_bytes() {
  std::lock_guard<std::mutex> guard(mutex_);
  reap();
  return active_;
}

}  // namespace lowtide::sim
