// The hard budget: a bound on live plus cached bytes.
//
// Large blocks are ranges of whole pages (pages.h), small ones malloc's with a header.
#include "remakes.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

namespace lowtide {
namespace {

std::atomic<bool> forked{false};
std::atomic<bool> installed{false};

struct Failure {
  int64_t requested = 0, live = 0, reserved = 0, budget = 0;
  std::string op, optimizer, module;

  int64_t needed() const {
    return live + requested;
  }
  bool is_placed() const {
    return !optimizer.empty() || !module.empty();
  }
};
std::mutex failure_mutex;  // guards all of these
Failure last_failure;      // where a step is sounded, the one that needs most
Failure first_failure;     // of a step that is sounded
int64_t sounded = 0, sounded_until_ns = 0;
std::atomic<bool> sounding{false};
constexpr int64_t kLongestSounding = 120'000'000'000;

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

enum class Where {
  kPlanned,       // in fast memory within the budget, or in slow memory if the plan has it there
  kSlow,          // in slow memory
  kBeyondBudget,  // in fast memory, whatever the budget says
  kFile,          // in pages of a file: see Note [Pages of a file]
};

void* try_block(int64_t n, bool large, Where where = Where::kPlanned) {
  if (large) {
    Pages& all = pages();
    std::lock_guard<std::mutex> guard(all.mutex);
    int64_t serial = ++counters.serial;
    int32_t tier = where == Where::kSlow ? ranges().slow_tier() : where == Where::kFile ? -1 : birth_tier(n);
    Range* range = tier >= 0 ? ranges().add_slow(n, tier, serial) : nullptr;
    if (!range) {
      if (where == Where::kSlow) return nullptr;
      char* fast = where == Where::kFile      ? all.take_of_file(n)
          : where == Where::kBeyondBudget ? all.take_beyond_budget(n)
                                          : all.take(n);
      if (!fast) return nullptr;
      range = ranges().add(fast, n, serial);
      count_live(n);
    }
    char* start = range->start;
    if (logging.load(std::memory_order_relaxed)) log_event(Event::kAlloc, serial, n);
    note_made(range);
    return start;
  }
  if (where == Where::kBeyondBudget) {
    counters.reserved += n;
    raise_to(counters.peak_reserved, counters.reserved.load());
  } else if (!try_reserve(n)) {
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
  if (logging.load(std::memory_order_relaxed)) log_event(Event::kAlloc, header->serial, n);
  return header + 1;
}

// What a signal's handler raised (Ctrl-C, as a rule) while an allocation waited. It cannot pass through C++, and ctypes
// would swallow it inside the callback: it is kept for whoever turns the refusal into an error. Guarded by the GIL.
PyObject* interruption = nullptr;
// It came while a recipe was tried, whose failure nobody is told of: the next allocation is refused for it.
std::atomic<bool> interrupted_trial{false};

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
    interrupted_trial = only_trying;
  }
  PyGILState_Release(gil);
  return raised;
}

// An allocation that does not fit waits, without the GIL, until anything is freed, and tries again. It fails when nothing
// is on its way out.
void* block_after_ranges_left(int64_t n, bool large) {
  Ranges& all = ranges();
  for (;;) {
    if (!may_pass_budget && interrupted()) return nullptr;
    uint64_t epoch;
    {
      std::lock_guard<std::mutex> guard(pages().mutex);
      epoch = all.epoch();
      all.make_room(n);
    }
    if (void* block = try_block(n, large)) return block;
    int64_t start = now_ns();
    {
      WithoutGil released;
      if (!all.progress_waiting(epoch)) return nullptr;
    }
    add_stall_ns(now_ns() - start);
    if (void* block = try_block(n, large)) return block;
  }
}

// What fast memory cannot hold beside all that is in use, slow memory can: the block itself, or for a small one, which is
// in no range, another.
void* block_thanks_to_slow_memory(int64_t n, bool large) {
  if (large) return try_block(n, large, Where::kSlow);
  {
    std::lock_guard<std::mutex> guard(pages().mutex);
    if (!ranges().displace(n)) return nullptr;
  }
  return try_block(n, large);
}

void lock_for_fork() {
  pages().mutex.lock();
  failure_mutex.lock();
  lock_log_for_fork();  // last: some log with the others held
}
void unlock_after_fork() {
  unlock_log_after_fork();
  failure_mutex.unlock();
  pages().mutex.unlock();
}
void after_fork_in_child() {
  unlock_after_fork();
  // A child has none of our threads: nobody could free anything for it, and its memory is not the parent's budget.
  forked = true;
  logging = false;
  counters.budget = 0;
}

}  // namespace

// What fits is part of what an operator needs too, if more of that did not.
void sound_again() {
  if (!sounding_goes_on()) return;
  int64_t held;
  {
    std::lock_guard<std::mutex> guard(pages().mutex);
    if (!pages().has_of_file()) return;
    held = counters.live - ranges().movable_bytes();
  }
  std::lock_guard<std::mutex> guard(failure_mutex);
  if (held <= last_failure.needed()) return;
  last_failure.live = held;
  last_failure.requested = 0;
}

// Not before autograd records: whoever tries how much there is may catch the refusal. Not where writes fail, or somebody
// has pressed Ctrl-C: that has to be told at once. And not for ever: a program may never come to an update.
bool sounding_goes_on() {
  if (!sounding.load(std::memory_order_relaxed) || !autograd_has_begun() || ranges().write_failed) return false;
  std::lock_guard<std::mutex> guard(failure_mutex);
  return sounded == 0 || now_ns() < sounded_until_ns;
}

void note_sounded() {
  std::lock_guard<std::mutex> guard(failure_mutex);
  if (++sounded == 1) sounded_until_ns = now_ns() + kLongestSounding;
}

// While a model is built: each block is filled, and then comes another. What leaves for that leaves meanwhile.
std::atomic<bool> room_ahead{false};

// Not by blocks that half of the budget does not hold twice: what has just been made would leave before it is filled.
void make_room_ahead(int64_t n) {
  if (4 * n > counters.budget.load()) return;
  std::lock_guard<std::mutex> guard(pages().mutex);
  ranges().make_room(n);
}

void* take_block(int64_t nbytes) {
  bool large = nbytes >= kLarge;
  int64_t n = large ? round_to_page(nbytes) : nbytes;
  if (interrupted_trial.load(std::memory_order_relaxed) && !only_trying && !may_pass_budget &&
      interrupted_trial.exchange(false)) [[unlikely]] {
    note_refusal(n);
    return nullptr;
  }
  void* block = try_block(n, large);
  bool may_leave = !forked && ranges().running();
  if (!block && may_leave) block = block_after_ranges_left(n, large);
  if (!block && may_leave) block = block_thanks_to_slow_memory(n, large);
  if (block) {
    if (large && may_leave && room_ahead.load(std::memory_order_relaxed)) [[unlikely]] make_room_ahead(n);
    if (sounding.load(std::memory_order_relaxed)) [[unlikely]] sound_again();
    return block;
  }
  if (only_trying) return nullptr;
  note_refusal(n);
  // See Note [Pages of a file].
  if (!interruption && sounding_goes_on())
    if (void* of_file = try_block(round_to_page(n), true, Where::kFile)) {
      note_sounded();
      return of_file;
    }
  if (!may_pass_budget) return nullptr;
  // See Note [Who runs calls again].
  {
    std::lock_guard<std::mutex> guard(pages().mutex);
    ranges().counted.beyond += n;
    ranges().note_trouble({ENOMEM, false, n, 0});
  }
  return try_block(n, large, Where::kBeyondBudget);
}

int64_t give_block(void* block) {
  int64_t bytes, serial;
  if (is_large(block)) {
    Pages& all = pages();
    std::lock_guard<std::mutex> guard(all.mutex);
    Range* range = ranges().of_data(block);
    bytes = range->bytes;
    serial = range->serial;
    if (logging.load(std::memory_order_relaxed)) log_event(Event::kFree, serial, bytes);
    ranges().remove(range);
    if (!installed) all.trim_all();  // nobody will ask for these pages again
  } else {
    auto* header = static_cast<Header*>(block) - 1;
    bytes = header->bytes;
    serial = header->serial;
    if (logging.load(std::memory_order_relaxed)) log_event(Event::kFree, serial, bytes);
    free(header);
    small_live -= bytes;
    counters.live -= bytes;
    counters.reserved -= bytes;
  }
  return bytes;
}

int64_t serial_of(void* block, const void* data) {
  if (block && !is_large(block)) return (static_cast<Header*>(block) - 1)->serial;
  std::lock_guard<std::mutex> guard(pages().mutex);
  Range* range = ranges().of_data(data);
  return range ? range->serial : -reinterpret_cast<int64_t>(data);
}

void add_stall_ns(int64_t ns) {
  counters.stall_ns += ns;
  if (logging.load(std::memory_order_relaxed)) log_event(Event::kStall, ns);
}

void note_refusal(int64_t n) {
  std::string module = current_module();
  std::lock_guard<std::mutex> guard(failure_mutex);
  Failure failure{n, counters.live, counters.reserved, counters.budget, current_op(), current_optimizer(), module};
  if (sounded == 0) first_failure = failure;
  if (sounded == 0 || failure.needed() > last_failure.needed()) last_failure = failure;
  ++counters.refused;
}

std::string refusal_text() {
  std::lock_guard<std::mutex> guard(failure_mutex);
  const Failure& f = last_failure;
  return "lowtide: " + (f.op.empty() ? "an operator" : f.op) + " asked for " + std::to_string(f.requested) + " bytes; " +
      std::to_string(f.live) + " bytes are in use and cannot be moved now, the budget is " + std::to_string(f.budget) +
      " bytes";
}

// Python, which knows the tier, says what it means.
std::string trouble_text() {
  Trouble trouble;
  {
    std::lock_guard<std::mutex> guard(pages().mutex);
    trouble = ranges().trouble();
  }
  if (forked || trouble.code == 0) return "";
  const char* why = trouble.code == ENOMEM ? "are needed by an operator whose operands alone pass the budget"
      : trouble.code == kNotRemade         ? "could not be computed again"
                                           : "could not be read back from the spill";
  return "lowtide: " + std::to_string(trouble.bytes) + " bytes of a tensor " + why;
}

bool in_forked_child() {
  return forked;
}

void survive_forks() {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(&lock_for_fork, &unlock_after_fork, &after_fork_in_child); });
}

void open_budget() {
  forked = false;  // a child that opens a budget of its own has one
  survive_forks();
  installed = true;
}

void close_budget() {
  counters.budget = 0;
  std::lock_guard<std::mutex> guard(pages().mutex);
  installed = false;
  pages().trim_all();
}

}  // namespace lowtide

using namespace lowtide;

extern "C" {

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

// Numbers of the last refused allocation; the names of its operator, its optimizer if one steps, and its layer if known. In
// a step that is sounded: of the largest need, named by the first where nobody knows its layer.
void lt_last_failure(int64_t* out, char* op, char* optimizer, char* module, int64_t name_bytes) {
  std::lock_guard<std::mutex> guard(failure_mutex);
  out[0] = last_failure.requested;
  out[1] = last_failure.live;
  out[2] = last_failure.reserved;
  out[3] = last_failure.budget;
  const Failure& named = last_failure.is_placed() ? last_failure : first_failure;
  out[4] = named.needed();
  std::snprintf(op, name_bytes, "%s", named.op.c_str());
  std::snprintf(optimizer, name_bytes, "%s", named.optimizer.c_str());
  std::snprintf(module, name_bytes, "%s", named.module.c_str());
}

// From here on nothing is refused: what does not fit has pages of the file behind `fd`; -1: that is over. See Note [Pages
// of a file].
void lt_sound(int fd) {
  {
    std::lock_guard<std::mutex> guard(pages().mutex);
    pages().use_file(fd);
  }
  std::lock_guard<std::mutex> guard(failure_mutex);
  sounding = fd >= 0;
  sounded = 0;
}

// Whether room for another block of its size is made behind each allocation.
void lt_room_ahead(int on) {
  room_ahead = on != 0;
}

// How often something had pages of a file instead of a refusal, since that began.
int64_t lt_sounded() {
  std::lock_guard<std::mutex> guard(failure_mutex);
  return sounded;
}

// Take what a signal's handler raised while an allocation waited: the exception, or None.
PyObject* lt_take_interruption() {
  PyObject* taken = interruption ? interruption : Py_NewRef(Py_None);
  interruption = nullptr;
  return taken;
}
}
