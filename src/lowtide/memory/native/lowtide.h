// What the native parts share: the budget (budget.cpp) and the log (observe.cpp).
//
// Note [Two libraries]: the budget, the pages, the ranges, the tiers and the plan's schedule are one library, which knows
// nothing of PyTorch but a few names and is built once. What has to see inside PyTorch (the allocator, tensors, the
// observer, calls that run again) is another, small one, built for each of its versions. It is loaded first and brings the
// other with it; each finds the other's functions.
#pragma once
#include <Python.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#ifdef Py_LIMITED_API
// Not in the stable interface, and in every CPython since 3.4.
extern "C" int PyGILState_Check(void);
#endif

namespace c10 {
struct Allocator;
struct StorageImpl;
}  // namespace c10

namespace lowtide {

constexpr int64_t kPage = 4096;
// Below this a block comes from malloc with a header; from here on it is a range of whole pages, which a file tier can
// read and write without a copy.
constexpr int64_t kLarge = 64 << 10;

inline int64_t round_to_page(int64_t n) {
  return (n + kPage - 1) & ~(kPage - 1);
}

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// ---- budget.cpp ----

// A block of `nbytes` under the budget, or nullptr: what may leave has made no room. Never throws.
void* take_block(int64_t nbytes);
// Returns the bytes that are free again.
int64_t give_block(void* block);
// The serial number of the block that `data` is in; the negated address of memory that is not ours. `block`: what
// take_block returned, or nullptr: the memory is somebody else's, or was taken over.
int64_t serial_of(void* block, const void* data);
// Why the last block was refused, and what has gone wrong where nothing could be thrown ("": nothing).
std::string refusal_text();
std::string trouble_text();
// Blocks are asked for from here on, and no more.
void open_budget();
void close_budget();
void add_stall_ns(int64_t ns);
// Note that `n` bytes did not fit, for whom, and what was in use.
void note_refusal(int64_t n);
// Whether what does not fit has pages of a file for now, and that it has: see Note [Pages of a file].
bool sounding_goes_on();
void note_sounded();
bool in_forked_child();
// Take care of our locks when the process forks. The last to register is the first to be locked: whoever locks before the
// budget does, as the movers do, registers after it.
void survive_forks();
// Drops the GIL for its lifetime if this thread holds it. Every wait does: whoever would free the memory may need it (R3).
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (state_) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

// ---- allocator.cpp ----

c10::Allocator* budget_allocator();
// Whether this allocator made the storage's memory: then nobody can reach it but through the storage.
bool is_ours(const c10::StorageImpl* storage);
// The serial number of the block behind `storage`; the negated address of memory that is not ours.
int64_t serial_of(const c10::StorageImpl* storage);

// ---- observe.cpp ----

// The values are part of the log's contract with capture/builder.py; others are those of logs that are written in Python.
enum class Event : int32_t {
  kAlloc = 0,       // a: serial, b: bytes
  kFree = 1,        // a: serial, b: bytes
  kOpBegin = 4,     // a: name, b: scope, c: 1 if it computes, 2 if it is a view or composed of others (0: not told)
  kOpEnd = 5,       // a: name, b: scope
  kRead = 6,        // a: serial, b: version, c: bytes; operands of the operator that began last
  kWrite = 7,       // a: serial, b: version, c: bytes; results of the operator that ends next
  kStall = 8,       // a: nanoseconds waited
  kModule = 13,     // a: name
  kMarker = 14,     // a, b: the caller's
  kExists = 16,     // a: serial, b: bytes; alive when the log begins
  kTouch = 17,      // a: serial, b: 1 if written; a use that no operator announced
  kLeft = 18,       // a: serial, b: bytes, c: 1 if they had to be written; pages leave
  kCameBack = 19,   // a: serial, b: bytes; pages are back
};

extern std::atomic<bool> logging;
void log_event(Event kind, int64_t a, int64_t b = 0, int64_t c = 0);
void lock_log_for_fork();
void unlock_log_after_fork();
struct Range;
// What runs on this thread meanwhile belongs to none of the program's operators.
class Aside {
 public:
  Aside();
  ~Aside();
  Aside(const Aside&) = delete;

 private:
  void* outermost_;
};
// The slow memory that a large block which is made on this thread now has to be in, or -1. With `pages().mutex` held.
int32_t birth_tier(int64_t bytes);
// A block was made on this thread: the operator that runs uses it until it ends. With `pages().mutex` held.
void note_made(Range* range);
// The outermost operator that runs on this thread, as its caller names it, or "" if operators are not observed.
const char* current_op();
// The optimizer whose step runs on this thread, as its range is named, or "".
const char* current_optimizer();
// The layer whose forward runs, where layers are marked; "" in backward.
std::string current_module();
// Whether autograd has recorded anything in the step that runs.
bool autograd_has_begun();

}  // namespace lowtide
