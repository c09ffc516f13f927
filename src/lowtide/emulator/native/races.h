// The race detector: happens-before between jobs of streams, host threads and frees, by vector clocks.
//
// Note [Races are found at submission]
// Every call is made by a host thread, in program order, when it submits, records, waits, synchronises, allocates or
// frees; never by a worker of a stream. An order then exists only where the program asked for one, and a missing wait
// is found every time, however the run happened to go. Report what the program asked for, not what the emulator did: a
// kernel that the emulator ran at once although a device would run it later is a `submit` and nothing else; only what
// the program may rely on (a blocking copy, item(), synchronize, a query that said yes) is followed by a `sync`.
// Engines are not agents: two copies on one engine never overlap, but nothing says which goes first.
//
// Rules for the caller
// 1. Calls about one stream come in the order of its queue: call while holding the lock under which the job is queued.
// 2. Addresses are of one kind throughout (device memory: always the tensor's, or always the kernel's).
// 3. A blocking copy is `submit` + `sync_stream`; stream.synchronize is `sync_stream`; the device's is `sync_device`.
//
// Everything is thread-safe, and costs one atomic load while the detector is off.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace lowtide::races {

// A line of execution: a stream of a device, or host threads.
using Agent = int32_t;
// All host threads together: they take turns (the interpreter's lock, the autograd engine's queue), and the order in
// which they call is taken for a real one. A thread that must be checked against the others takes an agent of its own.
constexpr Agent kHost = 0;

using Clock = std::vector<uint64_t>;
// A point that an agent has reached. Each record of an event has its own, so a later record changes no earlier wait.
// Keep it in the state of the record; empty (never recorded, or the detector was off) orders nothing.
using Stamp = std::shared_ptr<const Clock>;

struct Access {
  const void* ptr;
  size_t nbytes;
  bool write;
};

extern std::atomic<bool> g_enabled;
inline bool enabled() { return g_enabled.load(std::memory_order_relaxed); }
// Turning it on forgets what was accessed before.
void enable(bool on);
// Forget accesses and findings; agents and stamps stay valid.
void reset();

// ---- agents ----
Agent stream(int device, int64_t id);
// A new agent for a host thread; from then on only hand-offs order it and the others.
Agent new_host(std::string_view name);
// The calling thread acts as `host` from here on (kHost unless told).
void act_as(Agent host);
// Host to host: what the sender did happens before what the receiver does next. A token is received once.
void send(uint64_t token);
void receive(uint64_t token);

// ---- jobs and accesses ----
// A kernel, a copy or a fill, queued on `stream` by the calling thread. `name` is its own, such as "aten::addmm" or
// "copy h2d of 4.0 MiB": the stream is added.
void submit(Agent stream, std::string_view name, const Access* accesses, size_t count);
inline void submit(Agent stream, std::string_view name, std::initializer_list<Access> accesses) {
  submit(stream, name, accesses.begin(), accesses.size());
}
// The calling thread itself touches memory, such as a pinned buffer: "host read of a pinned buffer".
void host_access(const void* ptr, size_t nbytes, bool write, std::string_view name);

// ---- order ----
Stamp record(Agent stream);                    // event.record(stream)
void wait(Agent stream, const Stamp& stamp);   // stream.wait_event(event), with the event's latest record
void sync(const Stamp& stamp);                 // the calling thread waited for it: event.synchronize, or a true query
Stamp mark(Agent stream);                      // all that is queued on `stream` now, for a `sync` after waiting for it
void sync_stream(Agent stream);                // sync(mark(stream)): stream.synchronize, or the end of a blocking copy
void sync_device(int device);                  // the same for all streams of a device

// ---- memory ----
// A block changes hands twice. Freeing it is a write by whoever may get it next: everything that accessed it must be
// ordered before `home` (the stream that it was allocated for; kHost for pinned memory), before a stream of `recorded`
// (record_stream, or a pinned buffer's copies) or before the calling thread. This is checked at the free, whether or
// not the block is reused. `nbytes` is the whole block.
void free(const void* ptr, size_t nbytes, Agent home, const Agent* recorded, size_t count);
inline void free(const void* ptr, size_t nbytes, Agent home, std::initializer_list<Agent> recorded) {
  free(ptr, nbytes, home, recorded.begin(), recorded.size());
}
// The allocator saw that `agent` has passed the point of the free of the block that holds `ptr`.
void reached(const void* ptr, Agent agent);
enum class Reuse {
  kCompleted,      // fresh memory, or every stream of the free was seen to have passed it: nothing to check
  kStreamOrdered,  // handed on without waiting: `home` must be ordered after all that was not reported as reached
};
// Allocating is a write by `home`: another stream that uses the block first must wait for `home`, whose earlier jobs
// may still be using the block's last content.
void alloc(const void* ptr, size_t nbytes, Agent home, Reuse reuse);

// ---- findings ----
uint64_t count();           // races since the last take_report or reset, repetitions included
std::string take_report();  // one line for each pair of sides, first found first; empty if there was none; forgets them
size_t tracked_ranges();    // how many ranges of memory have a history of their own

}  // namespace lowtide::races
