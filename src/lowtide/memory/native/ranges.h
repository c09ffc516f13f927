// All ranges, and the rules by which their pages leave and return. Everything here is guarded by `pages().mutex` unless it
// says otherwise; the names of members that wait end in `_waiting` and take the lock that they give up meanwhile.
//
// Note [Who may wait]: operators (touch), faults and allocations wait for transfers, without the GIL, on `changed`. The
// threads that transfer never wait for any of them. An operator pins its operands and what it allocates until it ends, so
// nothing it uses can leave; if what is pinned alone passes the budget, waiting would never end: the allocation is refused,
// an operand stays away and the operator's first allocation is refused for it. Only a fault cannot be refused: its range
// comes back beyond the budget, which is counted and raised as an error as soon as that is possible (R2, R3). In a step
// that is sounded, see Note [Pages of a file], nothing is refused before its end.
//
// Note [Leaving]: a range's pages are detached before they are written, so the bytes that go out are those of one instant
// and nobody can change them meanwhile. Whoever touches the range before the write has landed gets the pages back at
// once; the transfer is cancelled and its slot is worth nothing (R1, R4).
//
// Note [Clean]: a range that came back is mapped read-only, unless its plan says that it will not leave again. The first write faults and marks it;
// operators whose schema says that they write mark it before. While it is clean its slot holds the same bytes, and leaving
// costs nothing.
//
// Note [Children]: a forked child serves its faults from the slots that existed at the fork, through the descriptors it
// inherited. While it lives, those slots are neither written again nor given to others. It holds one end of a pipe; when
// that is closed, the child is gone. The child never writes to a tier of its parent's; it may start tiers of its own.
//
// Note [Slow]: of a tier that is addressable a range may have the pages at its own addresses. Its slot is then the range:
// whoever writes the one writes the other, and leaving or returning copies pages on the movers' threads. On the way out the
// range's pages are detached, and who touches it waits until it has landed, for the plan counts on its fast memory. On the
// way back it has no access; before, nobody may use it. Pages of a file are shared with children, who must not see what
// changes after the fork: they serve themselves from the slots as they were, and the parent writes to slots of its own.
//
// Note [Lost]: a read that fails while somebody waits for it is raised, and its slot stays: as soon as the error has been
// told, the next touch reads again. Whoever cannot be refused (a fault) gets pages full of ones meanwhile, which are NaN
// in every floating type; they never leave, and go when the error has been told. A read ahead of its use that fails is
// nobody's concern: its use reads again.
//
// Note [Urgent]: a server is far, and a piece takes long. Where there is one, a mover of its own serves nothing but reads that somebody
// waits for, on a connection of its own: neither reads ahead nor writes hold them up (Fastswap's queues).
#pragma once
#include "excerpt.h"
#include "meter.h"
#include "mover.h"
#include "pages.h"
#include "read_ahead.h"
#include "tier.h"

#include <array>
#include <condition_variable>
#include <deque>
#include <memory>
#include <random>
#include <string>

namespace lowtide {

class Schedule;

// Who is given up first when memory runs out: the same numbers as in bindings.py, explained in core/order.py.
enum class Order : int32_t {
  kNothing = 0,
  kOldest = 1,
  kFurthest = 2,
  kFurthestNewest = 3,
  kFurthestCheapest = 4,
  kLargest = 5,
  kLargestArea = 6,
  kFirstThatSuffices = 7,
  kCheapest = 8,
  kCheapestStale = 9,
};

// One range's bytes on their way. It may outlive its range: then they go nowhere, and only its pages and slot are left.
struct Transfer {
  Range* range;
  bool write;
  char* data;  // where the pages are
  int64_t bytes;
  bool huge;  // see Note [Huge pages]
  Slot slot;
  int64_t forks = 0;  // how many there had been when the slot was last written, or is
  bool placed = false;     // its range is to have the slot's pages at its addresses
  char* window = nullptr;  // these pages, until it has
  bool joins = false;      // the run of pages of the transfer before it
  bool cancelled = false;  // its range is gone, or has its pages back
  bool recalled = false;   // its range wants the pages back once nobody reads them
  bool summing = false;    // a checksum is being made of its pages
  int reading = 0;         // movers that read its pages at their addresses
  bool awaited = false;    // somebody cannot go on without it
  int64_t issued = 0;
  int pending = 0;
  int error = 0;
};

struct RangeCounters {
  int64_t leaving = 0, arriving = 0;  // bytes in flight
  int64_t written = 0, read = 0;        // of the tiers, so of what is encoded the blobs
  int64_t encoded = 0, decoded = 0;     // bytes that passed through a codec
  int64_t unencoded = 0;                // bytes that were to, and went as they were: see Note [Encoded]
  int64_t released = 0;  // bytes given up without a write: clean
  int64_t faults = 0, write_faults = 0, touches = 0;
  int64_t waits = 0, wait_ns = 0;
  int64_t beyond = 0;  // bytes that came back beyond the budget
  int64_t slow = 0, peak_slow = 0;  // bytes in slow memory, in place
  int64_t charged_ns = 0;           // that operators took longer for them
  int64_t in_place = 0;             // operators that found operands there
  int64_t placed = 0, fetched = 0;  // bytes that migrated out to be touched in place, and back
  int64_t born_slow = 0;            // bytes that were allocated there
  int64_t compacted = 0;            // bytes that moved within it, so that what is free is one piece
  int64_t excerpted = 0;            // bytes that were read for one operator only; see Note [Excerpts]
};

// An error that cannot be thrown where it happens (in an observer, in a fault): the next allocation or the step's end does.
struct Trouble {
  int code = 0;  // an errno, or one of tier.h's
  bool write = false;
  int64_t bytes = 0;
  int32_t tier = 0;
};

class Ranges {
 public:
  std::condition_variable changed;  // a transfer ended, or room came free
  RangeCounters counted;
  Meter meter;
  std::deque<Tier> tiers;  // the movers hold references to them
  std::deque<Coder> coders = {Coder{}};  // the first stands for none
  bool verify = false;
  int64_t least_bytes = kLarge;  // smaller ranges never leave
  bool announcing = true;        // operators bring their operands back before they run; else faults do
  int64_t clock = 0;             // counts touches
  int64_t write_clock = 0;       // counts operators, and writes outside of them
  Order order = Order::kOldest;
  int32_t home_tier = 0;         // where ranges leave to that no plan sends elsewhere
  int64_t touched_bytes = 0;     // a clock; see Note [Charging]

  // ---- blocks come and go ----

  Range* add(char* start, int64_t bytes, int64_t serial);
  // A block in slow memory, or nullptr: there is none, or it is full.
  Range* add_slow(int64_t bytes, int32_t tier, int64_t serial);
  // Forget a range whose owner frees it; its pages go to those that are kept.
  void remove(Range* range);
  // Take over memory of another allocator: the whole pages inside it may leave from here on.
  Range* adopt(char* data, int64_t bytes);
  // Its owner frees it: its pages are mapped again, with whatever in them.
  void disown(Range* range);

  Range* of_data(const void* data) const {
    auto found = by_data_.find(data);
    return found == by_data_.end() ? nullptr : found->second;
  }
  // The range that an address lies in, or nullptr.
  Range* at(const void* address) const;
  Range* of_serial(int64_t serial) const {
    auto found = by_serial_.find(serial);
    return found == by_serial_.end() ? nullptr : found->second;
  }

  // ---- use ----

  // Note a use: the range is the most recently touched; what is written is dirty from here on.
  void touch(Range* range, bool writes);
  void pin(Range* range) {
    ++range->pins;
  }
  void unpin(Range* range);
  // Have a range's pages at its addresses. False: they cannot be read.
  bool bring_waiting(
      Range* range, std::unique_lock<std::mutex>& guard, bool with_gil, int64_t* waited_ns = nullptr);
  // Whether all ranges there are could be in fast memory.
  bool all_fits() const {
    int64_t budget = counters.budget.load(), total = 0;
    for (const Range* range : by_age_) total += range->bytes;
    return !budget || total <= budget;
  }
  // Whether a part of a range can be read without the whole.
  bool has_excerpts(const Range* range) const;
  // Have some pages of a range that is away at their addresses. False: not now, or they cannot be read.
  bool excerpt_waiting(Excerpt& excerpt, std::unique_lock<std::mutex>& guard);
  // Its operator has ended.
  void end_excerpt(const Excerpt& excerpt);
  // Start to bring back what is away, if there is room now without giving anything up.
  bool prefetch(Range* range);
  // Likewise, in the room of clean ranges that were used long ago if there is no other; see Note [Reading ahead].
  bool read_ahead(Range* range);
  // Read ahead of what has just been used.
  void read_on() {
    ahead_.go_on();
  }
  // The next to be given up, where the least recently used is.
  void make_oldest(Range* range) {
    by_age_.splice(by_age_.begin(), by_age_, range->by_age);
  }
  bool make_writable(Range* range);
  // Have slow memory's pages at the addresses of a range that is away there: from `window`, or as they are in its slot.
  bool settle_slow(Range* range, char* window);
  // Start to bring a range from slow to fast memory, if there is room now and nobody uses it.
  bool fetch_slow(Range* range);
  // Go on once a range that migrates to slow memory is there.
  void landing_waiting(int64_t serial, std::unique_lock<std::mutex>& guard);
  // Bring a range from slow to fast memory before it is used, as long as room for it is on its way.
  void fetch_slow_waiting(int64_t serial, std::unique_lock<std::mutex>& guard);
  // Whether its pages are at its addresses.
  static bool is_reachable(const Range* range) {
    return range->place == Place::kHere || range->place == Place::kSlow;
  }
  // The first tier that operators reach, or -1.
  int32_t slow_tier() const {
    for (size_t i = inherited_; i < tiers.size(); ++i)
      if (tiers[i].addressable) return static_cast<int32_t>(i);
    return -1;
  }
  // Have writes fault that nobody announces; not those of borrowers: the kernel may write for them, and would fail.
  void protect(Range* range);
  // The range changes: by the operator with that number, or by nobody who is known.
  void note_write(Range* range, int64_t stamp);
  void note_write(Range* range) {
    note_write(range, ++write_clock);
  }
  // Go on once something changed; whoever holds the GIL may give it up meanwhile.
  void change_waiting(std::unique_lock<std::mutex>& guard, bool with_gil);

  // ---- leaving ----

  // Give a range's pages up without a copy. False: they cannot be moved.
  bool discard(Range* range);
  // Have a range's bytes be those of a source, where they stay until it is touched. False: not now.
  bool refer(Range* range, Slot slot);
  // Returns the number of the tier that a source is from here on.
  int32_t add_source(std::shared_ptr<const Source> source);
  // Give the pages of one range to another, which has none; its owner frees the first one next.
  void transplant(Range* from, Range* to);
  // The last lien on a range is gone whose owner has freed it.
  void let_go(Range* range);
  static bool is_discarded(const Range* range);

  // Start to give a range's pages up; false if that is not possible now. `placed`: operators touch it in place there.
  // `coder`: the codec that its bytes pass through (0: none).
  bool leave(Range* range, int32_t tier, bool placed = false, int32_t coder = 0);
  // Free `need` bytes at once by what operators use now, which they go on to use in slow memory. False: there is none.
  bool displace(int64_t need);
  // Give a lost range pages all the same: see Note [Lost].
  void fill_lost(Range* range);
  // A range's bytes in slow memory are gone: see Note [Lost].
  void lose_slow(Range* range, int code);
  // Start to free `need` bytes, the best first; returns what is free or on its way.
  // `at_fault`: see Note [Grace].
  int64_t make_room(int64_t need, bool at_fault = false);
  // Start to free `excess` bytes of fast memory, whatever is kept.
  void shrink(int64_t excess);
  // Everything that may leave, leaves: for tests.
  void leave_all();
  // Bytes in fast memory, or of a file, that could leave or are on their way.
  int64_t movable_bytes() const {
    int64_t total = 0;
    for (const Range* range : by_age_)
      if (pays_fast(range) && range->pins == 0 && (range->place != Place::kHere || is_loose(range)))
        total += range->bytes;
    return total;
  }
  bool may_leave(const Range* range) const {
    // Pages of a file leave by themselves, and make no room.
    return is_loose(range) && !pages().is_of_file(range->start);
  }

  bool is_clean(const Range* range) const {
    return !range->dirty && range->slot.offset >= 0;
  }

  // ---- the whole ----

  // Let ranges leave to these tiers, besides those there are. Returns the number of the first.
  int32_t start(std::vector<Tier> below, int threads);
  bool running() const {
    return !threads_.empty();
  }
  // Bring everything back and end the threads. Returns the first error: what could not be read is lost.
  int stop_waiting(bool bring_back);
  // Forget which ranges cannot leave: a new tier may take them.
  void unstick();
  void pause_for_fork();
  void resume_after_fork();
  void abandon_in_child();
  // Give slots back that only children needed who are gone.
  void bury_children();
  // Whether a medium or a codec is written in Python: whoever waits for it must not hold the GIL.
  bool needs_gil() const {
    return std::any_of(tiers.begin(), tiers.end(), [](const Tier& tier) { return tier.call != nullptr; }) ||
        std::any_of(coders.begin(), coders.end(), [](const Coder& coder) { return coder.in_python; });
  }

  // Whether there is trouble that the next allocation has to raise: a read that failed, or memory beyond the budget.
  std::atomic<bool> troubled{false};
  // Whether a write has failed, or a tier was full, since the tiers began.
  std::atomic<bool> write_failed{false};
  const Trouble& trouble() const {
    return trouble_;
  }
  // The last write that failed: its bytes stay in memory (R4).
  const Trouble& failed_write() const {
    return failed_write_;
  }
  // The trouble has been told: what was lost may be read again.
  void forget_trouble();
  void note_trouble(const Trouble& trouble);
  void progress();
  uint64_t epoch() const {
    return epoch_;
  }
  // Wait until no transfer is under way, those that were called back or freed among them. Takes the lock itself.
  void idle_waiting();
  // Wait until something changed since `epoch`. False: nothing is under way that could. Takes the lock itself.
  bool progress_waiting(uint64_t epoch);
  int64_t count() const {
    return static_cast<int64_t>(by_serial_.size());
  }
  // What codecs would leave of ranges that left while the log was on: shares by serial, one for each coder.
  std::unordered_map<int64_t, std::vector<double>> samples;
  template <typename Visit>
  void each(Visit visit) {
    for (Range* range : by_age_) visit(range);
  }

 private:
  bool is_loose(const Range* range) const {
    // Of another allocator's block only the whole pages are ours: a little less than it.
    int64_t least = range->foreign ? least_bytes / 2 : least_bytes;
    return range->place == Place::kHere && range->pins == 0 && !range->stuck && !range->crowded_out &&
        range->bytes >= least && !range->filled;
  }
  // Have a range's bytes in fast memory that are in pages of a file, whatever the budget says.
  void take_off_file(Range* range);
  void unfill(Range* range);
  void finish(Transfer* transfer, std::unique_lock<std::mutex>& guard);
  // Move one piece of a transfer, as it is or as a frame. Returns 0, an errno or one of tier.h's codes.
  int move_piece(Transfer* transfer, int64_t at, int64_t n, std::unique_lock<std::mutex>& guard);
  int write_frame(Transfer* transfer, int64_t at, int64_t n, std::unique_lock<std::mutex>& guard);
  int read_frame(Transfer* transfer, int64_t at, int64_t n, std::unique_lock<std::mutex>& guard);
  // Move whole pages to or from a tier, and count them.
  int move_counted(
      Transfer* transfer, char* data, int64_t n, int64_t offset, double share, std::unique_lock<std::mutex>& guard);
  // Fill `room` from a slot, on this thread.
  static int read_slot(const Tier& tier, const Coder& coder, const Slot& slot, char* room, int64_t bytes);
  // See what codecs would leave of a range that leaves, from some of its pages.
  void sample(Transfer* transfer, std::unique_lock<std::mutex>& guard);
  void finish_write(Transfer* transfer);
  void finish_read(Transfer* transfer);
  // Give a leaving range its pages back. False: somebody still reads them; they come back when that ends.
  bool call_back(Range* range);
  // Have pages at its addresses; `huge`: see Note [Huge pages].
  void settle(Range* range, char* pages, bool huge);
  bool own_slot(Range* range);
  // Copy a range from slow memory into pages, on this thread. An errno: it is where it was.
  int move_here(Range* range, char* room);
  // Whether nobody says what is used next, and what is away may be read before it is.
  bool reads_ahead() const;
  static bool pays_fast(const Range* range) {
    return range->place != Place::kAway && range->place != Place::kSlow;
  }
  void count_slow(int64_t bytes) {
    counted.slow += bytes;
    counted.peak_slow = std::max(counted.peak_slow, counted.slow);
  }
  // In a forked child, which has no threads: bring a range back on this one.
  bool bring_in_child_waiting(Range* range, std::unique_lock<std::mutex>& guard);
  void forget(Range* range);
  void begin_read(Range* range, char* pages, bool urgent);
  void hurry(Transfer* transfer);
  void enqueue(Transfer* transfer);
  // An offset in a tier, or -1: it is full, for the reason that `error` says. Slow memory in pieces is put together first.
  int64_t take_slot(int32_t tier, int64_t bytes, int& error);
  void compact(int32_t tier);
  bool slide(Range* range);
  void give_slot(Slot& slot, int64_t bytes, int64_t forks);
  void give_extent(const Slot& slot, int64_t bytes);
  bool is_shared(int64_t forks);
  void keep_pages(char* pages, int64_t bytes, bool writable);
  Range* victim(int64_t need, bool at_fault) const;
  // Start to give a victim's pages up, without a copy where victims are discarded. False: that is not possible now.
  bool give_up(Range* range, bool at_fault);
  std::array<double, 3> worth_of(const Range* range, int64_t need, double far) const;
  // A mover's life; `urgent`: it moves nothing but what somebody waits for.
  void work(bool urgent = false);

  ReadAhead ahead_;
  std::map<const char*, Range*> by_start_;
  std::unordered_map<const void*, Range*> by_data_;
  std::unordered_map<int64_t, Range*> by_serial_;
  std::list<Range*> by_age_;
  std::vector<std::unique_ptr<Range>> made_;
  std::vector<Range*> unused_;
  std::deque<Transfer*> reads_, writes_;
  std::vector<Mover> threads_;
  bool urgent_mover_ = false;
  std::condition_variable queued_, idle_;

  // See Note [Children].
  struct Child {
    int pipe;        // its end is closed when the child is gone
    int64_t number;  // of the fork
  };
  struct Buried {
    Slot slot;
    int64_t bytes, forks;
  };
  std::vector<Child> children_;
  std::vector<Buried> buried_;
  int64_t forks_ = 0;
  int64_t copies_ = 0;  // that were written to tiers
  int fork_pipe_[2] = {-1, -1};

  Trouble trouble_, failed_write_;
  int64_t thrashing_ = 0;  // faults in a row that gave up what was touched just before; see Note [Grace]
  int transferring_ = 0;      // chunks that a fork has to wait for
  int64_t under_way_ = 0;     // transfers that have not ended, whatever became of their ranges
  int waiting_ = 0;
  uint64_t epoch_ = 0;  // counts what may let those who wait go on
  bool forking_ = false;
  bool crowded_ = false;   // a tier was full since a slot came free last
  bool ending_ = false;    // nothing leaves any more
  bool stopping_ = false;  // and nothing is read
  int32_t inherited_ = 0;  // tiers of the process that this one was forked from
};

// Never destroyed: blocks may be freed while the process exits.
Ranges& ranges();

// ---- faults.cpp ----

void catch_faults();

}  // namespace lowtide
