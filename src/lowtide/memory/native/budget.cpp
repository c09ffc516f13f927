// The hard budget: PyTorch's CPU allocator with a bound on live plus cached bytes.
//
// Large blocks are ranges of whole pages. Freed ranges are kept, merged with their neighbours, and handed out again by
// best fit, so that a step that repeats its sizes neither faults nor zeroes pages. What is scarce is physical memory,
// not addresses: when no kept range is long enough, kept pages are moved side by side into a new range of addresses
// (mremap), which costs page-table work instead of zeroing, and fragmentation can never make an allocation fail.
//
// Note [Asking for room]: an allocation that does not fit calls `pressure` (Python: the residency machine) without any
// lock of ours held. The callback gives up clean copies and starts write-outs; it answers a negative number when waiting
// has no point any more. Then the allocation waits, without the GIL, until anything is freed, and tries
// again. It fails when no transfer is under way and none has ended since; that is counted here, because the movers
// report a transfer to Python before its memory is free.
#include "lowtide.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace lowtide {
namespace {

using Pressure = int64_t (*)(int64_t need_bytes);

struct Counters {
  std::atomic<int64_t> live{0}, reserved{0}, peak_live{0}, peak_reserved{0}, budget{0}, foreign{0};
  std::atomic<int64_t> serial{0}, stall_ns{0}, fresh_bytes{0}, moved_bytes{0}, trimmed_bytes{0}, refused{0};
} counters;

std::atomic<Pressure> pressure{nullptr};
std::atomic<bool> forked{false};
std::atomic<bool> installed{false};
thread_local bool asking_for_room = false;

std::mutex progress_mutex;
std::condition_variable progress;
uint64_t progress_epoch = 0;  // guarded by progress_mutex, as the next
int64_t in_flight = 0;        // bytes of transfers that have not ended, or whose memory is not free yet
std::atomic<int> waiters{0};

struct Failure {
  int64_t requested = 0, live = 0, reserved = 0, budget = 0;
  std::string op;
};
std::mutex failure_mutex;
Failure last_failure;

void raise_to(std::atomic<int64_t>& peak, int64_t value) {
  int64_t seen = peak.load(std::memory_order_relaxed);
  while (value > seen && !peak.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

bool try_reserve(int64_t n) {
  int64_t held = counters.reserved.load();
  int64_t budget;
  do {
    budget = counters.budget.load(std::memory_order_relaxed);
    if (budget && held + n > budget) return false;
  } while (!counters.reserved.compare_exchange_weak(held, held + n));
  raise_to(counters.peak_reserved, held + n);
  return true;
}

void count_live(int64_t n) {
  raise_to(counters.peak_live, counters.live.fetch_add(n) + n);
}

// Bytes in small blocks now, and the most since malloc last gave its free pages back: it may still hold the difference.
std::atomic<int64_t> small_live{0}, small_high{0};

// Called before memory is taken from the kernel: malloc's free pages must not come on top of the budget.
void trim_malloc_if_needed() {
  constexpr int64_t kWorthTrimming = 1 << 20;
  int64_t small = small_live.load(), held = small_high.load() - small;
  int64_t budget = counters.budget.load(std::memory_order_relaxed);
  if (!budget || held < kWorthTrimming || counters.reserved.load() + held <= budget) return;
  small_high = small;
  malloc_trim(0);
}

// ---- large blocks: ranges of pages ----

struct Block {
  int64_t bytes;
  int64_t serial;
};

// All kept (free) ranges and all live large blocks. Guarded by `mutex`.
class Pages {
 public:
  std::mutex mutex;

  // A range of exactly `n` bytes within the budget, or nullptr.
  char* take(int64_t n) {
    auto fit = by_size_.lower_bound({n, nullptr});
    if (fit != by_size_.end()) {
      char* start = fit->second;
      int64_t length = fit->first;
      forget(start, length);
      if (length > n) keep(start + n, length - n);
      return start;
    }
    if (try_reserve(n))
      if (char* fresh = map_fresh(n)) return fresh;
    return kept_ > 0 ? assemble(n) : nullptr;
  }

  void keep_merged(char* start, int64_t length) {
    auto after = by_start_.lower_bound(start);
    if (after != by_start_.end() && after->first == start + length) {
      length += after->second;
      forget(after->first, after->second);
    }
    auto before = by_start_.lower_bound(start);
    if (before != by_start_.begin()) {
      --before;
      if (before->first + before->second == start) {
        char* joined = before->first;
        length += before->second;
        forget(before->first, before->second);
        start = joined;
      }
    }
    keep(start, length);
  }

  // Return kept pages to the kernel until `n` more bytes could be reserved, or none are kept.
  void trim_for(int64_t n) {
    while (kept_ > 0) {
      int64_t budget = counters.budget.load();
      int64_t excess = budget ? counters.reserved.load() + n - budget : 0;
      if (excess <= 0) return;
      unmap_some(round_to_page(excess));
    }
  }

  void trim_all() {
    while (kept_ > 0) unmap_some(kept_);
  }

  int64_t kept() const {
    return kept_;
  }

  std::unordered_map<void*, Block> live;

 private:
  void keep(char* start, int64_t length) {
    by_start_.emplace(start, length);
    by_size_.emplace(length, start);
    kept_ += length;
  }

  void forget(char* start, int64_t length) {
    by_start_.erase(start);
    by_size_.erase({length, start});
    kept_ -= length;
  }

  char* map_fresh(int64_t n) {
    trim_malloc_if_needed();
    void* p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
      counters.reserved -= n;
      return nullptr;
    }
    seams_.insert(static_cast<char*>(p));
    if (n >= (2 << 20)) madvise(p, n, MADV_HUGEPAGE);
    counters.fresh_bytes += n;
    return static_cast<char*>(p);
  }

  void unmap_some(int64_t at_most) {
    // The smallest ranges go first: they are the least likely to fit anything.
    auto victim = by_size_.begin();
    char* start = victim->second;
    int64_t length = victim->first;
    forget(start, length);
    int64_t cut = std::min(length, at_most);
    if (cut < length) keep(start, length - cut);
    munmap(start + (length - cut), cut);
    drop_seams(start + (length - cut), cut);
    if (cut < length) seams_.insert(start);
    counters.reserved -= cut;
    counters.trimmed_bytes += cut;
  }

  void drop_seams(char* start, int64_t length) {
    seams_.erase(seams_.lower_bound(start), seams_.lower_bound(start + length));
    seams_.insert(start + length);  // whatever follows is a mapping of its own now
  }

  // A range of `n` bytes made of kept pages, moved side by side, and of fresh ones where those do not suffice.
  char* assemble(int64_t n) {
    constexpr int64_t kWorthMoving = 256 << 10;
    constexpr size_t kMostSeams = 20000;  // the kernel allows 65,530 mappings for each process
    int64_t movable = 0;
    if (seams_.size() < kMostSeams)
      for (auto it = by_size_.lower_bound({kWorthMoving, nullptr}); it != by_size_.end() && movable < n; ++it)
        movable += it->first;
    int64_t moved = std::min(movable, n);
    int64_t fresh = n - moved;
    if (fresh > 0) {
      // Ranges too small to move go back to the kernel, so that as much can be mapped afresh. Ranges that will be moved
      // stay counted as reserved all along.
      while (!try_reserve(fresh)) {
        auto smallest = by_size_.begin();
        if (smallest == by_size_.end() || (movable && smallest->first >= kWorthMoving)) return nullptr;
        unmap_some(smallest->first);
      }
    }
    auto* target = static_cast<char*>(
        mmap(nullptr, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (target == MAP_FAILED) {
      counters.reserved -= fresh;
      return nullptr;
    }
    int64_t filled = 0, taken = 0;
    while (filled < moved) {
      auto largest = std::prev(by_size_.end());
      char* start = largest->second;
      int64_t length = largest->first;
      forget(start, length);
      int64_t used = std::min(length, moved - filled);
      if (used < length) keep(start + used, length - used);
      taken += used;
      if (!move_pages(start, used, target + filled)) {
        // Out of mappings, most likely. The pages of this piece are lost to us either way; map the rest afresh.
        break;
      }
      filled += used;
    }
    // Pages of a piece that could not be moved are gone, but still counted; pieces not reached stay kept, and so what
    // replaces them has to be reserved.
    if (taken < moved && !try_reserve(moved - taken)) {
      drop_seams(target, n);
      munmap(target, n);
      counters.reserved -= taken + fresh;
      return nullptr;
    }
    taken = moved;
    if (filled < n) {
      int64_t rest = n - filled;
      void* p = mmap(target + filled, rest, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
      if (p == MAP_FAILED) {
        munmap(target, n);
        counters.reserved -= taken + fresh;
        return nullptr;
      }
      if (rest >= (2 << 20)) madvise(p, rest, MADV_HUGEPAGE);
      seams_.insert(target + filled);
      counters.fresh_bytes += rest;
    }
    counters.moved_bytes += filled;
    return target;
  }

  // Move whole mappings (mremap refuses to cross a seam). On failure the source pages are unmapped.
  bool move_pages(char* from, int64_t length, char* to) {
    char* end = from + length;
    char* piece = from;
    bool ok = true;
    while (piece < end) {
      auto seam = seams_.upper_bound(piece);
      char* stop = seam == seams_.end() ? end : std::min(*seam, end);
      int64_t bytes = stop - piece;
      if (ok && mremap(piece, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to) {
        seams_.insert(to);
      } else {
        ok = false;
        munmap(piece, bytes);
      }
      to += bytes;
      piece = stop;
    }
    drop_seams(from, length);
    return ok;
  }

  std::map<char*, int64_t> by_start_;
  std::set<std::pair<int64_t, char*>> by_size_;
  std::set<char*> seams_;  // a superset of the addresses where one of our mappings begins
  std::atomic<int64_t> kept_{0};
};

// Never destroyed: blocks may be freed while the process exits.
Pages& pages() {
  static Pages* instance = new Pages;
  return *instance;
}

// ---- small blocks: malloc with a header ----

struct alignas(64) Header {
  int64_t bytes;
  int64_t serial;
};
static_assert(sizeof(Header) == 64);

// A small block starts 64 bytes into a 128-byte aligned piece, so its address is never a multiple of a page: that tells
// small blocks from large ones.
bool is_large(void* block) {
  return (reinterpret_cast<uintptr_t>(block) & (kPage - 1)) == 0;
}

thread_local int64_t fetching_record = -1;
thread_local bool evicting = false;

void* try_block(int64_t n, bool large) {
  if (large) {
    Pages& all = pages();
    std::lock_guard<std::mutex> guard(all.mutex);
    char* start = all.take(n);
    if (!start) return nullptr;
    int64_t serial = ++counters.serial;
    all.live[start] = Block{n, serial};
    count_live(n);
    if (logging.load(std::memory_order_relaxed))
      log_event(fetching_record >= 0 ? Event::kFetchAlloc : Event::kAlloc, serial, n, fetching_record);
    return start;
  }
  if (!try_reserve(n)) {
    Pages& all = pages();
    std::lock_guard<std::mutex> guard(all.mutex);
    all.trim_for(n);
    if (!try_reserve(n)) return nullptr;
  }
  void* base = nullptr;
  if (posix_memalign(&base, 128, n + sizeof(Header)) != 0) {
    counters.reserved -= n;
    return nullptr;
  }
  auto* header = static_cast<Header*>(base);
  header->bytes = n;
  header->serial = ++counters.serial;
  raise_to(small_high, small_live.fetch_add(n) + n);
  count_live(n);
  if (logging.load(std::memory_order_relaxed))
    log_event(fetching_record >= 0 ? Event::kFetchAlloc : Event::kAlloc, header->serial, n, fetching_record);
  return header + 1;
}

void note_failure(int64_t n) {
  std::lock_guard<std::mutex> guard(failure_mutex);
  last_failure = {n, counters.live, counters.reserved, counters.budget, current_op()};
  ++counters.refused;
}

// What a signal's handler raised (Ctrl-C, as a rule) while an allocation waited. It cannot pass through C++, and ctypes
// would swallow it inside the callback: it is kept for whoever turns the refusal into an error. Guarded by the GIL.
PyObject* interruption = nullptr;

bool interrupted() {
  if (!Py_IsInitialized()) return false;
  PyGILState_STATE gil = PyGILState_Ensure();
  bool raised = !PyErr_Occurred() && PyErr_CheckSignals() != 0;
  if (raised) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    Py_XDECREF(interruption);
    interruption = value;
  }
  PyGILState_Release(gil);
  return raised;
}

// See Note [Asking for room].
void* block_after_making_room(int64_t n, bool large) {
  Pressure ask = pressure.load();
  if (!ask || asking_for_room || forked) return nullptr;
  ++waiters;
  void* block = nullptr;
  for (;;) {
    uint64_t epoch;
    {
      std::lock_guard<std::mutex> guard(progress_mutex);
      epoch = progress_epoch;
    }
    if (interrupted()) break;
    int64_t excess = counters.reserved.load() - pages().kept() + n - counters.budget.load();
    asking_for_room = true;
    int64_t answer = ask(std::max<int64_t>(excess, 1));
    asking_for_room = false;
    bool moving;
    {
      // Looked at before the attempt: what ends in between is a reason to ask once more.
      std::lock_guard<std::mutex> guard(progress_mutex);
      moving = in_flight > 0 || progress_epoch != epoch;
    }
    block = try_block(n, large);
    if (block || answer < 0 || !moving) break;
    int64_t start = now_ns();
    {
      // Not for ever: Python sees Ctrl-C only when it is asked again.
      WithoutGil released;
      std::unique_lock<std::mutex> guard(progress_mutex);
      progress.wait_for(guard, std::chrono::milliseconds(200), [&] { return progress_epoch != epoch; });
    }
    add_stall_ns(now_ns() - start);
    block = try_block(n, large);
    if (block) break;
  }
  --waiters;
  return block;
}

// So that torch.profiler's memory columns say what they say without us (R5).
void tell_profiler(void* block, int64_t change) {
  if (C10_UNLIKELY(c10::memoryProfilingEnabled()))
    c10::reportMemoryUsageToProfiler(
        block, change, counters.live, counters.reserved, c10::Device(c10::DeviceType::CPU));
}

void delete_block(void* block) {
  if (!block) return;
  int64_t bytes = give_block(block);
  tell_profiler(block, -bytes);
}

class BudgetAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (n == 0) return {nullptr, nullptr, &delete_block, cpu};
    void* block = take_block(static_cast<int64_t>(n), Patience::kWait);
    if (!block) {
      Failure f;
      {
        std::lock_guard<std::mutex> guard(failure_mutex);
        f = last_failure;
      }
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          false,
          "lowtide: ",
          f.op.empty() ? "an operator" : f.op,
          " asked for ",
          f.requested,
          " bytes; ",
          f.live,
          " bytes are in use and cannot be moved now, the budget is ",
          f.budget,
          " bytes (outside tide.step() nothing is moved)");
    }
    tell_profiler(block, static_cast<int64_t>(n) >= kLarge ? round_to_page(n) : static_cast<int64_t>(n));
    return {block, block, &delete_block, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &delete_block;
  }
  void copy_data(void* to, const void* from, size_t n) const override {
    default_copy_data(to, from, n);
  }
};

BudgetAllocator allocator;

void lock_for_fork() {
  pages().mutex.lock();
  progress_mutex.lock();
  failure_mutex.lock();
  lock_log_for_fork();  // last: some log with the others held
}
void unlock_after_fork() {
  unlock_log_after_fork();
  failure_mutex.unlock();
  progress_mutex.unlock();
  pages().mutex.unlock();
}
void after_fork_in_child() {
  unlock_after_fork();
  // A child has none of our threads: nobody could free anything for it, and its memory is not the parent's budget.
  forked = true;
  logging = false;
  counters.budget = 0;
  pressure = nullptr;
  waiters = 0;  // they are not here either, and nobody may notify a condition that they left in the middle of a wait
}

}  // namespace

void* take_block(int64_t nbytes, Patience patience) {
  bool large = nbytes >= kLarge;
  int64_t n = large ? round_to_page(nbytes) : nbytes;
  if (void* block = try_block(n, large)) return block;
  if (patience == Patience::kRefuse) return nullptr;
  void* block = block_after_making_room(n, large);
  if (!block) note_failure(n);
  return block;
}

int64_t give_block(void* block) {
  int64_t bytes, serial;
  if (is_large(block)) {
    Pages& all = pages();
    std::lock_guard<std::mutex> guard(all.mutex);
    auto found = all.live.find(block);
    bytes = found->second.bytes;
    serial = found->second.serial;
    all.live.erase(found);
    if (logging.load(std::memory_order_relaxed))
      log_event(evicting ? Event::kEvictFree : Event::kFree, serial, bytes);
    counters.live -= bytes;
    all.keep_merged(static_cast<char*>(block), bytes);
    if (!installed) all.trim_all();  // nobody will ask for these pages again
  } else {
    auto* header = static_cast<Header*>(block) - 1;
    bytes = header->bytes;
    serial = header->serial;
    if (logging.load(std::memory_order_relaxed))
      log_event(evicting ? Event::kEvictFree : Event::kFree, serial, bytes);
    free(header);
    small_live -= bytes;
    counters.live -= bytes;
    counters.reserved -= bytes;
  }
  if (waiters.load(std::memory_order_relaxed) > 0) notify_progress();
  return bytes;
}

c10::Allocator* budget_allocator() {
  return &allocator;
}

bool is_ours(const c10::StorageImpl* storage) {
  const c10::DataPtr& data = storage->data_ptr();
  return data.get_deleter() == &delete_block && data.get() == data.get_context();
}

int64_t serial_of(const c10::StorageImpl* storage) {
  const c10::DataPtr& data = storage->data_ptr();
  void* block = data.get_context();
  if (!block || data.get_deleter() != &delete_block) return -reinterpret_cast<int64_t>(storage->data());
  if (!is_large(block)) return (static_cast<Header*>(block) - 1)->serial;
  Pages& all = pages();
  std::lock_guard<std::mutex> guard(all.mutex);
  auto found = all.live.find(block);
  return found == all.live.end() ? 0 : found->second.serial;
}

void notify_progress() {
  {
    std::lock_guard<std::mutex> guard(progress_mutex);
    ++progress_epoch;
  }
  progress.notify_all();
}

void transfer_began(int64_t bytes) {
  std::lock_guard<std::mutex> guard(progress_mutex);
  in_flight += bytes;
}

void transfer_ended(int64_t bytes) {
  {
    std::lock_guard<std::mutex> guard(progress_mutex);
    in_flight -= bytes;
    ++progress_epoch;
  }
  progress.notify_all();
}

void add_stall_ns(int64_t ns) {
  counters.stall_ns += ns;
  if (logging.load(std::memory_order_relaxed)) log_event(Event::kStall, ns);
}

bool in_forked_child() {
  return forked;
}

void survive_forks() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(&lock_for_fork, &unlock_after_fork, &after_fork_in_child); });
}

void set_fetching_record(int64_t record) {
  fetching_record = record;
}
void set_evicting(bool value) {
  evicting = value;
}

}  // namespace lowtide

using namespace lowtide;

extern "C" {

void lt_install() {
  forked = false;  // a child that opens a budget of its own has one
  survive_forks();
  installed = true;
  c10::SetCPUAllocator(budget_allocator(), 100);
}

void lt_uninstall() {
  c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), 100);
  counters.budget = 0;
  pressure = nullptr;
  std::lock_guard<std::mutex> guard(pages().mutex);
  installed = false;
  pages().trim_all();
}

void lt_set_pressure(Pressure callback) {
  pressure = callback;
}

// Set the budget (0: none). Kept pages beyond it are returned; live bytes beyond it stay, and nothing new is granted.
void lt_set_budget(int64_t bytes) {
  counters.budget = bytes;
  std::lock_guard<std::mutex> guard(pages().mutex);
  pages().trim_for(0);
}

// Tensor bytes that other allocators hold but the budget covers: parameters that existed before, for one.
void lt_set_foreign(int64_t bytes) {
  int64_t change = bytes - counters.foreign.exchange(bytes);
  counters.reserved += change;
  raise_to(counters.peak_reserved, counters.reserved);
  count_live(change);
  std::lock_guard<std::mutex> guard(pages().mutex);
  pages().trim_for(0);
}

void lt_trim() {
  std::lock_guard<std::mutex> guard(pages().mutex);
  pages().trim_all();
}

void lt_reset_peaks() {
  counters.peak_live = counters.live.load();
  counters.peak_reserved = counters.reserved.load();
}

// live, reserved, peak live, peak reserved, budget, foreign, stall ns, fresh, moved, trimmed, refused
void lt_counters(int64_t* out) {
  int64_t values[] = {
      counters.live,       counters.reserved, counters.peak_live,   counters.peak_reserved,
      counters.budget,     counters.foreign,  counters.stall_ns,    counters.fresh_bytes,
      counters.moved_bytes, counters.trimmed_bytes, counters.refused};
  std::memcpy(out, values, sizeof(values));
}

// Numbers of the last refused allocation; returns the operator's name.
void lt_last_failure(int64_t* out, char* op, int64_t op_bytes) {
  std::lock_guard<std::mutex> guard(failure_mutex);
  out[0] = last_failure.requested;
  out[1] = last_failure.live;
  out[2] = last_failure.reserved;
  out[3] = last_failure.budget;
  std::snprintf(op, op_bytes, "%s", last_failure.op.c_str());
}

// Take what a signal's handler raised while an allocation waited: the exception, or None.
PyObject* lt_take_interruption() {
  PyObject* taken = interruption ? interruption : Py_NewRef(Py_None);
  interruption = nullptr;
  return taken;
}

int64_t lt_serial_of_storage(const c10::StorageImpl* storage) {
  return serial_of(storage);
}

int lt_is_ours(const c10::StorageImpl* storage) {
  return is_ours(storage) ? 1 : 0;
}
}
