// Memory whose pages come by faults and go by age: a file behind addresses, so many pages of it in memory at a time.
//
// One thread per pager serves everything (userfaultfd): it reads faults, fetches what they ask for and what a prefetcher
// expects next, makes room before, and works ahead while there is nothing to serve. Nobody else changes a page's state, so
// there is nothing to lock but counters and what callers ask for.
//
// Note [Changed]: a page that came is write-protected, unless it was a write that asked for it. The first write faults and
// marks it. What leaves is protected before it is written, so what goes out is of one instant; whoever writes meanwhile
// faults, and finds it gone.
//
// Note [Lines]: with a line's size given, a page that is about to change is copied first. When it leaves, the lines that
// differ from the copy are written, and no others (Kona: Calciu et al., ASPLOS 2021). The copy takes memory as a page does.
//
// Note [Age]: hardware tells nobody which pages are read. Age counts from a page's arrival, as in the driver of CUDA.
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

#ifndef UFFD_USER_MODE_ONLY  // in the kernel's headers since 5.11
#define UFFD_USER_MODE_ONLY 1
#endif

namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kLeafPages = 16;  // 64 KiB, what the tree is made of
constexpr int64_t kTreeLeaves = 32;  // 2 MiB
constexpr int kHistory = 32;
constexpr int64_t kMostWindow = 8;
// Pages that have just come do not go with others of their tree: else those that one instruction needs would go in turns.
constexpr int64_t kGrace = 24;

int64_t now_ns() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec * 1'000'000'000LL + at.tv_nsec;
}

// ---- Leap: the majority of the last deltas (Maruf and Chowdhury, ATC 2020) ----

// The delta that more than half of a window of the newest deltas have, of windows a quarter, a half and all of the history
// long; the newest comes last. False: there is none.
bool majority(const std::deque<int64_t>& deltas, int64_t& found) {
  for (int window = kHistory / 4; window <= kHistory; window *= 2) {
    int n = std::min<int>(window, static_cast<int>(deltas.size()));
    int64_t candidate = 0;
    int votes = 0;
    for (int i = 0; i < n; ++i) {  // Boyer and Moore
      int64_t delta = deltas[deltas.size() - 1 - i];
      if (votes == 0) candidate = delta;
      votes += delta == candidate ? 1 : -1;
    }
    int count = 0;
    for (int i = 0; i < n; ++i) count += deltas[deltas.size() - 1 - i] == candidate;
    if (count > window / 2) {
      found = candidate;
      return true;
    }
    if (n < window) break;
  }
  return false;
}

class Leap {
 public:
  int64_t hits = 0;  // of prefetched pages, since the last window

  // A fault: the pages to fetch beside it.
  void touched(int64_t page, std::vector<int64_t>& wanted) {
    if (last_ >= 0) deltas_.push_back(page - last_);
    if (deltas_.size() > kHistory) deltas_.pop_front();
    last_ = page;
    // Where there is none, the one before goes on.
    if (majority(deltas_, trend_)) known_ = true;
    bool follows = known_ && !deltas_.empty() && deltas_.back() == trend_;
    int64_t window = follows ? 1 : 0;
    if (hits > 0) {
      window = 1;
      while (window < hits + 1) window *= 2;
      window = std::min(window, kMostWindow);
    }
    window = std::max(window, before_ / 2);
    hits = 0;
    before_ = window;
    if (!known_ || trend_ == 0) return;
    for (int64_t k = 1; k <= window; ++k) wanted.push_back(page + k * trend_);
  }

 private:
  std::deque<int64_t> deltas_;
  int64_t last_ = -1, trend_ = 0, before_ = 0;
  bool known_ = false;
};

// ---- the tree of neighbours (Ganguly et al., ISCA 2019) ----

// A leaf of a full binary tree is touched: the leaves that come, itself among them. Whatever node is more than half there
// is filled, from the leaves up. `valid` has a bit for every leaf.
uint64_t tree_fetch(uint64_t valid, int leaves, int leaf) {
  uint64_t after = valid | (1ULL << leaf);
  for (int size = 2; size <= leaves; size *= 2) {
    int first = leaf / size * size;
    uint64_t node = (size == 64 ? ~0ULL : ((1ULL << size) - 1)) << first;
    if (2 * __builtin_popcountll(after & node) > size) after |= node;
  }
  return after & ~valid;
}

// A leaf goes: those that go with it. Whatever node is less than half there afterwards is emptied.
uint64_t tree_evict(uint64_t valid, int leaves, int leaf) {
  uint64_t after = valid & ~(1ULL << leaf);
  for (int size = 2; size <= leaves; size *= 2) {
    int first = leaf / size * size;
    uint64_t node = (size == 64 ? ~0ULL : ((1ULL << size) - 1)) << first;
    if (2 * __builtin_popcountll(after & node) < size) after &= ~node;
  }
  return valid & ~after;
}

enum Prefetch : int32_t { kNone = 0, kSequential = 1, kRandom = 2, kTree = 3, kLeap = 4 };
enum Access : int32_t { kReadOnly = 1, kWriteOnly = 2, kVolatile = 4 };

struct Config {
  int64_t bytes, capacity_bytes;
  int32_t prefetch, tree_evicts;
  int32_t access, batch_faults;
  int64_t batch_ns, free_bytes;
  int32_t given;       // the file had something in it before: it is somebody's
  int32_t line_bytes;  // 0: pages are written whole
};

enum Counter {
  kFaults,         // pages that were asked for
  kWriteFaults,    // first writes of pages that were there
  kBatches,        // of faults that were served together
  kFetched,        // pages read from the file
  kFresh,          // pages that came without a read: never written, or only ever written
  kPrefetched,     // of both, those that nobody had asked for
  kHits,           // faults that Leap had foreseen
  kEvicted,        // pages that went
  kWritten,        // of these and of those at the end, how many had changed
  kEvictedWaiting, // pages that went while a fault waited
  kPushed,         // pages that came while there was nothing to serve
  kPeak,           // most pages in memory
  kResident,
  kReads,          // calls that read the file, and that wrote it
  kWrites,
  kFailed,         // an errno, or 0
  kPushLeft,
  kWrittenBytes,
  kCounters
};

class Pager {
 public:
  Pager(const Config& config, int fd) : config_(config), fd_(fd) {
    pages_ = (config.bytes + kPage - 1) / kPage;
    most_ = std::max<int64_t>(1, config.capacity_bytes / kPage);
    state_.resize(pages_);
    age_.resize(pages_, by_age_.end());
    writes_.resize(pages_);
    arrived_.resize(pages_);
    // What is only written needs no fetch: what was there before is nobody's concern.
    if (config.given && !(config.access & kWriteOnly)) std::fill(state_.begin(), state_.end(), kInFile);
  }

  // 0, or an errno.
  int open() {
    kernel_too_ = true;
    uffd_ = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK));
    if (uffd_ < 0) {
      kernel_too_ = false;
      uffd_ = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY));
    }
    if (uffd_ < 0) return errno;
    uffdio_api api{};
    api.api = UFFD_API;
    api.features = UFFD_FEATURE_PAGEFAULT_FLAG_WP;
    if (ioctl(uffd_, UFFDIO_API, &api)) return errno;
    int rights = config_.access & kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
    void* got = mmap(nullptr, pages_ * kPage, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return errno;
    base_ = static_cast<char*>(got);
    madvise(base_, pages_ * kPage, MADV_NOHUGEPAGE);
    madvise(base_, pages_ * kPage, MADV_DONTFORK);  // a child has nobody to serve it, and must not find zeros
    uffdio_register range{};
    range.range = {reinterpret_cast<uint64_t>(base_), static_cast<uint64_t>(pages_ * kPage)};
    range.mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP;
    if (ioctl(uffd_, UFFDIO_REGISTER, &range)) return errno;
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_ < 0) return errno;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { work(); });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return 0;
  }

  // What is in memory and changed goes to the file, unless nobody wants it afterwards. 0, or an errno.
  int close() {
    if (thread_.joinable()) {
      ask([this] { stopping_ = true; });
      thread_.join();
    }
    if (base_ && !(config_.access & (kVolatile | kReadOnly))) {
      std::vector<int64_t> changed;
      for (int64_t page = 0; page < pages_; ++page)
        if (state_[page] & kDirty) changed.push_back(page);
      write_out(changed);
    }
    if (base_) munmap(base_, pages_ * kPage);
    base_ = nullptr;
    for (int* fd : {&uffd_, &wake_}) {
      if (*fd >= 0) ::close(*fd);
      *fd = -1;
    }
    return static_cast<int>(count_[kFailed]);
  }

  void* base() const {
    return base_;
  }
  bool kernel_too() const {
    return kernel_too_;
  }
  void counters(int64_t* out) {
    std::lock_guard<std::mutex> guard(mutex_);
    std::copy(count_, count_ + kCounters, out);
  }
  void push(int64_t first, int64_t n) {
    ask([&] {
      for (int64_t page = first; page < std::min(first + n, pages_); ++page) push_.push_back(page);
      count_[kPushLeft] = static_cast<int64_t>(push_.size());
    });
  }
  // Protect all pages again, so that the next write of each is counted: returns once it is done.
  void arm() {
    std::unique_lock<std::mutex> guard(mutex_);
    ++arm_asked_;
    signal();
    int64_t mine = arm_asked_;
    armed_.wait(guard, [&] { return arm_done_ >= mine; });
  }
  void write_counts(int32_t* out) {
    std::lock_guard<std::mutex> guard(mutex_);
    std::copy(writes_.begin(), writes_.end(), out);
  }

 private:
  static constexpr uint8_t kHere = 1, kDirty = 2, kInFile = 4, kCached = 8;

  template <typename Change>
  void ask(Change change) {
    std::lock_guard<std::mutex> guard(mutex_);
    change();
    signal();
  }
  void signal() {
    uint64_t one = 1;
    [[maybe_unused]] auto written = ::write(wake_, &one, sizeof one);
  }

  void work() {
    for (;;) {
      bool idle_work;
      {
        std::lock_guard<std::mutex> guard(mutex_);
        if (stopping_) return;
        if (arm_done_ < arm_asked_) {
          protect_all();
          arm_done_ = arm_asked_;
          armed_.notify_all();
        }
        idle_work = !push_.empty();
      }
      pollfd both[2] = {{uffd_, POLLIN, 0}, {wake_, POLLIN, 0}};
      int ready = poll(both, 2, idle_work ? 0 : -1);
      if (ready > 0 && (both[1].revents & POLLIN)) {
        uint64_t taken;
        [[maybe_unused]] auto got = ::read(wake_, &taken, sizeof taken);
      }
      if (ready > 0 && (both[0].revents & POLLIN)) {
        serve();
      } else if (idle_work) {
        push_some();
      }
    }
  }

  // Note [Batches]: faults are gathered until there are enough or the time is over, and fetched together (Zheng et al.,
  // HPCA 2016). Whoever does not fault meanwhile goes on.
  void serve() {
    std::vector<uffd_msg> faults;
    int64_t until = 0;
    for (;;) {
      uffd_msg message;
      ssize_t got = ::read(uffd_, &message, sizeof message);
      if (got == sizeof message) {
        if (message.event == UFFD_EVENT_PAGEFAULT) faults.push_back(message);
        if (!until) until = now_ns() + config_.batch_ns;
        if (static_cast<int32_t>(faults.size()) >= std::max(1, config_.batch_faults)) break;
        continue;
      }
      if (config_.batch_faults <= 1 || now_ns() >= until) break;
    }
    if (faults.empty()) return;
    std::lock_guard<std::mutex> guard(mutex_);
    ++count_[kBatches];
    std::vector<int64_t> asked, wanted;
    for (const uffd_msg& fault : faults) {
      auto page = static_cast<int64_t>((fault.arg.pagefault.address - reinterpret_cast<uint64_t>(base_)) / kPage);
      bool write = fault.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WRITE;
      if (fault.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WP) {
        changed(page);
        continue;
      }
      if (state_[page] & kHere) {  // another thread asked for it, too
        wake(page, 1);
        continue;
      }
      if (write) dirty_first_.push_back(page);
      if (std::find(asked.begin(), asked.end(), page) != asked.end()) continue;
      asked.push_back(page);
      ++count_[kFaults];
      foresee(page, wanted);
    }
    wanted.erase(
        std::remove_if(
            wanted.begin(), wanted.end(),
            [&](int64_t page) {
              return page < 0 || page >= pages_ || state_[page] & (kHere | kCached) ||
                  std::find(asked.begin(), asked.end(), page) != asked.end();
            }),
        wanted.end());
    // No more ahead than half of memory: what was asked for stays until it is used.
    auto most_ahead = static_cast<size_t>(std::max<int64_t>(0, most_ / 2 - static_cast<int64_t>(asked.size())));
    if (wanted.size() > most_ahead) wanted.resize(most_ahead);
    make_room(static_cast<int64_t>(asked.size() * (config_.line_bytes ? 2 : 1)), true);
    bring(asked, false);
    if (!wanted.empty()) {
      make_room(static_cast<int64_t>(wanted.size()), true);
      std::sort(wanted.begin(), wanted.end());
      wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
      count_[kPrefetched] += static_cast<int64_t>(wanted.size());
      if (config_.prefetch == kLeap)
        keep_ahead(wanted);
      else
        bring(wanted, true);
    }
    // HUM: what is pushed next lies behind what was asked for last.
    if (!asked.empty() && !push_.empty()) {
      auto behind = std::find(push_.begin(), push_.end(), asked.back() + 1);
      if (behind != push_.end()) std::rotate(push_.begin(), behind, push_.end());
    }
    // ETC: room for the next faults is made now, while nobody waits.
    int64_t free_pages = config_.free_bytes / kPage;
    if (free_pages > 0) make_room(std::min(free_pages, most_ - 1), false);
  }

  void changed(int64_t page) {
    if (!(state_[page] & kHere)) {  // it left after the fault was raised
      wake(page, 1);
      return;
    }
    if (config_.line_bytes && !(state_[page] & kDirty)) {
      make_room(1, true);
      if (!(state_[page] & kHere)) {  // it was the oldest
        wake(page, 1);
        return;
      }
    }
    ++count_[kWriteFaults];
    mark(page, base_ + page * kPage);
    protect(page, 1, false);
  }
  // A page is about to change; what it is now.
  void mark(int64_t page, const char* now) {
    if (config_.line_bytes && !(state_[page] & kDirty)) {  // see Note [Lines]
      auto& copy = before_[page];
      copy.reset(new char[kPage]);
      memcpy(copy.get(), now, kPage);
      count_[kPeak] = std::max(count_[kPeak], ++count_[kResident]);
    }
    state_[page] |= kDirty;
    ++writes_[page];
  }

  void foresee(int64_t page, std::vector<int64_t>& wanted) {
    int64_t leaf = page / kLeafPages, tree = leaf / kTreeLeaves;
    switch (config_.prefetch) {
      case kSequential:
        for (int64_t k = 0; k < kLeafPages; ++k) wanted.push_back(leaf * kLeafPages + k);
        break;
      case kRandom:
        wanted.push_back(tree * kTreeLeaves * kLeafPages + static_cast<int64_t>(random_() % (kTreeLeaves * kLeafPages)));
        break;
      case kTree: {
        uint64_t come = tree_fetch(valid(tree), kTreeLeaves, static_cast<int>(leaf % kTreeLeaves));
        for (int64_t k = 0; k < kTreeLeaves; ++k)
          if (come >> k & 1)
            for (int64_t j = 0; j < kLeafPages; ++j) wanted.push_back((tree * kTreeLeaves + k) * kLeafPages + j);
        break;
      }
      case kLeap:
        if (state_[page] & kCached) {
          ++leap_.hits;
          ++count_[kHits];
        }
        leap_.touched(page, wanted);
        break;
      default:
        break;
    }
  }
  // The leaves of a tree that have a page in memory.
  uint64_t valid(int64_t tree) const {
    uint64_t found = 0;
    for (int64_t k = 0; k < kTreeLeaves; ++k)
      for (int64_t j = 0; j < kLeafPages; ++j) {
        int64_t page = (tree * kTreeLeaves + k) * kLeafPages + j;
        if (page < pages_ && (state_[page] & kHere)) found |= 1ULL << k;
      }
    return found;
  }

  // ---- coming ----

  // Have pages at their addresses; there is room. Neighbours are read at once.
  void bring(std::vector<int64_t> wanted, bool ahead) {
    std::sort(wanted.begin(), wanted.end());
    for (size_t i = 0; i < wanted.size();) {
      size_t j = i + 1;
      auto kind = [&](int64_t page) { return state_[page] & (kInFile | kCached); };
      while (j < wanted.size() && wanted[j] == wanted[j - 1] + 1 && kind(wanted[j]) == kind(wanted[i])) ++j;
      int64_t first = wanted[i], n = static_cast<int64_t>(j - i);
      room_.resize(n * kPage);
      fill(first, n);
      for (int64_t k = 0; k < n; ++k) {
        int64_t page = first + k;
        auto was_write = std::find(dirty_first_.begin(), dirty_first_.end(), page);
        bool writes = !ahead && was_write != dirty_first_.end();
        if (was_write != dirty_first_.end()) dirty_first_.erase(was_write);
        uffdio_copy copy{};
        copy.dst = reinterpret_cast<uint64_t>(base_ + page * kPage);
        copy.src = reinterpret_cast<uint64_t>(room_.data() + k * kPage);
        copy.len = kPage;
        copy.mode = writes || (config_.access & kReadOnly) ? 0 : UFFDIO_COPY_MODE_WP;
        while (ioctl(uffd_, UFFDIO_COPY, &copy) && errno == EAGAIN) copy.copy = 0;
        if (state_[page] & kCached)
          by_age_.erase(age_[page]);
        else
          ++count_[kResident];
        state_[page] = static_cast<uint8_t>((state_[page] | kHere) & ~kCached);
        if (writes) mark(page, room_.data() + k * kPage);
        arrived_[page] = ++arrivals_;
        age_[page] = by_age_.insert(by_age_.end(), page);
      }
      i = j;
    }
    count_[kPeak] = std::max(count_[kPeak], count_[kResident]);
  }
  void fill(int64_t first, int64_t n) {
    if (state_[first] & kCached) {
      for (int64_t k = 0; k < n; ++k) {
        auto kept = ahead_.find(first + k);
        memcpy(room_.data() + k * kPage, kept->second.get(), kPage);
        ahead_.erase(kept);
      }
      return;
    }
    if (!(state_[first] & kInFile)) {
      memset(room_.data(), 0, n * kPage);
      count_[kFresh] += n;
      return;
    }
    ++count_[kReads];
    count_[kFetched] += n;
    for (int64_t at = 0; at < n * kPage;) {
      ssize_t got = pread(fd_, room_.data() + at, n * kPage - at, first * kPage + at);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) {  // beyond the end of a file there are zeros; whatever else is wrong is told
        if (got < 0) count_[kFailed] = errno;
        memset(room_.data() + at, got < 0 ? 0xff : 0, n * kPage - at);
        break;
      }
      at += got;
    }
  }
  // Leap's pages wait beside their addresses, so that it sees which of them are used.
  void keep_ahead(const std::vector<int64_t>& wanted) {
    for (int64_t page : wanted) {
      room_.resize(kPage);
      fill(page, 1);
      ahead_[page].reset(new char[kPage]);
      memcpy(ahead_[page].get(), room_.data(), kPage);
      state_[page] |= kCached;
      age_[page] = by_age_.insert(by_age_.end(), page);
      ++count_[kResident];
    }
    count_[kPeak] = std::max(count_[kPeak], count_[kResident]);
  }

  void push_some() {
    std::lock_guard<std::mutex> guard(mutex_);
    std::vector<int64_t> some;
    while (!push_.empty() && some.size() < static_cast<size_t>(kLeafPages)) {
      int64_t page = push_.front();
      push_.pop_front();
      if (!(state_[page] & (kHere | kCached))) some.push_back(page);
    }
    // What is pushed takes no other's place.
    int64_t room = most_ - count_[kResident];
    if (static_cast<int64_t>(some.size()) > room) {
      some.resize(std::max<int64_t>(0, room));
      push_.clear();
    }
    count_[kPushed] += static_cast<int64_t>(some.size());
    bring(some, true);
    count_[kPushLeft] = static_cast<int64_t>(push_.size());
  }

  // ---- going ----

  void make_room(int64_t n, bool waiting) {
    while (count_[kResident] + n > most_) {
      if (by_age_.empty()) return;
      std::vector<int64_t> going;
      int64_t oldest = by_age_.front();
      if (config_.tree_evicts) {
        int64_t leaf = oldest / kLeafPages, tree = leaf / kTreeLeaves;
        uint64_t go = tree_evict(valid(tree), kTreeLeaves, static_cast<int>(leaf % kTreeLeaves));
        for (int64_t k = 0; k < kTreeLeaves; ++k)
          for (int64_t j = 0; (go >> k & 1) && j < kLeafPages; ++j) {
            int64_t page = (tree * kTreeLeaves + k) * kLeafPages + j;
            if (page < pages_ && (state_[page] & kHere) && arrivals_ - arrived_[page] >= kGrace) going.push_back(page);
          }
        if (going.empty()) going.push_back(oldest);
      } else {
        int64_t lack = count_[kResident] + n - most_;
        for (int64_t page : by_age_) {
          if (static_cast<int64_t>(going.size()) >= lack) break;
          going.push_back(page);
        }
      }
      int64_t before = count_[kEvicted];
      evict(going);
      if (waiting) count_[kEvictedWaiting] += count_[kEvicted] - before;
    }
  }
  void evict(std::vector<int64_t> going) {
    std::sort(going.begin(), going.end());
    std::vector<int64_t> dirty;
    for (int64_t page : going)
      if (state_[page] & kDirty) dirty.push_back(page);
    for (int64_t page : dirty) protect(page, 1, true);
    write_out(dirty);
    for (int64_t page : going) {
      by_age_.erase(age_[page]);
      if (state_[page] & kCached) {  // foreseen, and never used
        ahead_.erase(page);
        state_[page] &= static_cast<uint8_t>(~kCached);
        --count_[kResident];
        continue;
      }
      if (state_[page] & kDirty) continue;  // it could not be written: it stays, for good, beyond what memory there is
      madvise(base_ + page * kPage, kPage, MADV_DONTNEED);
      state_[page] &= static_cast<uint8_t>(~kHere);
      --count_[kResident];
      ++count_[kEvicted];
    }
  }
  // Write pages that changed; neighbours at once.
  void write_out(const std::vector<int64_t>& dirty) {
    for (size_t i = 0; i < dirty.size();) {
      size_t j = i + 1;
      while (j < dirty.size() && dirty[j] == dirty[j - 1] + 1) ++j;
      if (config_.line_bytes) j = i + 1;
      bool done = config_.line_bytes ? write_lines(dirty[i]) : write(dirty[i] * kPage, static_cast<int64_t>(j - i) * kPage);
      if (!done) {  // R4: it is where it was
        i = j;
        continue;
      }
      for (; i < j; ++i) {
        if (before_.erase(dirty[i])) --count_[kResident];
        state_[dirty[i]] = static_cast<uint8_t>((state_[dirty[i]] | kInFile) & ~kDirty);
        ++count_[kWritten];
      }
    }
  }

  bool write_lines(int64_t page) {
    const char *now = base_ + page * kPage, *then = before_[page].get();
    int64_t line = config_.line_bytes;
    for (int64_t at = 0; at < kPage;) {
      int64_t end = at;
      while (end < kPage && memcmp(now + end, then + end, line)) end += line;
      if (end > at && !write(page * kPage + at, end - at)) return false;
      at = std::max(end, at + line);
    }
    return true;
  }
  bool write(int64_t offset, int64_t n) {
    ++count_[kWrites];
    for (int64_t at = 0; at < n;) {
      ssize_t done = pwrite(fd_, base_ + offset + at, n - at, offset + at);
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) {
        count_[kFailed] = done < 0 ? errno : ENOSPC;
        return false;
      }
      at += done;
    }
    count_[kWrittenBytes] += n;
    return true;
  }

  void protect_all() {
    for (int64_t page = 0; page < pages_; ++page)
      if (state_[page] & kHere) protect(page, 1, true);
  }
  void protect(int64_t page, int64_t n, bool on) {
    uffdio_writeprotect change{};
    change.range = {reinterpret_cast<uint64_t>(base_ + page * kPage), static_cast<uint64_t>(n * kPage)};
    change.mode = on ? UFFDIO_WRITEPROTECT_MODE_WP : 0;
    while (ioctl(uffd_, UFFDIO_WRITEPROTECT, &change) && errno == EAGAIN) {
    }
  }
  void wake(int64_t page, int64_t n) {
    uffdio_range range = {reinterpret_cast<uint64_t>(base_ + page * kPage), static_cast<uint64_t>(n * kPage)};
    ioctl(uffd_, UFFDIO_WAKE, &range);
  }

  Config config_;
  int fd_, uffd_ = -1, wake_ = -1;
  bool kernel_too_ = false, stopping_ = false;
  int64_t pages_, most_, arm_asked_ = 0, arm_done_ = 0;
  char* base_ = nullptr;
  std::mutex mutex_;
  std::condition_variable armed_;
  std::thread thread_;
  std::vector<uint8_t> state_;
  std::list<int64_t> by_age_;  // oldest first
  std::vector<std::list<int64_t>::iterator> age_;
  std::vector<int32_t> writes_;
  std::vector<int64_t> arrived_;  // by the count of arrivals
  int64_t arrivals_ = 0;
  std::vector<int64_t> dirty_first_;
  std::vector<char> room_;
  std::deque<int64_t> push_;
  std::unordered_map<int64_t, std::unique_ptr<char[]>> ahead_, before_;
  Leap leap_;
  std::minstd_rand random_{1};
  int64_t count_[kCounters] = {};
};

}  // namespace

extern "C" {

Pager* lp_open(const Config* config, int fd, int* error) {
  auto pager = std::make_unique<Pager>(*config, fd);
  *error = pager->open();
  if (*error) {
    pager->close();
    return nullptr;
  }
  return pager.release();
}
int lp_close(Pager* pager) {
  int error = pager->close();
  delete pager;
  return error;
}
void* lp_base(Pager* pager) {
  return pager->base();
}
int lp_kernel_too(Pager* pager) {
  return pager->kernel_too();
}
void lp_counters(Pager* pager, int64_t* out) {
  pager->counters(out);
}
void lp_push(Pager* pager, int64_t first, int64_t n) {
  pager->push(first, n);
}
void lp_arm(Pager* pager) {
  pager->arm();
}
void lp_write_counts(Pager* pager, int32_t* out) {
  pager->write_counts(out);
}
uint64_t lp_tree_fetch(uint64_t valid, int leaves, int leaf) {
  return tree_fetch(valid, leaves, leaf);
}
uint64_t lp_tree_evict(uint64_t valid, int leaves, int leaf) {
  return tree_evict(valid, leaves, leaf);
}
// 1: there is a majority, in `trend`.
int lp_majority(const int64_t* deltas, int n, int64_t* trend) {
  std::deque<int64_t> all(deltas, deltas + n);
  return majority(all, *trend);
}
}
