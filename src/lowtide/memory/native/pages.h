// Large blocks: ranges of whole pages under the budget, and the counters that the budget is kept by.
//
// Freed ranges are kept, merged with their neighbours, and handed out again by best fit, so that a step that repeats its
// sizes neither faults nor zeroes pages. What is scarce is physical memory, not addresses: when no kept range is long
// enough, kept pages are moved side by side into a new range of addresses (mremap), which costs page-table work instead
// of zeroing, and fragmentation can never make an allocation fail.
//
// Note [Holes]: a range keeps its addresses while its pages are elsewhere. `detach` moves its pages to other addresses and
// leaves a hole, reserved and without access; `attach` moves pages onto a hole. Both move page tables, not bytes. From 2 MiB
// on, addresses are aligned alike on both sides, so that huge pages move whole. At no instant are a range's addresses free:
// another thread's mmap, malloc's for one, would be given them, and lose them to the hole (MREMAP_DONTUNMAP, Linux 5.7).
//
// Note [Pages of a file]: a step that the budget refuses runs to its update all the same, so that its refusal can tell what
// the whole of it needs. What does not fit has pages of a file without a name, mapped as shared: the kernel writes them back
// when memory is scarce, so they are no part of the budget, and no reason to kill the process. They move as other pages do,
// but are never kept: whoever gives them up gives them back to the file.
#pragma once
#include "tier.h"

#include <fcntl.h>
#include <malloc.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

namespace lowtide {

struct Counters {
  std::atomic<int64_t> live{0}, reserved{0}, peak_live{0}, peak_reserved{0}, budget{0}, foreign{0};
  std::atomic<int64_t> serial{0}, stall_ns{0}, fresh_bytes{0}, moved_bytes{0}, trimmed_bytes{0}, refused{0};
};
inline Counters counters;

inline void raise_to(std::atomic<int64_t>& peak, int64_t value) {
  int64_t seen = peak.load(std::memory_order_relaxed);
  while (value > seen && !peak.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

inline bool try_reserve(int64_t n) {
  int64_t held = counters.reserved.load();
  int64_t budget;
  do {
    budget = counters.budget.load(std::memory_order_relaxed);
    if (budget && held + n > budget) return false;
  } while (!counters.reserved.compare_exchange_weak(held, held + n));
  raise_to(counters.peak_reserved, held + n);
  return true;
}

inline void count_live(int64_t n) {
  raise_to(counters.peak_live, counters.live.fetch_add(n) + n);
}

// Bytes in small blocks now, and the most since malloc last gave its free pages back: it may still hold the difference.
inline std::atomic<int64_t> small_live{0}, small_high{0};

// Called before memory is taken from the kernel: malloc's free pages must not come on top of the budget.
inline void trim_malloc_if_needed() {
  constexpr int64_t kWorthTrimming = 1 << 20;
  int64_t small = small_live.load(), held = small_high.load() - small;
  int64_t budget = counters.budget.load(std::memory_order_relaxed);
  if (!budget || held < kWorthTrimming || counters.reserved.load() + held <= budget) return;
  small_high = small;
  malloc_trim(0);
}

// All kept (free) pages. Guarded by `mutex`, as is everything that has to do with ranges.
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

  // Whose pages the file behind `fd` gives from here on (-1: nobody gets any).
  void use_file(int fd) {
    file_ = fd;
  }
  // See Note [Pages of a file]. nullptr: the disk is full, or there is no file.
  char* take_of_file(int64_t n) {
    // Reserved before it is written: a full disk is a refusal here, and a SIGBUS later.
    if (file_ < 0) return nullptr;
    int64_t offset = file_extents_.take(n);
    void* got = fallocate(file_, 0, offset, n) == 0
        ? mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED, file_, offset)
        : MAP_FAILED;
    if (got == MAP_FAILED) {
      file_extents_.give(offset, n);
      return nullptr;
    }
    char* start = static_cast<char*>(got);
    seams_.insert(start);
    seams_.insert(start + n);
    of_file_.emplace(start, offset);
    return start;
  }
  bool has_of_file() const {
    return !of_file_.empty();
  }
  bool is_of_file(const char* start) const {
    return !of_file_.empty() && of_file_.count(const_cast<char*>(start)) > 0;
  }
  // Have pages of the kernel's own where those of a file were, with nothing in them.
  void replace_of_file(char* start, int64_t n) {
    forget_of_file(start, n);
    mmap(start, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  }

  void keep_merged(char* start, int64_t length) {
    if (is_of_file(start)) {
      forget_of_file(start, length);
      unmap_hole(start, length);
      return;
    }
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

  // `n` bytes of fresh pages, whatever the budget says: where the alternative is a wrong number.
  char* take_beyond_budget(int64_t n) {
    counters.reserved += n;
    raise_to(counters.peak_reserved, counters.reserved.load());
    return map_fresh(n);
  }

  // See Note [Holes]. Returns where the pages are now, for reading and writing, or nullptr: they could not be moved and are
  // where they were.
  char* detach(char* start, int64_t n, bool writable) {
    char* elsewhere = reserve(n, start);
    if (!elsewhere) return nullptr;
    // Without access first: nobody may see the empty pages that are left behind.
    if (mprotect(start, n, PROT_NONE) == 0 && relocate(start, n, elsewhere, MREMAP_DONTUNMAP)) {
      // What is left behind is a hole already; a fresh one costs the kernel nothing.
      mmap(start, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
      if (mprotect(elsewhere, n, PROT_READ | PROT_WRITE) == 0) return elsewhere;
      if (!relocate(elsewhere, n, start, MREMAP_DONTUNMAP)) std::abort();
    }
    unmap_hole(elsewhere, n);
    if (mprotect(start, n, writable ? PROT_READ | PROT_WRITE : PROT_READ) != 0) std::abort();
    return nullptr;
  }

  // See Note [Holes]. False: the pages are still at `elsewhere`, and the hole is one.
  bool attach(char* elsewhere, int64_t n, char* start) {
    return relocate(elsewhere, n, start, 0);
  }

  // ---- slow memory: pages of a file at a range's addresses ----

  // Addresses for `n` bytes of slow memory that nobody has yet, with its pages; nullptr: the kernel refuses.
  char* map_slow(int64_t n, int fd, int64_t offset) {
    char* start = reserve(n, nullptr);
    if (!start) return nullptr;
    if (!map_slow_at(start, n, fd, offset)) {
      munmap(start, n);
      return nullptr;
    }
    return start;
  }

  // Map pages of a file over a hole.
  bool map_slow_at(char* start, int64_t n, int fd, int64_t offset) {
    void* got = mmap(start, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd, offset);
    if (got == MAP_FAILED) return false;
    drop_seams(start, n);
    seams_.insert(start);
    return true;
  }

  // Have pages of a file that are mapped elsewhere at a range's addresses.
  bool attach_slow(char* window, int64_t n, char* start) {
    if (mremap(window, n, n, MREMAP_MAYMOVE | MREMAP_FIXED, start) == MAP_FAILED) return false;
    drop_seams(start, n);
    seams_.insert(start);
    return true;
  }

  void unmap_hole(char* start, int64_t n) {
    munmap(start, n);
    drop_seams(start, n);
  }

  // Pages at addresses that are not ours alone go back to the kernel; they were counted as reserved.
  void forget_pages(int64_t n) {
    counters.reserved -= n;
  }

 private:
  static constexpr int64_t kHuge = 2 << 20;

  // Addresses without pages, aligned as `like` is where huge pages may move.
  static char* reserve(int64_t n, const char* like) {
    int64_t slack = n >= kHuge ? kHuge : 0;
    void* got = mmap(nullptr, n + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return nullptr;
    char* base = static_cast<char*>(got);
    if (!slack) return base;
    int64_t shift = (reinterpret_cast<uintptr_t>(like) - reinterpret_cast<uintptr_t>(base)) & (kHuge - 1);
    if (shift > 0) munmap(base, shift);
    if (shift < slack) munmap(base + shift + n, slack - shift);
    return base + shift;
  }

  // Move whole mappings (mremap may refuse to cross a seam); on failure everything is where it was.
  bool relocate(char* from, int64_t n, char* to, int flags) {
    int64_t moved = move_mappings(from, n, to, flags);
    if (moved == n) {
      drop_seams(from, n);
      seams_.insert(to + n);
      if (auto found = of_file_.find(from); found != of_file_.end()) {
        of_file_.emplace(to, found->second);
        of_file_.erase(found);
      }
      return true;
    }
    // The way back needs no more mappings than there were: if even that fails, memory is lost, and nobody may go on.
    if (move_mappings(to, moved, from, MREMAP_DONTUNMAP) != moved) std::abort();
    return false;
  }

  // Returns how many bytes could be moved.
  int64_t move_mappings(char* from, int64_t n, char* to, int flags) {
    int64_t moved = 0;
    while (moved < n) {
      auto seam = seams_.upper_bound(from + moved);
      char* stop = seam == seams_.end() ? from + n : std::min(*seam, from + n);
      int64_t bytes = stop - (from + moved);
      if (mremap(from + moved, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | flags, to + moved) == MAP_FAILED) break;
      seams_.insert(to + moved);
      moved += bytes;
    }
    return moved;
  }

  void forget_of_file(char* start, int64_t n) {
    auto found = of_file_.find(start);
    file_extents_.give(found->second, n);
    of_file_.erase(found);
  }

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
    char* p = reserve(n, nullptr);
    if (!p || mprotect(p, n, PROT_READ | PROT_WRITE) != 0) {
      if (p) munmap(p, n);
      counters.reserved -= n;
      return nullptr;
    }
    seams_.insert(p);
    seams_.insert(p + n);
    if (n >= kHuge) madvise(p, n, MADV_HUGEPAGE);
    counters.fresh_bytes += n;
    return p;
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
  std::map<char*, int64_t> of_file_;  // offsets in the file, by where its pages are now
  Extents file_extents_;
  int file_ = -1;
  std::set<char*> seams_;  // a superset of the addresses where one of our mappings begins
  std::atomic<int64_t> kept_{0};
};

// Never destroyed: blocks may be freed while the process exits.
inline Pages& pages() {
  static Pages* instance = new Pages;
  return *instance;
}

}  // namespace lowtide
