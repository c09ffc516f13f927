// See ranges.h.
#include "ranges.h"

#include "checksum.h"
#include "remakes.h"
#include "schedule.h"
#include "updates.h"

#include <fcntl.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <stdexcept>

namespace lowtide {
namespace {

constexpr int64_t kTransferChunk = 8 << 20;
constexpr int64_t kFrame = 2 << 20;  // see Note [Encoded]: each mover has a buffer as large
constexpr int64_t kGrace = 2;  // the last touches that may not be undone; see Note [Grace]
constexpr int64_t kMostThrashing = 64;
// Two for the disk while one copies; the others because operators keep all cores busy, and whoever is to go on waits for one.
constexpr int kThreadsOfSources = 6;
constexpr int64_t kSampledPages = 16;
constexpr int64_t kSpareShare = 16;  // of the budget: what operators allocate beside what is read ahead

thread_local BlobBuffer blobs;
thread_local BlobBuffer decoded_again;  // see Note [Rounded]

}  // namespace

Ranges& ranges() {
  static Ranges* instance = new Ranges;
  return *instance;
}

// ---- blocks come and go ----

Range* Ranges::add(char* start, int64_t bytes, int64_t serial) {
  if (unused_.empty()) {
    made_.push_back(std::make_unique<Range>());
    unused_.push_back(made_.back().get());
  }
  Range* range = unused_.back();
  unused_.pop_back();
  *range = Range{};
  range->start = range->data = start;
  range->bytes = range->block = bytes;
  range->serial = serial;
  range->last_touch = ++clock;
  range->by_age = by_age_.insert(by_age_.end(), range);
  by_start_.emplace(start, range);
  by_data_.emplace(start, range);
  by_serial_.emplace(serial, range);
  return range;
}

Range* Ranges::add_slow(int64_t bytes, int32_t tier, int64_t serial) {
  if (tier < 0 || ending_ || !running()) return nullptr;
  int error = 0;
  Slot slot{tier, take_slot(tier, bytes, error)};
  if (slot.offset < 0) return nullptr;
  char* start = pages().map_slow(bytes, tiers[tier].fds[0], slot.offset);
  if (!start) {
    tiers[tier].extents.give(slot.offset, bytes);
    return nullptr;
  }
  Range* range = add(start, bytes, serial);
  range->place = Place::kSlow;
  range->dirty = false;
  range->slot = slot;
  range->slot_forks = forks_;
  count_slow(bytes);
  counted.born_slow += bytes;
  return range;
}

void Ranges::forget(Range* range) {
  if (range->place == Place::kSlow) count_slow(-range->bytes);
  if (Transfer* transfer = range->transfer) {
    transfer->cancelled = true;  // its end keeps the pages and gives the slot back
    transfer->range = nullptr;
    range->transfer = nullptr;
    range->slot = Slot{};
  }
  ahead_.forget(range);
  give_slot(range->slot, range->bytes, range->slot_forks);
  by_age_.erase(range->by_age);
  by_start_.erase(range->start);
  by_data_.erase(range->data);
  by_serial_.erase(range->serial);
  range->serial = 0;
  range->recipe = nullptr;
  range->update = nullptr;
  unused_.push_back(range);
  progress();
}

void Ranges::remove(Range* range) {
  if (range->liens > 0) {
    range->orphan = true;
    return;
  }
  remakes().forget(range);
  if (pays_fast(range)) counters.live -= range->bytes;
  if (range->place == Place::kHere) {
    if (!range->writable) mprotect(range->start, range->bytes, PROT_READ | PROT_WRITE);
    pages().keep(range->start, range->bytes, range->huge);
  } else {
    pages().unmap_hole(range->start, range->bytes);
  }
  forget(range);
}

Range* Ranges::adopt(char* data, int64_t bytes) {
  auto first = (reinterpret_cast<uintptr_t>(data) + kPage - 1) & ~static_cast<uintptr_t>(kPage - 1);
  auto end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~static_cast<uintptr_t>(kPage - 1);
  if (end < first + kLarge / 2 || of_data(data)) return nullptr;
  auto length = static_cast<int64_t>(end - first);
  Range* range = add(reinterpret_cast<char*>(first), length, ++counters.serial);
  by_data_.erase(range->data);
  range->data = data;
  by_data_.emplace(data, range);
  range->foreign = true;
  range->huge = pages().collapse(range->start, length);
  range->block = bytes;
  counters.reserved += length;
  raise_to(counters.peak_reserved, counters.reserved.load());
  count_live(length);
  return range;
}

void Ranges::let_go(Range* range) {
  void* keeper = range->keeper;
  auto free_keeper = range->free_keeper;
  if (!range->foreign) {
    remove(range);
    return;
  }
  disown(range);
  free_keeper(keeper);
}

void Ranges::disown(Range* range) {
  if (pays_fast(range)) counters.live -= range->bytes;
  if (range->place == Place::kHere && pages().is_of_file(range->start)) {
    pages().replace_of_file(range->start, range->bytes);
  } else if (range->place == Place::kHere) {
    pages().forget_pages(range->bytes);
    if (!range->writable) mprotect(range->start, range->bytes, PROT_READ | PROT_WRITE);
  } else {
    // Its allocator may write there as soon as we return: pages of its own, and none of ours.
    mmap(range->start, range->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  }
  forget(range);
}

Range* Ranges::at(const void* address) const {
  auto after = by_start_.upper_bound(static_cast<const char*>(address));
  if (after == by_start_.begin()) return nullptr;
  Range* range = std::prev(after)->second;
  return static_cast<const char*>(address) < range->start + range->bytes ? range : nullptr;
}

// ---- use ----

void Ranges::touch(Range* range, bool writes) {
  range->last_touch = ++clock;
  if (remakes().discards_victims) range->touched_ns = now_ns();
  by_age_.splice(by_age_.end(), by_age_, range->by_age);
  if (range->unused) {
    range->unused = false;
    if (reads_ahead()) ahead_.note_use(range);
  }
  if (!writes) return;
  if (range->place != Place::kSlow) range->dirty = true;
  if (is_reachable(range) && !range->writable) make_writable(range);
}

void Ranges::note_write(Range* range, int64_t stamp) {
  range->written_at = stamp;
  if (range->recipe && range->recipe->trial) remakes().forget(range);  // it is not what was to be made again
}

void Ranges::protect(Range* range) {
  bool may = is_reachable(range) && range->writable && range->lent == 0 && !range->barred;
  if (may && mprotect(range->start, range->bytes, PROT_READ) == 0) range->writable = false;
}

bool Ranges::is_discarded(const Range* range) {
  return range->recipe && !range->recipe->trial;
}

void Ranges::unpin(Range* range) {
  if (--range->pins > 0) return;
  if (range->filled && !range->lost) unfill(range);
  if (range->leave_asked) {
    range->leave_asked = false;
    if (may_leave(range)) leave(range, range->leave_tier, range->leave_placed, range->leave_coder);
  }
  if (pages().is_of_file(range->start)) leave(range, schedule().tier_of(range));
  progress();
}

void Ranges::note_trouble(const Trouble& trouble) {
  if (trouble_.code == 0) trouble_ = trouble;
  troubled = true;
}

bool Ranges::progress_waiting(uint64_t epoch) {
  std::unique_lock<std::mutex> guard(pages().mutex);
  if (epoch_ != epoch) return true;
  if (counted.leaving == 0 && counted.arriving == 0) return false;
  ++waiting_;
  meter.wait(+1);
  // Not for ever: Python sees Ctrl-C only when it is asked again.
  changed.wait_for(guard, std::chrono::milliseconds(200), [&] { return epoch_ != epoch; });
  meter.wait(-1);
  --waiting_;
  return true;
}

void Ranges::idle_waiting() {
  std::unique_lock<std::mutex> guard(pages().mutex);
  ++waiting_;
  changed.wait(guard, [&] { return under_way_ == 0; });
  --waiting_;
}

void Ranges::progress() {
  ++epoch_;
  if (waiting_ > 0) changed.notify_all();
}

bool Ranges::make_writable(Range* range) {
  if (range->place == Place::kSlow) bury_children();
  if (range->place == Place::kSlow && is_shared(range->slot_forks)) return own_slot(range);
  if (mprotect(range->start, range->bytes, PROT_READ | PROT_WRITE) != 0) return false;
  range->writable = true;
  return true;
}

void Ranges::settle(Range* range, char* from, bool huge) {
  if (range->barred && mprotect(from, range->bytes, PROT_NONE) != 0) std::abort();  // before anybody can see them
  if (!pages().attach(from, range->bytes, range->start)) std::abort();  // a hole takes as many mappings as its pages had
  range->place = Place::kHere;
  range->huge = huge;
  if (range->liens > 0) protect(range);
  progress();
}

bool Ranges::settle_slow(Range* range, char* window) {
  bool done = window ? pages().attach_slow(window, range->bytes, range->start)
                     : pages().map_slow_at(range->start, range->bytes, tiers[range->slot.tier].fds[0], range->slot.offset);
  if (!done) return false;
  range->place = Place::kSlow;
  range->writable = true;
  range->dirty = range->summed = false;  // whoever writes there changes its slot, and no checksum knows
  count_slow(range->bytes);
  if (range->liens > 0 || is_shared(range->slot_forks)) protect(range);
  progress();
  return true;
}

// Give a range in slow memory bytes that no child has; see Note [Slow].
bool Ranges::own_slot(Range* range) {
  int error = 0;
  Slot own{range->slot.tier, take_slot(range->slot.tier, range->bytes, error)};
  int fd = tiers[own.tier].fds[0];
  void* got = own.offset < 0
      ? MAP_FAILED
      : mmap(nullptr, range->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, own.offset);
  if (got != MAP_FAILED) {
    if (tiers[own.tier].move(false, static_cast<char*>(got), range->bytes, range->slot.offset) != 0) {
      munmap(got, range->bytes);
      tiers[own.tier].extents.give(own.offset, range->bytes);
      return false;
    }
    give_slot(range->slot, range->bytes, range->slot_forks);
    range->slot = own;
    range->slot_forks = forks_;
    count_slow(-range->bytes);
    if (!settle_slow(range, static_cast<char*>(got))) std::abort();  // whole mappings take no more of them
    return true;
  }
  if (own.offset >= 0) tiers[own.tier].extents.give(own.offset, range->bytes);
  // No room there: it is in fast memory from here on, whatever the budget says, for it may be written to already.
  char* room = pages().take(range->bytes, range->start);
  if (!room) {
    room = pages().take_beyond_budget(range->bytes, range->start);
    if (!room) return false;
    counted.beyond += range->bytes;
    note_trouble({ENOMEM, false, range->bytes, range->slot.tier});
  }
  return move_here(range, room) == 0;
}

int Ranges::move_here(Range* range, char* room) {
  int64_t bytes = range->bytes;
  // Whoever writes meanwhile faults, and waits for the lock.
  int error = mprotect(range->start, bytes, PROT_READ) ? errno : 0;
  if (!error) error = tiers[range->slot.tier].move(false, room, bytes, range->slot.offset);
  if (error) {
    pages().keep(room, bytes, true);
    return error;
  }
  count_slow(-bytes);
  count_live(bytes);
  give_slot(range->slot, bytes, range->slot_forks);
  range->dirty = range->writable = true;
  settle(range, room, true);
  return 0;
}

bool Ranges::fetch_slow(Range* range) {
  if (range->place != Place::kSlow) return true;
  if (range->pins > 0 || stopping_) return false;
  char* room = pages().take(range->bytes, range->start);
  if (!room) return false;
  if (mprotect(range->start, range->bytes, PROT_NONE) != 0) {
    pages().keep(room, range->bytes, true);
    return false;
  }
  count_slow(-range->bytes);
  counted.fetched += range->bytes;
  begin_read(range, room, false);
  return true;
}

void Ranges::landing_waiting(int64_t serial, std::unique_lock<std::mutex>& guard) {
  int64_t began_ns = 0;
  for (;;) {
    Range* range = of_serial(serial);
    if (!range || range->place != Place::kLeaving || !range->transfer->placed) break;
    range->transfer->awaited = true;
    if (!began_ns) {
      began_ns = now_ns();
      meter.wait(+1);
    }
    change_waiting(guard, true);
  }
  if (!began_ns) return;
  meter.wait(-1);
  int64_t waited = now_ns() - began_ns;
  counted.wait_ns += waited;
  guard.unlock();
  add_stall_ns(waited);
  guard.lock();
}

void Ranges::fetch_slow_waiting(int64_t serial, std::unique_lock<std::mutex>& guard) {
  int64_t began_ns = 0;
  for (;;) {
    Range* range = of_serial(serial);
    if (range && range->place == Place::kLeaving) call_back(range);
    if (!range || range->place != Place::kSlow || range->pins > 0) break;
    if (fetch_slow(range)) {
      hurry(range->transfer);
      break;
    }
    if (counted.leaving == 0) break;  // it is touched in place
    if (!began_ns) {
      began_ns = now_ns();
      meter.wait(+1);
    }
    change_waiting(guard, true);
  }
  if (!began_ns) return;
  meter.wait(-1);
  int64_t waited = now_ns() - began_ns;
  counted.wait_ns += waited;
  guard.unlock();
  add_stall_ns(waited);
  guard.lock();
}

bool Ranges::call_back(Range* range) {
  Transfer* transfer = range->transfer;
  if (transfer->summing || transfer->reading > 0 ||
      (transfer->pending > 0 && tiers[transfer->slot.tier].reads_addresses())) {
    transfer->recalled = true;
    return false;
  }
  transfer->cancelled = true;
  transfer->range = nullptr;
  range->transfer = nullptr;
  counted.leaving -= range->bytes;
  // What has been written of it, or is being written, is worth nothing; its slot goes back when the transfer has ended.
  range->slot = Slot{range->slot.tier, -1};
  range->dirty = range->writable = true;
  settle(range, transfer->data, transfer->huge);
  transfer->data = nullptr;
  return true;
}

void Ranges::enqueue(Transfer* transfer) {
  ++under_way_;
  Tier& tier = tiers[transfer->slot.tier];
  if (tier.addressable) transfer->joins = tier.link.begin(transfer->write, transfer->slot.offset, transfer->bytes);
  auto& queue = transfer->write ? writes_ : reads_;
  if (transfer->awaited)
    queue.push_front(transfer);
  else
    queue.push_back(transfer);
  queued_.notify_all();
}

void Ranges::begin_read(Range* range, char* pages, bool urgent) {
  auto* transfer = new Transfer{range, false, pages, range->bytes, true, range->slot, range->slot_forks};
  range->transfer = transfer;
  range->place = Place::kArriving;
  counted.arriving += range->bytes;
  count_live(range->bytes);
  transfer->awaited = urgent;
  enqueue(transfer);
}

void Ranges::hurry(Transfer* transfer) {
  transfer->awaited = true;
  queued_.notify_all();
  auto found = std::find(reads_.begin(), reads_.end(), transfer);
  if (found == reads_.end() || found == reads_.begin()) return;
  reads_.erase(found);
  reads_.push_front(transfer);
}

bool Ranges::prefetch(Range* range) {
  range->leave_asked = false;
  if (range->place == Place::kLeaving) call_back(range);
  if (range->place == Place::kSlow) return fetch_slow(range);
  if (range->place != Place::kAway || is_discarded(range)) return true;
  if (range->lost || range->vacant || stopping_) return false;
  char* room = pages().take(range->bytes, range->start);
  if (!room) return false;
  begin_read(range, room, false);
  return true;
}

bool Ranges::reads_ahead() const {
  return running() && !ending_ && !in_forked_child() && !schedule().leads() && slow_tier() < 0 && counters.budget.load();
}

bool Ranges::read_ahead(Range* range) {
  bool readable = range->place == Place::kAway && range->slot.offset >= 0 && !is_discarded(range) && !range->update;
  if (!readable || range->lost || range->vacant || !reads_ahead()) return false;
  int64_t budget = counters.budget.load(), room = pages().kept() + std::max<int64_t>(0, budget - counters.reserved.load());
  int64_t missing = range->bytes + budget / kSpareShare - room;
  std::vector<Range*> spare;
  for (auto each = by_age_.begin(); missing > 0 && each != by_age_.end() && order != Order::kNothing; ++each) {
    if (!may_leave(*each) || !is_clean(*each) || ahead_.expects(*each)) continue;
    if (!tiers[(*each)->slot.tier].holds()) continue;  // it would have to be written
    spare.push_back(*each);
    missing -= (*each)->bytes;
  }
  if (missing > 0) return false;
  for (Range* each : spare) leave(each, each->slot.tier);
  if (!prefetch(range)) return false;
  by_age_.splice(by_age_.end(), by_age_, range->by_age);
  return true;
}

void Ranges::change_waiting(std::unique_lock<std::mutex>& guard, bool with_gil) {
  uint64_t seen = epoch_;
  auto moved_on = [&] { return epoch_ != seen; };
  ++waiting_;
  if (with_gil) {
    guard.unlock();
    {
      WithoutGil released;
      guard.lock();
      changed.wait(guard, moved_on);
      guard.unlock();
    }
    guard.lock();
  } else {
    changed.wait(guard, moved_on);
  }
  --waiting_;
}

bool Ranges::bring_waiting(
    Range* range, std::unique_lock<std::mutex>& guard, bool with_gil, int64_t* waited_ns) {
  if (in_forked_child()) return bring_in_child_waiting(range, guard);
  int64_t serial = range->serial, began_ns = 0;
  bool here = false;
  while (range->serial == serial) {
    if (is_reachable(range)) {
      here = true;
      break;
    }
    if (range->place == Place::kLeaving) {
      if (!ending_ && range->transfer->placed)
        range->transfer->awaited = true;  // see Note [Slow]
      else if (call_back(range))
        continue;
    } else if (range->lost || range->vacant) {
      break;
    } else if (is_discarded(range)) {
      if (remaking) break;
      remakes().ask({serial});
    } else if (range->place == Place::kAway) {
      char* room = pages().take(range->bytes, range->start);
      if (!room) {
        make_room(range->bytes, !with_gil);
        room = pages().take(range->bytes, range->start);
      }
      // What is in slow memory can be touched there.
      if (!room && counted.leaving == 0 && tiers[range->slot.tier].addressable && settle_slow(range, nullptr)) continue;
      // What is on a disk needs fast memory: something else that is in use goes on in slow memory.
      if (!room && counted.leaving == 0 && displace(range->bytes)) room = pages().take(range->bytes, range->start);
      // See Note [Who may wait].
      if (!room && counted.leaving == 0 && counted.arriving == 0) {
        note_refusal(range->bytes);
        room = sounding_goes_on() ? pages().take_of_file(range->bytes) : nullptr;
        if (room) {
          note_sounded();
        } else {
          note_trouble({ENOMEM, false, range->bytes, range->slot.tier});
          if (with_gil) break;  // whoever asks has not begun: the next allocation is refused
          thrashing_ = 0;
          room = pages().take_beyond_budget(range->bytes, range->start);
          counted.beyond += range->bytes;
        }
      }
      if (room) {
        begin_read(range, room, true);
        continue;
      }
    } else {
      hurry(range->transfer);
    }
    if (!began_ns) {
      began_ns = now_ns();
      ++counted.waits;
      meter.wait(+1);
    }
    change_waiting(guard, with_gil || is_discarded(range));
  }
  if (began_ns) {
    int64_t waited = now_ns() - began_ns;
    counted.wait_ns += waited;
    if (waited_ns) *waited_ns = waited;
    meter.wait(-1);
    guard.unlock();
    add_stall_ns(waited);
    guard.lock();
  }
  return here;
}

// ---- excerpts ----

bool Ranges::has_excerpts(const Range* range) const {
  return range->bytes >= kLeastExcerpted && is_clean(range) && !range->update && !range->slot.frames && !range->summed &&
      !range->lost && range->slot.tier >= inherited_ && range->slot.tier < static_cast<int32_t>(tiers.size()) &&
      !tiers[range->slot.tier].call && !tiers[range->slot.tier].addressable && !in_forked_child();
}

// See Note [Excerpts]. The pages are the kernel's own, and go back to it: they were never a block.
bool Ranges::excerpt_waiting(Excerpt& excerpt, std::unique_lock<std::mutex>& guard) {
  Range* range = excerpt.range;
  int64_t bytes = excerpt.bytes(), copy = range->copy;
  if (forking_ || stopping_ || bytes == 0) return false;
  if (!try_reserve(bytes)) {
    make_room(bytes);
    pages().trim_for(bytes);
    if (!try_reserve(bytes)) return false;
  }
  void* got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) {
    counters.reserved -= bytes;
    return false;
  }
  char* buffer = static_cast<char*>(got);
  Tier& tier = tiers[range->slot.tier];
  int64_t offset = range->slot.offset;
  ++transferring_;  // see Note [Fork]
  int64_t began_ns = now_ns();
  guard.unlock();
  int error = 0;
  char* into = buffer;
  for (const PageRun& run : excerpt.runs) {
    for (int64_t at = 0; at < run.bytes && !error; at += kTransferChunk) {
      int64_t n = std::min(kTransferChunk, run.bytes - at);
      error = tier.move(false, into + at, n, offset + run.at + at);
    }
    into += run.bytes;
  }
  if (!error && mprotect(buffer, bytes, PROT_READ) != 0) error = errno;
  add_stall_ns(now_ns() - began_ns);
  guard.lock();
  --transferring_;
  idle_.notify_all();
  bool same = range->serial == excerpt.serial && range->place == Place::kAway && range->copy == copy && is_clean(range);
  if (error || !same) {
    munmap(buffer, bytes);
    counters.reserved -= bytes;
    return false;
  }
  counted.read += bytes;
  tier.read_bytes += bytes;
  counted.excerpted += bytes;
  count_live(bytes);
  into = buffer;
  for (const PageRun& run : excerpt.runs) {
    // At once and whole: whoever looks there before faults.
    if (mremap(into, run.bytes, run.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, range->start + run.at) == MAP_FAILED)
      munmap(into, run.bytes);  // out of mappings: a fault brings the whole
    into += run.bytes;
  }
  excerpt.mapped = bytes;
  return true;
}

void Ranges::end_excerpt(const Excerpt& excerpt) {
  if (excerpt.mapped == 0) return;
  Range* range = excerpt.range;
  counters.reserved -= excerpt.mapped;
  counters.live -= excerpt.mapped;
  if (range->serial == excerpt.serial && (range->place == Place::kAway || range->place == Place::kArriving))
    for (const PageRun& run : excerpt.runs)
      mmap(range->start + run.at, run.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  progress();
}

// ---- leaving ----

int64_t Ranges::take_slot(int32_t tier, int64_t bytes, int& error) {
  Tier& from = tiers[tier];
  int64_t offset = from.take(bytes, error);
  if (offset >= 0 || !from.addressable || from.extents.room() < bytes) return offset;
  compact(tier);
  return from.take(bytes, error);
}

// Whoever is in use meanwhile faults, and waits for the lock; the kernel would fail, so what is lent stays where it is.
void Ranges::compact(int32_t tier) {
  std::vector<Range*> movable;
  for (Range* range : by_age_)
    if (range->slot.tier == tier && range->slot.offset >= 0 && !range->transfer && range->lent == 0 &&
        !is_shared(range->slot_forks))
      movable.push_back(range);
  std::sort(movable.begin(), movable.end(), [](Range* a, Range* b) { return a->slot.offset < b->slot.offset; });
  for (Range* range : movable)
    if (tiers[tier].extents.free_before(range->slot.offset) > 0 && !slide(range)) return;
}

bool Ranges::slide(Range* range) {
  constexpr int64_t kPiece = 1 << 20;
  static std::vector<char>* buffer = new std::vector<char>(kPiece);
  Tier& tier = tiers[range->slot.tier];
  bool mapped = range->place == Place::kSlow;
  if (mapped && mprotect(range->start, range->bytes, PROT_NONE) != 0) return false;
  int64_t from = range->slot.offset, to = tier.extents.slide(from, range->bytes);
  range->slot.offset = to;
  int error = 0;
  for (int64_t at = 0; at < range->bytes && !error; at += kPiece) {
    int64_t n = std::min(kPiece, range->bytes - at);
    error = tier.move(false, buffer->data(), n, from + at);
    if (!error) error = tier.move(true, buffer->data(), n, to + at);
  }
  if (error) {  // a part of it may be overwritten
    if (mapped) {
      lose_slow(range, error);
    } else if (range->place == Place::kAway) {
      range->lost = error;
      note_trouble({error, false, range->bytes, range->slot.tier});
    } else {
      range->dirty = true;
    }
    return false;
  }
  counted.compacted += range->bytes;
  if (!mapped) return true;
  if (!pages().map_slow_at(range->start, range->bytes, tier.fds[0], to)) std::abort();  // as many mappings as before
  if (!range->writable) mprotect(range->start, range->bytes, PROT_READ);
  return true;
}

void Ranges::give_slot(Slot& slot, int64_t bytes, int64_t forks) {
  if (slot.offset >= 0 && slot.tier < static_cast<int32_t>(tiers.size())) {
    if (is_shared(forks))
      buried_.push_back({slot, bytes, forks});
    else
      give_extent(slot, bytes);
  }
  slot = Slot{slot.tier, -1};
}

void Ranges::give_extent(const Slot& slot, int64_t bytes) {
  if (tiers[slot.tier].source) return;
  if (!slot.frames) {
    tiers[slot.tier].extents.give(slot.offset, bytes);
  } else {
    for (const Frame& frame : slot.frames->frames)
      if (frame.offset >= 0) tiers[slot.tier].extents.give(frame.offset, frame.stored);
  }
  if (!crowded_) return;
  crowded_ = false;
  for (Range* range : by_age_) range->crowded_out = false;
}

// See Note [Children].
bool Ranges::is_shared(int64_t forks) {
  return std::any_of(children_.begin(), children_.end(), [&](const Child& child) { return child.number > forks; });
}

void Ranges::bury_children() {
  if (children_.empty()) return;
  std::erase_if(children_, [](const Child& child) {
    char byte;
    if (read(child.pipe, &byte, 1) != 0) return false;  // nothing to read, and nobody has closed it
    close(child.pipe);
    return true;
  });
  std::vector<Buried> kept;
  for (Buried& buried : buried_) {
    if (is_shared(buried.forks))
      kept.push_back(buried);
    else
      give_extent(buried.slot, buried.bytes);
  }
  buried_ = std::move(kept);
}

bool Ranges::leave(Range* range, int32_t tier, bool placed, int32_t coder) {
  if (!is_loose(range) || ending_ || !running()) return false;
  if (tier < inherited_ || tier >= static_cast<int32_t>(tiers.size())) return false;
  ahead_.enlist(range, false);
  // What a server that is gone held too is here only, and has to be written again.
  bool clean = is_clean(range) && (!placed || range->slot.tier == tier) && tiers[range->slot.tier].holds();
  if (coder && !clean && !coders[coder].exact && (!range->floats || range->mixed || range->foreign)) {
    coder = 0;
    counted.unencoded += range->bytes;
  }
  if (!clean) {
    bury_children();
    if (range->slot.offset >= 0 &&
        (range->slot.tier != tier || range->slot.frames || coder || is_shared(range->slot_forks)))
      give_slot(range->slot, range->bytes, range->slot_forks);
    if (coder) {
      auto pieces = static_cast<size_t>((range->bytes + kFrame - 1) / kFrame);
      range->slot = Slot{tier, 0, std::make_shared<Frames>(Frames{coder, std::vector<Frame>(pieces)})};
    } else if (range->slot.offset < 0) {
      int error = 0;
      range->slot = Slot{tier, take_slot(tier, range->bytes, error)};
      if (range->slot.offset < 0 && tiers[tier].addressable) {
        // Slow memory is full: whoever can be away goes to the tier below it.
        placed = false;
        while (range->slot.offset < 0 && ++tier < static_cast<int32_t>(tiers.size()))
          range->slot = Slot{tier, take_slot(tier, range->bytes, error)};
      }
      if (range->slot.offset < 0) {
        tier = std::min(tier, static_cast<int32_t>(tiers.size()) - 1);
        range->crowded_out = crowded_ = true;
        failed_write_ = {error, true, range->bytes, tier};
        write_failed = true;
        return false;
      }
    }
  }
  char* away = pages().detach(range->start, range->bytes, range->writable);
  if (!away) {
    range->stuck = true;
    return false;
  }
  range->writable = true;
  bool log = logging.load(std::memory_order_relaxed);
  if (log) log_event(Event::kLeft, range->serial, range->bytes, clean ? 0 : 1);
  if (clean) {
    range->place = Place::kAway;
    counters.live -= range->bytes;
    counted.released += range->bytes;
    pages().keep(away, range->bytes, range->huge);
    if (placed) settle_slow(range, nullptr);  // else it comes back when it is touched
    return true;
  }
  range->slot_forks = forks_;
  range->copy = ++copies_;
  range->summed = false;
  auto* transfer = new Transfer{range, true, away, range->bytes, range->huge, range->slot, forks_};
  transfer->placed = placed;
  if (placed) counted.placed += range->bytes;
  range->transfer = transfer;
  range->place = Place::kLeaving;
  range->dirty = false;
  counted.leaving += range->bytes;
  enqueue(transfer);
  return true;
}

bool Ranges::discard(Range* range) {
  if (!may_leave(range) || ending_ || !running()) return false;
  char* away = pages().detach(range->start, range->bytes, range->writable);
  if (!away) {
    range->stuck = true;
    return false;
  }
  give_slot(range->slot, range->bytes, range->slot_forks);
  range->writable = range->dirty = true;
  range->place = Place::kAway;
  counters.live -= range->bytes;
  if (logging.load(std::memory_order_relaxed)) log_event(Event::kLeft, range->serial, range->bytes, 0);
  pages().keep(away, range->bytes, range->huge);
  progress();
  return true;
}

int32_t Ranges::add_source(std::shared_ptr<const Source> source) {
  Tier tier;
  tier.source = std::move(source);
  tier.extents = Extents(0);
  tiers.push_back(std::move(tier));
  // What is read from a source is copied to its place as well: while one thread does, the disk has as much to do as before.
  while (running() && static_cast<int>(threads_.size()) < kThreadsOfSources) threads_.emplace_back([this] { work(); });
  return static_cast<int32_t>(tiers.size()) - 1;
}

bool Ranges::refer(Range* range, Slot slot) {
  if (range->foreign || range->liens > 0 || range->pins > 0 || range->lost || is_discarded(range)) return false;
  if (range->place == Place::kLeaving && !call_back(range)) return false;
  if (range->place == Place::kHere && !discard(range)) return false;
  if (range->place != Place::kAway) return false;
  give_slot(range->slot, range->bytes, range->slot_forks);
  range->slot = slot;
  range->slot_forks = forks_;
  range->copy = ++copies_;
  range->dirty = range->summed = false;
  ahead_.enlist(range, true);
  note_write(range);
  return true;
}

void Ranges::transplant(Range* from, Range* to) {
  if (from->place == Place::kSlow) {  // there was no room in fast memory: its slot is the other's from here on
    give_slot(to->slot, to->bytes, to->slot_forks);
    to->slot = from->slot;
    to->slot_forks = from->slot_forks;
    from->slot = Slot{};
    from->place = Place::kAway;
    count_slow(-from->bytes);
    if (!settle_slow(to, nullptr)) throw std::runtime_error("what was made again cannot be mapped in its place");
    return;
  }
  char* away = pages().detach(from->start, from->bytes, from->writable);
  if (!away) throw std::runtime_error("what was made again cannot be moved to its place");
  from->place = Place::kAway;
  from->writable = from->dirty = true;
  give_slot(from->slot, from->bytes, from->slot_forks);
  counters.live -= from->bytes;
  count_live(to->bytes);
  to->writable = to->dirty = true;
  settle(to, away, from->huge && Pages::aligned_alike(from->start, to->start));
}

Range* Ranges::victim(int64_t need, bool at_fault) const {
  if (order == Order::kNothing) return nullptr;
  Range* best = nullptr;
  std::array<double, 3> best_worth{};
  bool best_makeable = false, discards = remakes().discards_victims && !at_fault;
  const Schedule& plan = schedule();
  double far = 1;  // beyond every use that is known
  if (order == Order::kLargestArea)
    for (Range* range : by_age_)
      if (may_leave(range) && plan.knows(range)) far = std::max<double>(far, plan.next_use(range) + 1);
  for (Range* range : by_age_) {
    // Note [Grace]: what faulted last may be what the interrupted instruction is about to use, with others that are still
    // away. If that left again to make room for them, none of it would ever be done: after many faults in a row that gave up
    // what was touched just before, that stays. Operators pin what they use instead.
    if (at_fault && thrashing_ > kMostThrashing && clock - range->last_touch < kGrace) break;
    if (!may_leave(range)) continue;
    std::array<double, 3> worth = worth_of(range, need, far);
    if (best && (best_makeable || !discards) && worth <= best_worth) continue;  // among equals the least recently touched
    // What can be made again goes before all that has to be written.
    bool makeable = discards && remakes().is_makeable(range);
    if (best && !makeable && (best_makeable || worth <= best_worth)) continue;
    best = range;
    best_worth = worth;
    best_makeable = makeable;
    bool enough = order == Order::kOldest || (order == Order::kFirstThatSuffices && worth[0] > 0);
    if (enough && (makeable || !discards)) break;
  }
  return best;
}

// How gladly a range is given up, by its order.
std::array<double, 3> Ranges::worth_of(const Range* range, int64_t need, double far) const {
  const Schedule& plan = schedule();
  double next = plan.knows(range) ? static_cast<double>(plan.next_use(range)) : HUGE_VAL;
  switch (order) {
    case Order::kFurthest:
      return {next};
    case Order::kFurthestNewest:
      return {next, static_cast<double>(range->last_touch)};
    case Order::kFurthestCheapest: {
      // Uses are similar if they are as far away, to a factor of the square root of two.
      double band = std::isinf(next) ? next : std::round(2 * std::log2(std::max(1.0, next)));
      return {band, is_clean(range) ? 1.0 : 0.0, next};
    }
    case Order::kLargest:
      return {static_cast<double>(range->bytes)};
    case Order::kLargestArea:
      return {static_cast<double>(range->bytes) * std::min(next, far)};
    case Order::kFirstThatSuffices:
      return {range->bytes >= need ? 1.0 : 0.0};
    case Order::kCheapest:
    case Order::kCheapestStale: {
      // Where nothing is made again all cost the same, and touches stand for time.
      bool costs = remakes().discards_victims;
      double stale = order == Order::kCheapest ? 1
          : costs                              ? static_cast<double>(std::max<int64_t>(1, now_ns() - range->touched_ns))
                                               : static_cast<double>(clock - range->last_touch + 1);
      return {static_cast<double>(range->bytes) * stale / (costs ? std::max(1.0, remakes().cost_ns(range)) : 1.0)};
    }
    default:
      return {};
  }
}

// Not at a fault: whoever is interrupted may be about to use it, and could not make it.
bool Ranges::give_up(Range* range, bool at_fault) {
  int32_t tier = schedule().tier_of(range);
  if (!at_fault && remakes().discard_victim(range, tier)) return true;
  return leave(range, tier);
}

int64_t Ranges::make_room(int64_t need, bool at_fault) {
  int64_t coming = counted.leaving + pages().kept();
  int64_t budget = counters.budget.load();
  if (budget) coming += std::max<int64_t>(0, budget - counters.reserved.load());
  while (coming < need) {
    Range* range = victim(need - coming, at_fault);
    if (!range) break;
    if (!is_clean(range)) {  // nothing is written for what nobody has asked for
      if (Range* ahead = ahead_.last())
        range = ahead;
      else if (ahead_.any_coming())
        break;  // it leaves when it has come
    }
    int64_t bytes = range->bytes;
    if (at_fault) thrashing_ = clock - range->last_touch < kGrace ? thrashing_ + 1 : 0;
    if (give_up(range, at_fault))
      coming += bytes;
    else if (may_leave(range))
      break;  // the end is near: nothing leaves any more
  }
  return coming;
}

void Ranges::shrink(int64_t excess) {
  for (int64_t coming = counted.leaving; coming < excess;) {
    Range* range = victim(excess - coming, false);
    if (!range) return;
    int64_t bytes = range->bytes;
    if (leave(range, schedule().tier_of(range)))
      coming += bytes;
    else if (may_leave(range))
      return;
  }
}

void Ranges::take_off_file(Range* range) {
  char* room = pages().take_beyond_budget(range->bytes, range->start);
  if (!room) return;
  std::memcpy(room, range->start, range->bytes);
  char* of_file = pages().detach(range->start, range->bytes, range->writable);
  if (!of_file) {
    pages().keep(room, range->bytes, true);
    return;
  }
  range->writable = true;
  range->dirty = true;
  pages().keep(of_file, range->bytes, false);
  settle(range, room, true);
}

bool Ranges::displace(int64_t need) {
  int32_t tier = slow_tier();
  if (tier < 0 || ending_ || !running()) return false;
  Range* best = nullptr;
  for (Range* range : by_age_)
    if (range->place == Place::kHere && range->lent == 0 && !range->stuck && !range->filled && range->bytes >= need &&
        !pages().is_of_file(range->start) && (!best || range->bytes < best->bytes))
      best = range;
  int error = 0;
  Slot slot{tier, best ? take_slot(tier, best->bytes, error) : -1};
  if (slot.offset < 0) return false;
  char* away = pages().detach(best->start, best->bytes, best->writable);
  if (!away) {
    best->stuck = true;
    give_slot(slot, best->bytes, forks_);
    return false;
  }
  best->writable = true;
  if (tiers[tier].move(true, away, best->bytes, slot.offset) != 0) {
    give_slot(slot, best->bytes, forks_);
    settle(best, away, best->huge);
    return false;
  }
  give_slot(best->slot, best->bytes, best->slot_forks);
  best->slot = slot;
  best->slot_forks = forks_;
  if (!settle_slow(best, nullptr)) {
    give_slot(best->slot, best->bytes, forks_);
    best->dirty = true;
    settle(best, away, best->huge);
    return false;
  }
  counters.live -= best->bytes;
  counted.placed += best->bytes;
  pages().keep(away, best->bytes, best->huge);
  return true;
}

void Ranges::fill_lost(Range* range) {
  char* room = pages().take(range->bytes, range->start);
  if (!room) {
    room = pages().take_beyond_budget(range->bytes, range->start);
    if (!room) std::abort();
    counted.beyond += range->bytes;
  }
  std::memset(room, 0xFF, range->bytes);
  count_live(range->bytes);
  note_trouble({range->lost, false, range->bytes, range->slot.tier});
  remakes().forget(range);
  range->filled = range->writable = true;
  settle(range, room, true);
}

void Ranges::lose_slow(Range* range, int code) {
  count_slow(-range->bytes);
  range->place = Place::kAway;
  range->lost = code;
  fill_lost(range);
  give_slot(range->slot, range->bytes, range->slot_forks);
}

void Ranges::unfill(Range* range) {
  char* ones = pages().detach(range->start, range->bytes, range->writable);
  if (!ones) return;  // out of mappings: it keeps them, and is lost
  range->filled = range->dirty = false;
  range->writable = true;
  range->place = Place::kAway;
  counters.live -= range->bytes;
  pages().keep(ones, range->bytes, range->huge);
}

void Ranges::forget_trouble() {
  trouble_ = failed_write_ = Trouble{};
  troubled = false;
  for (Range* range : by_age_) {
    if (!range->lost || range->slot.offset < 0) continue;
    range->lost = 0;
    if (range->filled && range->pins == 0) unfill(range);
  }
  updates().forgive();
}

void Ranges::leave_all() {
  std::vector<Range*> candidates(by_age_.begin(), by_age_.end());
  for (Range* range : candidates)
    if (may_leave(range)) leave(range, schedule().tier_of(range));
}

// ---- transfers ----

void Ranges::work(bool urgent) {
  std::unique_lock<std::mutex> guard(pages().mutex);
  auto has_work = [&] {
    return urgent ? !reads_.empty() && reads_.front()->awaited : !reads_.empty() || !writes_.empty();
  };
  for (;;) {
    queued_.wait(guard, [&] { return !forking_ && (stopping_ || has_work()); });
    if (!has_work()) return;                          // stopping, and nothing left to do
    auto& queue = reads_.empty() ? writes_ : reads_;  // reads first: they may be waited for
    Transfer* transfer = queue.front();
    int64_t most = transfer->slot.frames ? kFrame : kTransferChunk;
    int64_t at = transfer->issued, n = std::min(most, transfer->bytes - at);
    transfer->issued += n;
    ++transfer->pending;
    if (transfer->issued == transfer->bytes) queue.pop_front();
    bool skip = transfer->error != 0 || transfer->cancelled || transfer->recalled;
    int error = skip ? 0 : move_piece(transfer, at, n, guard);
    if (error && !transfer->error) transfer->error = error;
    if (--transfer->pending == 0 && transfer->issued == transfer->bytes) finish(transfer, guard);
  }
}

int Ranges::move_piece(Transfer* transfer, int64_t at, int64_t n, std::unique_lock<std::mutex>& guard) {
  if (transfer->write && at == 0 && coders.size() > 1 && logging.load(std::memory_order_relaxed)) {
    sample(transfer, guard);
    if (transfer->cancelled || transfer->recalled) return 0;
  }
  if (transfer->slot.frames)
    return transfer->write ? write_frame(transfer, at, n, guard) : read_frame(transfer, at, n, guard);
  double share = static_cast<double>(n) / static_cast<double>(transfer->bytes);
  return move_counted(transfer, transfer->data + at, n, transfer->slot.offset + at, share, guard);
}

int Ranges::move_counted(
    Transfer* transfer, char* data, int64_t n, int64_t offset, double share, std::unique_lock<std::mutex>& guard) {
  Tier& tier = tiers[transfer->slot.tier];
  bool write = transfer->write;
  int64_t paced_until = 0;
  if (tier.addressable)
    paced_until = tier.link.end_of(
        tier.rates, write, n, offset == transfer->slot.offset && !transfer->joins, transfer->awaited);
  if (!tier.call) ++transferring_;  // see Note [Fork]
  auto begun = meter.begin(write);
  guard.unlock();
  int error = tier.move(write, data, n, offset);
  if (tier.rates.charges() && !error) pass_until(paced_until);
  guard.lock();
  if (!tier.call) --transferring_;
  int64_t done = error ? 0 : n;
  meter.end(write, begun, done, error ? 0 : share);
  (write ? counted.written : counted.read) += done;  // cancelled or not: the tier has had the traffic
  (write ? tier.written_bytes : tier.read_bytes) += done;
  idle_.notify_all();
  return error;
}

namespace {

// See Note [Rounded].
bool holds_bound(const Coder& coder, const char* data, const char* blob, int64_t blob_bytes, int64_t n) {
  char* back = decoded_again.get(kFrame);
  return back && coder.decode(blob, blob_bytes, back, n) == 0 && is_near(data, back, n, coder.most_error);
}

}  // namespace

// See Note [Encoded].
int Ranges::write_frame(Transfer* transfer, int64_t at, int64_t n, std::unique_lock<std::mutex>& guard) {
  std::shared_ptr<Frames> frames = transfer->slot.frames;
  Coder coder = coders[frames->coder];
  char* data = transfer->data + at;
  int64_t used = transfer->range ? transfer->range->used_bytes : transfer->bytes;
  ++transfer->reading;
  guard.unlock();
  char* buffer = blobs.get(kFrame);
  // What lies behind the tensor in its last page is another's, or nothing: it must not count as a value.
  if (!coder.exact && used < at + n) std::memset(data + std::max<int64_t>(used - at, 0), 0, std::min(n, at + n - used));
  int64_t blob = buffer ? std::max<int64_t>(coder.encode(data, n, buffer, n - kPage), 0) : 0;
  if (blob && !coder.exact && !holds_bound(coder, data, buffer, blob, n)) blob = 0;
  int64_t stored = blob ? round_to_page(blob) : n;
  if (blob) std::memset(buffer + blob, 0, stored - blob);  // what it held before is another tensor's
  guard.lock();
  --transfer->reading;
  (blob ? counted.encoded : counted.unencoded) += n;
  if (transfer->cancelled || transfer->recalled) return 0;
  int error = 0;
  Frame frame{take_slot(transfer->slot.tier, stored, error), stored, blob};
  if (frame.offset < 0) return error;
  frames->frames[at / kFrame] = frame;
  double share = static_cast<double>(n) / static_cast<double>(transfer->bytes);
  return move_counted(transfer, blob ? buffer : data, stored, frame.offset, share, guard);
}

int Ranges::read_frame(Transfer* transfer, int64_t at, int64_t n, std::unique_lock<std::mutex>& guard) {
  Frame frame = transfer->slot.frames->frames[at / kFrame];
  Coder coder = coders[transfer->slot.frames->coder];
  char* buffer = frame.blob ? blobs.get(kFrame) : transfer->data + at;
  if (!buffer) return ENOMEM;
  double share = static_cast<double>(n) / static_cast<double>(transfer->bytes);
  int error = move_counted(transfer, buffer, frame.stored, frame.offset, share, guard);
  if (error || !frame.blob || transfer->cancelled) return error;
  char* data = transfer->data + at;
  guard.unlock();
  bool whole = coder.decode(buffer, frame.blob, data, n) == 0;
  guard.lock();
  counted.decoded += n;
  return whole ? 0 : kCorrupted;
}

int Ranges::read_slot(const Tier& tier, const Coder& coder, const Slot& slot, char* room, int64_t bytes) {
  if (!slot.frames) return tier.move(false, room, bytes, slot.offset);
  for (int64_t at = 0; at < bytes; at += kFrame) {
    int64_t n = std::min(kFrame, bytes - at);
    const Frame& frame = slot.frames->frames[at / kFrame];
    char* buffer = frame.blob ? blobs.get(kFrame) : room + at;
    if (!buffer) return ENOMEM;
    if (int error = tier.move(false, buffer, frame.stored, frame.offset)) return error;
    if (frame.blob && coder.decode(buffer, frame.blob, room + at, n) != 0) return kCorrupted;
  }
  return 0;
}

void Ranges::sample(Transfer* transfer, std::unique_lock<std::mutex>& guard) {
  Range* range = transfer->range;
  if (!range || samples.count(range->serial)) return;
  int64_t serial = range->serial, all = transfer->bytes / kPage, some = std::min(kSampledPages, all);
  std::vector<Coder> tried(coders.begin(), coders.end());
  bool rounds = range->floats && !range->mixed && !range->foreign;
  ++transfer->reading;
  guard.unlock();
  std::vector<double> shares(tried.size(), 1.0);
  int64_t bytes = some * kPage;
  if (char* buffer = blobs.get(kFrame)) {
    for (int64_t k = 0; k < some; ++k)
      std::memcpy(buffer + k * kPage, transfer->data + (all * k / some) * kPage, kPage);
    for (size_t coder = 1; coder < tried.size(); ++coder) {
      if (!tried[coder].exact && !rounds) continue;
      int64_t blob = tried[coder].encode(buffer, bytes, buffer + bytes, bytes);
      if (blob > 0 && !tried[coder].exact && !holds_bound(tried[coder], buffer, buffer + bytes, blob, bytes)) continue;
      if (blob >= 0) shares[coder] = static_cast<double>(blob) / static_cast<double>(bytes);
    }
  }
  guard.lock();
  --transfer->reading;
  samples.emplace(serial, std::move(shares));
}

void Ranges::finish(Transfer* transfer, std::unique_lock<std::mutex>& guard) {
  bool exact = !transfer->slot.frames || coders[transfer->slot.frames->coder].exact;
  if (verify && exact && !transfer->error && !transfer->cancelled && !transfer->recalled) {
    transfer->summing = true;
    ++transferring_;  // a fork waits for this too
    guard.unlock();
    uint64_t sum = checksum_of(transfer->data, transfer->bytes);
    guard.lock();
    --transferring_;
    idle_.notify_all();
    if (Range* range = transfer->range) {
      if (transfer->write) {
        range->checksum = sum;
        range->summed = true;
      } else if (range->summed && sum != range->checksum) {
        transfer->error = kCorrupted;
      }
    }
  }
  int64_t bytes = transfer->bytes;
  if (transfer->placed && !transfer->error && !transfer->cancelled && !transfer->recalled) {
    // Its page tables are filled here, and moved to the range as a whole.
    transfer->summing = true;
    ++transferring_;
    int fd = tiers[transfer->slot.tier].fds[0];
    guard.unlock();
    void* got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, transfer->slot.offset);
    guard.lock();
    --transferring_;
    idle_.notify_all();
    if (got != MAP_FAILED) transfer->window = static_cast<char*>(got);
  }
  if (transfer->window && (transfer->cancelled || transfer->recalled)) munmap(transfer->window, bytes);
  if (transfer->cancelled) {
    if (transfer->data) {  // else it was called back
      pages().keep(transfer->data, bytes, transfer->huge);
      (transfer->write ? counted.leaving : counted.arriving) -= bytes;
    }
    give_slot(transfer->slot, bytes, transfer->forks);
  } else if (transfer->recalled) {
    transfer->summing = false;
    transfer->pending = 0;
    Range* range = transfer->range;
    call_back(range);
    give_slot(transfer->slot, bytes, transfer->forks);
  } else if (transfer->write) {
    finish_write(transfer);
  } else {
    finish_read(transfer);
  }
  if (Tier& tier = tiers[transfer->slot.tier]; tier.addressable) tier.link.end(transfer->write);
  delete transfer;
  --under_way_;
  progress();
}

void Ranges::finish_write(Transfer* transfer) {
  Range* range = transfer->range;
  range->transfer = nullptr;
  counted.leaving -= transfer->bytes;
  if (transfer->error) {
    // R4: a failed write keeps the value in memory, and says so.
    failed_write_ = {transfer->error, true, transfer->bytes, transfer->slot.tier};
    write_failed = true;
    // A frame finds out only now that its tier is full.
    bool full = transfer->error == ENOSPC && range->slot.frames;
    give_slot(range->slot, range->bytes, range->slot_forks);
    range->dirty = true;
    (full ? range->crowded_out : range->stuck) = true;
    crowded_ = crowded_ || full;
    settle(range, transfer->data, transfer->huge);
    return;
  }
  range->place = Place::kAway;
  counters.live -= range->bytes;
  pages().keep(transfer->data, transfer->bytes, transfer->huge);
  if (!transfer->window) return;
  if (!settle_slow(range, transfer->window)) munmap(transfer->window, transfer->bytes);  // it comes back when touched
}

void Ranges::finish_read(Transfer* transfer) {
  Range* range = transfer->range;
  range->transfer = nullptr;
  counted.arriving -= transfer->bytes;
  if (transfer->error) {
    if (transfer->awaited) {
      note_trouble({transfer->error, false, transfer->bytes, transfer->slot.tier});
      range->lost = transfer->error;
    }
    range->place = Place::kAway;
    counters.live -= range->bytes;
    pages().keep(transfer->data, transfer->bytes, transfer->huge);
    return;
  }
  // What is in a checkpoint is not written a second time, whatever a plan expects of it.
  if ((range->tracked || tiers[range->slot.tier].source) && mprotect(transfer->data, transfer->bytes, PROT_READ) == 0) {
    range->writable = false;
    range->dirty = false;
  } else {
    range->writable = true;
    range->dirty = true;
    give_slot(range->slot, range->bytes, range->slot_forks);
  }
  settle(range, transfer->data, transfer->huge);
  range->unused = true;
  if (logging.load(std::memory_order_relaxed)) log_event(Event::kCameBack, range->serial, range->bytes);
}

// ---- the whole ----

int32_t Ranges::start(std::vector<Tier> below, int threads) {
  std::lock_guard<std::mutex> guard(pages().mutex);
  auto first = static_cast<int32_t>(tiers.size());
  for (Tier& tier : below) tiers.push_back(std::move(tier));
  home_tier = first;
  ending_ = stopping_ = false;
  counted.written = counted.read = counted.released = counted.faults = counted.write_faults = 0;
  counted.touches = counted.waits = counted.wait_ns = counted.beyond = 0;
  counted.charged_ns = counted.in_place = counted.placed = counted.fetched = 0;
  counted.born_slow = counted.compacted = counted.excerpted = 0;
  counted.encoded = counted.decoded = counted.unencoded = 0;
  samples.clear();
  counted.peak_slow = counted.slow;
  remakes().counted = {};
  meter.forget();
  forget_trouble();
  unstick();
  while (static_cast<int>(threads_.size()) < threads) threads_.emplace_back([this] { work(); });
  // See Note [Urgent].
  bool far = std::any_of(tiers.begin(), tiers.end(), [](const Tier& tier) { return tier.engine; });
  if (far && !urgent_mover_) threads_.emplace_back([this] { work(true); });
  urgent_mover_ = urgent_mover_ || far;
  return first;
}

void Ranges::unstick() {
  write_failed = false;
  for (Range* range : by_age_) range->stuck = range->crowded_out = false;
}

int Ranges::stop_waiting(bool bring_back) {
  int error = 0;
  std::unique_lock<std::mutex> guard(pages().mutex);
  ending_ = true;  // first: what came back must not leave again while the rest is read
  Trouble told = trouble_, kept = failed_write_;
  forget_trouble();  // what was lost is read once more
  if (told.code) note_trouble(told);
  failed_write_ = kept;
  std::vector<std::pair<Range*, int64_t>> all;
  for (Range* range : by_age_) all.emplace_back(range, range->serial);
  for (auto [range, serial] : all) {
    if (range->serial != serial || range->place == Place::kHere) continue;
    // What leaves is called back at no price; what is away is read where somebody may ask for it.
    if (range->place == Place::kLeaving || bring_back) bring_waiting(range, guard, false);
    if (range->serial != serial) continue;
    if (range->place == Place::kSlow) {
      char* room = pages().take_beyond_budget(range->bytes, range->start);
      int failed = room ? move_here(range, room) : ENOMEM;
      if (failed && !error) error = failed;
    }
    if (range->serial == serial && range->lost && !range->given_up && !error) error = range->lost;
  }
  stopping_ = true;
  queued_.notify_all();
  guard.unlock();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  urgent_mover_ = false;
  guard.lock();
  for (Range* range : by_age_) {
    range->leave_asked = false;
    range->slot = Slot{};
    range->dirty = true;
    if (range->place == Place::kAway && !range->lost) range->lost = kLost;
    range->given_up = range->lost != 0;
    if (range->place == Place::kHere && !range->writable) make_writable(range);
    if (range->place == Place::kHere && pages().is_of_file(range->start)) take_off_file(range);
  }
  pages().use_file(-1);
  ahead_.forget_all();
  tiers.clear();
  coders.resize(1);
  buried_.clear();
  for (const Child& child : children_) close(child.pipe);
  children_.clear();
  return error;
}

// Note [Fork]: a direct read that is under way while the process forks may lose its bytes to copy-on-write (open(2)), so a
// fork waits for the chunks of files in flight. A medium in Python is not waited for: its thread may need the GIL that we
// hold.
void Ranges::pause_for_fork() {
  updates().run_all();  // a child has nobody who could
  remakes().remake_all();
  std::unique_lock<std::mutex> guard(pages().mutex);
  // A child shares no memory with its parent: pages of a file end their way, and then stay in the parent's alone.
  ++waiting_;
  changed.wait(guard, [&] {
    return std::none_of(by_age_.begin(), by_age_.end(), [](const Range* range) {
      return range->transfer && range->transfer->data && pages().is_of_file(range->transfer->data);
    });
  });
  --waiting_;
  forking_ = true;
  idle_.wait(guard, [&] { return transferring_ == 0; });
  for (Range* range : by_age_)
    if (range->place == Place::kHere && pages().is_of_file(range->start)) take_off_file(range);
  for (Range* range : by_age_)  // see Note [Slow]
    if (range->place == Place::kSlow) protect(range);
  if (running() && pipe2(fork_pipe_, O_CLOEXEC | O_NONBLOCK) != 0) fork_pipe_[0] = fork_pipe_[1] = -1;
}

void Ranges::resume_after_fork() {
  std::lock_guard<std::mutex> guard(pages().mutex);
  if (fork_pipe_[0] >= 0) {
    close(fork_pipe_[1]);
    children_.push_back({fork_pipe_[0], ++forks_});
    fork_pipe_[0] = -1;
  }
  forking_ = false;
  queued_.notify_all();
}

// A child has none of our threads. Its conditions are made anew: glibc would wait for their waiters, who are not here, to
// leave. What was on its way is where it was: pages that leave are still ours, and what arrives is on its tier.
void Ranges::abandon_in_child() {
  std::lock_guard<std::mutex> guard(pages().mutex);
  if (fork_pipe_[0] >= 0) close(fork_pipe_[0]);  // the other end stays open as long as this process lives
  fork_pipe_[0] = -1;
  forking_ = false;
  waiting_ = 0;
  for (std::condition_variable* condition : {&changed, &queued_, &idle_}) new (condition) std::condition_variable;
  for (auto& thread : threads_) thread.detach();
  threads_.clear();
  urgent_mover_ = false;
  reads_.clear();
  writes_.clear();
  transferring_ = 0;
  schedule().abandon_step();
  schedule().clear();
  remakes().abandon_in_child();
  updates().abandon_in_child();
  pages().use_file(-1);  // it is the parent's
  ahead_.forget_all();
  for (const Child& child : children_) close(child.pipe);
  children_.clear();
  buried_.clear();
  inherited_ = static_cast<int32_t>(tiers.size());
  for (Range* range : by_age_) {
    range->leave_asked = false;
    if (range->place == Place::kSlow) {
      if (mprotect(range->start, range->bytes, PROT_NONE) != 0) std::abort();
      range->place = Place::kAway;
    }
    if (is_discarded(range)) range->lost = kNotRemade;
    Transfer* transfer = range->transfer;
    if (!transfer) continue;
    range->transfer = nullptr;
    if (transfer->write) {
      range->slot = Slot{range->slot.tier, -1};
      range->writable = range->dirty = true;
      settle(range, transfer->data, transfer->huge);
    } else {
      range->place = Place::kAway;
      counters.live -= range->bytes;
      pages().keep(transfer->data, range->bytes, transfer->huge);
    }
  }
  counted.leaving = counted.arriving = under_way_ = counted.slow = 0;
}

bool Ranges::bring_in_child_waiting(Range* range, std::unique_lock<std::mutex>& guard) {
  int64_t serial = range->serial;
  if (range->place == Place::kHere) return true;
  if (range->lost || is_discarded(range)) return false;
  if (range->slot.tier >= static_cast<int32_t>(tiers.size())) return false;
  char* room = pages().take_beyond_budget(range->bytes, range->start);
  if (!room) return false;
  int64_t bytes = range->bytes;
  Slot slot = range->slot;
  const Tier& tier = tiers[slot.tier];
  const Coder& coder = coders[slot.frames ? slot.frames->coder : 0];
  guard.unlock();  // a medium in Python takes the GIL, and another thread of the child may have it
  bool whole = read_slot(tier, coder, slot, room, bytes) == 0;
  bool same = whole && (!range->summed || checksum_of(room, bytes) == range->checksum);
  guard.lock();
  bool wanted = range->serial == serial && range->place != Place::kHere;
  if (!wanted || !same) {
    pages().keep(room, bytes, true);
    return range->serial == serial && range->place == Place::kHere;
  }
  count_live(bytes);
  range->writable = range->dirty = true;
  settle(range, room, true);
  return true;
}

}  // namespace lowtide
