// Large blocks: ranges of whole pages under the budget, and the counters that the budget is kept by.
//
// Freed ranges are kept, merged with their neighbours, and handed out again as they lie, so that a step that repeats its
// sizes neither faults nor zeroes pages. What is scarce is physical memory, not addresses: when no kept range is long
// enough, kept pages are moved side by side into a new range of addresses (mremap), which costs page-table work instead
// of zeroing, and fragmentation can never make an allocation fail.
//
// Note [Huge pages]: a block of 2 MiB and more has huge pages wherever a whole one fits between its ends, and small ones at
// the edges; the two are kept apart. Huge pages only ever move between addresses that are aligned alike, so that they stay
// whole. Where they run out, small ones go back to the kernel for fresh huge ones; where small ones run out, a huge one is
// broken, for good. So matrices keep huge pages however often they leave and return: they are a tenth of a step's time.
//
// Note [Holes]: a range keeps its addresses while its pages are elsewhere. `detach` moves its pages to other addresses and
// leaves a hole, reserved and without access; `attach` moves pages onto a hole. Both move page tables, not bytes. At no instant are a range's addresses free:
// another thread's mmap, malloc's for one, would be given them, and lose them to the hole (MREMAP_DONTUNMAP, Linux 5.7).
//
// Note [Pages of a file]: a step that the budget refuses runs to its update all the same, so that its refusal can tell what
// the whole of it needs. What does not fit has pages of a file without a name, mapped as shared: the kernel writes them back
// when memory is scarce, so they are no part of the budget, and no reason to kill the process. They move as other pages do,
// but are never kept: whoever gives them up gives them back to the file.
#pragma once
#include "runs.h"
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
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
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

  // `n` bytes of pages within the budget, with huge ones where they can be at addresses aligned as `like`; or nullptr.
  char* take(int64_t n, const char* like = nullptr) {
    Layout layout = layout_of(like, n);
    if (char* start = take_as_it_lies(layout)) return start;
    if (try_reserve(n))
      if (char* fresh = map_fresh(n, like)) return fresh;
    return kept() > 0 ? assemble(layout, like) : nullptr;
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

  // Pages that nobody uses any more; `huge`: those that could be huge are.
  void keep(char* start, int64_t length, bool huge) {
    if (is_of_file(start)) {
      forget_of_file(start, length);
      unmap_hole(start, length);
      return;
    }
    Layout layout = huge ? layout_of(start, length) : Layout{0, 0, length};
    small_.keep(start, layout.head);
    huge_.keep(start + layout.head, layout.whole);
    small_.keep(start + layout.head + layout.whole, layout.tail);
  }

  // Return kept pages to the kernel until `n` more bytes could be reserved, or none are kept.
  void trim_for(int64_t n) {
    while (kept() > 0) {
      int64_t budget = counters.budget.load();
      int64_t excess = budget ? counters.reserved.load() + n - budget : 0;
      if (excess <= 0) return;
      unmap_some(round_to_page(excess));
    }
  }

  void trim_all() {
    while (kept() > 0) unmap_some(kept());
  }

  int64_t kept() const {
    return small_.bytes() + huge_.bytes();
  }

  // `n` bytes of fresh pages, whatever the budget says: where the alternative is a wrong number.
  char* take_beyond_budget(int64_t n, const char* like = nullptr) {
    counters.reserved += n;
    raise_to(counters.peak_reserved, counters.reserved.load());
    return map_fresh(n, like);
  }

  // Have huge pages in memory of another allocator, where they fit. False: it has small ones, or some.
  bool collapse(char* start, int64_t n) {
    Layout layout = layout_of(start, n);
    if (layout.whole == 0) return true;  // there is no room for one
    char* from = start + layout.head;
    if (madvise(from, layout.whole, MADV_HUGEPAGE) != 0) return false;
    seams_.insert(from);  // the kernel has a mapping of its own there now
    seams_.insert(from + layout.whole);
    if (madvise(from, layout.whole, MADV_COLLAPSE) != 0) return false;
    // No mapping begins inside a huge page: seams of whatever was there before would cut it in two.
    for (auto seam = seams_.upper_bound(from); seam != seams_.end() && *seam < from + layout.whole;)
      seam = aligned_alike(*seam, from) ? std::next(seam) : seams_.erase(seam);
    return true;
  }

  // Whether huge pages of a block at `from` stay whole when they move to `to`.
  static bool aligned_alike(const char* from, const char* to) {
    return ((reinterpret_cast<uintptr_t>(from) ^ reinterpret_cast<uintptr_t>(to)) & (kHuge - 1)) == 0;
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

  // See Note [Huge pages].
  struct Layout {
    int64_t head = 0, whole = 0, tail = 0;

    int64_t bytes() const {
      return head + whole + tail;
    }
    int64_t edges() const {
      return head + tail;
    }
  };
  static Layout layout_of(const char* start, int64_t n) {
    int64_t past = reinterpret_cast<uintptr_t>(start) & (kHuge - 1), head = past ? kHuge - past : 0;
    if (n < head + kHuge) return {0, 0, n};
    int64_t whole = (n - head) & ~(kHuge - 1);
    return {head, whole, n - head - whole};
  }

  // Addresses without pages, aligned as `like` is where huge pages may move.
  char* reserve(int64_t n, const char* like) {
    int64_t slack = n >= kHuge ? kHuge : 0;
    void* got = mmap(nullptr, n + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return nullptr;
    char* base = static_cast<char*>(got);
    if (slack) {
      int64_t shift = (reinterpret_cast<uintptr_t>(like) - reinterpret_cast<uintptr_t>(base)) & (kHuge - 1);
      if (shift > 0) munmap(base, shift);
      if (shift < slack) munmap(base + shift + n, slack - shift);
      base += shift;
    }
    // Those of whatever was there before would cut huge pages in two.
    seams_.erase(seams_.lower_bound(base), seams_.lower_bound(base + n));
    return base;
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

  char* map_fresh(int64_t n, const char* like) {
    trim_malloc_if_needed();
    char* p = reserve(n, like);
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

  // Kept pages go back to the kernel: small ones first, and of these the smallest runs, the least likely to fit anything.
  void unmap_some(int64_t at_most) {
    if (small_.bytes() == 0 && at_most < kHuge) break_one();
    Runs& from = small_.bytes() > 0 ? small_ : huge_;
    Run run = from.smallest();
    int64_t cut = std::min(run.bytes, &from == &huge_ ? at_most & ~(kHuge - 1) : at_most);
    from.cut(run.end() - cut, cut);
    unmap(run.end() - cut, cut);
  }

  void unmap(char* start, int64_t length) {
    munmap(start, length);
    drop_seams(start, length);
    counters.reserved -= length;
    counters.trimmed_bytes += length;
  }

  // A huge page is small ones from here on.
  void break_one() {
    Run run = huge_.smallest();
    huge_.cut(run.end() - kHuge, kHuge);
    small_.keep(run.end() - kHuge, kHuge);
  }

  void drop_seams(char* start, int64_t length) {
    seams_.erase(seams_.lower_bound(start), seams_.lower_bound(start + length));
    seams_.insert(start + length);  // whatever follows is a mapping of its own now
  }

  // Kept pages that have a block's layout where they are: no system call.
  char* take_as_it_lies(const Layout& layout) {
    constexpr int kMostTries = 16;
    if (layout.whole == 0) {
      Run run = small_.smallest_of(layout.bytes());
      if (run.start) small_.cut(run.start, layout.bytes());
      return run.start;
    }
    char* found = nullptr;
    int tries = 0;
    huge_.each_of(layout.whole, [&](Run run) {
      // Its edges lie beside the run, if anywhere.
      char* whole = layout.head > 0 ? run.start : run.end() - layout.whole;
      if (small_.covers(whole - layout.head, layout.head) && small_.covers(whole + layout.whole, layout.tail))
        found = whole;
      return found || ++tries == kMostTries;
    });
    if (!found) return nullptr;
    huge_.cut(found, layout.whole);
    small_.cut(found - layout.head, layout.head);
    small_.cut(found + layout.whole, layout.tail);
    return found - layout.head;
  }

  // A block made of kept pages, moved side by side, and of fresh ones where those do not suffice.
  char* assemble(const Layout& layout, const char* like) {
    constexpr int64_t kWorthMoving = 32 << 10;
    constexpr size_t kMostSeams = 20000;  // the kernel allows 65,530 mappings for each process
    bool moves = seams_.size() < kMostSeams;
    int64_t whole = moves ? std::min(layout.whole, huge_.bytes()) : 0;
    int64_t worth = 0;  // in small pages
    if (moves)
      small_.each_of(kWorthMoving, [&](Run run) {
        worth += run.bytes;
        return false;
      });
    while (moves && worth < layout.edges() && huge_.bytes() > whole) {
      break_one();
      worth += kHuge;
    }
    int64_t edges = std::min(layout.edges(), worth);
    // What will be moved stays counted as reserved all along; other kept pages go back to the kernel, so that as much can be
    // mapped afresh.
    int64_t fresh = layout.bytes() - whole - edges;
    while (!try_reserve(fresh)) {
      int64_t spare = small_.bytes() - edges, huge_spare = huge_.bytes() - whole;
      if (spare > 0) {
        Run run = small_.smallest();
        int64_t cut = std::min(run.bytes, spare);
        if (run.bytes >= kWorthMoving) {
          int64_t excess = counters.reserved.load() + fresh - counters.budget.load();
          cut = std::min(cut, std::max<int64_t>(round_to_page(excess), kPage));
        }
        small_.cut(run.end() - cut, cut);
        unmap(run.end() - cut, cut);
      } else if (huge_spare > 0) {
        Run run = huge_.smallest();
        huge_.cut(run.end() - kHuge, kHuge);
        unmap(run.end() - kHuge, kHuge);
      } else {
        return nullptr;
      }
    }
    char* target = reserve(layout.bytes(), like);
    if (!target) {
      counters.reserved -= fresh;
      return nullptr;
    }
    int64_t head = std::min(layout.head, edges), tail = edges - head, taken = 0;
    char* middle = target + layout.head;
    char* last = middle + layout.whole;
    bool filled = fill(small_, target, head, layout.head, taken) && fill(huge_, middle, whole, layout.whole, taken) &&
        fill(small_, last, tail, layout.tail, taken);
    if (!filled) {  // out of mappings: what was moved is lost to us, what was not is still kept
      munmap(target, layout.bytes());
      drop_seams(target, layout.bytes());
      counters.reserved -= taken + fresh;
      return nullptr;
    }
    counters.moved_bytes += taken;
    return target;
  }

  // Have `moved` bytes of kept pages at `to`, and fresh ones behind them up to `n`. False: the kernel refuses.
  bool fill(Runs& from, char* to, int64_t moved, int64_t n, int64_t& taken) {
    char* end = to + n;
    while (moved > 0) {
      Run run = from.smallest_of(moved);
      if (!run.start) run = from.largest();
      int64_t used = std::min(run.bytes, moved);
      from.cut(run.start, used);
      taken += used;
      // Pages that cannot be moved are gone: fresh ones take their place.
      if (!move_pages(run.start, used, to) && !map_over(to, used)) return false;
      to += used;
      moved -= used;
    }
    return to == end || map_over(to, end - to);
  }

  bool map_over(char* start, int64_t n) {
    void* got = mmap(start, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (got == MAP_FAILED) return false;
    if (n >= kHuge) madvise(start, n, MADV_HUGEPAGE);
    drop_seams(start, n);
    seams_.insert(start);
    counters.fresh_bytes += n;
    return true;
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

  Runs small_, huge_;  // see Note [Huge pages]
  std::map<char*, int64_t> of_file_;  // offsets in the file, by where its pages are now
  Extents file_extents_;
  int file_ = -1;
  std::set<char*> seams_;  // a superset of the addresses where one of our mappings begins
};

// Never destroyed: blocks may be freed while the process exits.
inline Pages& pages() {
  static Pages* instance = new Pages;
  return *instance;
}

}  // namespace lowtide
