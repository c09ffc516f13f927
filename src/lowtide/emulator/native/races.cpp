// See races.h. One lock over everything: the host threads that call are few, and the work of a call is small.
#include "races.h"

#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "races_findings.h"
#include "races_history.h"

namespace lowtide::races {
std::atomic<bool> g_enabled{false};

namespace {
constexpr size_t kMaxCells = 1 << 18, kMaxNames = 1 << 16;

thread_local Agent t_host = kHost;

class Detector {
 public:
  std::mutex mutex;

  Detector() { add_agent("the host", -1); }

  // ---- agents and their clocks ----
  Agent add_agent(std::string label, int device) {
    const auto agent = static_cast<Agent>(clocks_.size());
    names_.agents.push_back(std::move(label));
    names_.is_host.push_back(device < 0);
    devices_.push_back(device);
    clocks_.emplace_back(clocks_.size() + 1, 0);
    clocks_.back()[agent] = 1;  // 0 is what those know who never heard of it
    return agent;
  }
  Agent stream(int device, int64_t id) {
    const auto found = streams_.find({device, id});
    if (found != streams_.end()) return found->second;
    std::string label = "stream " + std::to_string(id);
    if (device != 0) label += " of device " + std::to_string(device);
    return streams_[{device, id}] = add_agent(std::move(label), device);
  }
  const Clock& clock(Agent agent) const { return clocks_[agent]; }
  void tick(Agent agent) { clocks_[agent][agent]++; }
  // Something is queued: what the host did until now is before it, what the host does next is not.
  void enqueue(Agent stream) {
    join(clocks_[stream], clock(t_host));
    tick(t_host);
  }
  void learn(Agent agent, const Clock& clock) { join(clocks_[agent], clock); }
  void learn_device(int device) {
    for (size_t a = 0; a < clocks_.size(); a++)
      if (devices_[a] == device) learn(t_host, clocks_[a]);
  }
  void send(uint64_t token) {
    join(sent_[token], clock(t_host));
    tick(t_host);
  }
  void receive(uint64_t token) {
    const auto found = sent_.find(token);
    if (found == sent_.end()) return;
    learn(t_host, found->second);
    sent_.erase(found);
  }

  // ---- accesses ----
  uint32_t name(std::string_view text) {
    const auto found = ids_.find(std::string(text));
    if (found != ids_.end()) return found->second;
    if (names_.jobs.size() >= kMaxNames) return Names::kOther;
    names_.jobs.emplace_back(text);
    return ids_[names_.jobs.back()] = static_cast<uint32_t>(names_.jobs.size() - 1);
  }

  void access(Agent agent, uint32_t name, const Access& a) {
    if (a.nbytes == 0) return;
    const Clock& now = clock(agent);
    const Entry mine{now[agent], agent, name, a.write};
    const auto begin = reinterpret_cast<Address>(a.ptr);
    history_.each(begin, begin + a.nbytes, [&](Address at, Cell& cell) {
      if (cell.freed) {
        findings_.note({Kind::kUsedWhenFree, {0, cell.freed->home, Names::kFree, true}, mine, at, cell.end});
        return;
      }
      for (auto& e : cell.entries)
        if ((e.write || a.write) && !covers(now, e)) findings_.note({Kind::kRace, e, mine, at, cell.end});
      cell.drop([&](const Entry& e) {  // see Note [History of a byte]
        return a.write ? covers(now, e) : e.agent == agent && !e.write;
      });
      cell.entries.push_back(mine);
    });
  }

  void free(Address begin, Address end, Agent home, const Agent* recorded, size_t count) {
    auto point = std::make_shared<FreePoint>();
    point->home = home;
    point->agents.push_back({home, clock(home), false});
    for (size_t i = 0; i < count; i++) point->agents.push_back({recorded[i], clock(recorded[i]), false});
    const Entry mine{0, home, Names::kFree, true};
    history_.each(begin, end, [&](Address at, Cell& cell) {
      if (cell.freed) {
        findings_.note({Kind::kUsedWhenFree, {0, cell.freed->home, Names::kFree, true}, mine, at, cell.end});
        return;
      }
      cell.drop([&](const Entry& e) {
        if (covers(clock(t_host), e)) return true;  // the host knows that it is over
        if (point->awaits(e)) return false;
        findings_.note({Kind::kFreedInUse, e, mine, at, cell.end});
        return true;  // once is enough: not again when the block is reused
      });
      cell.freed = point;
    });
  }

  void reached(Address where, Agent agent) {
    const Cell* cell = history_.find(where);
    if (!cell || !cell->freed) return;
    for (auto& of : cell->freed->agents)
      if (of.agent == agent) of.reached = true;
  }

  void alloc(Address begin, Address end, Agent home, Reuse reuse) {
    if (devices_[home] >= 0) tick(home);
    const Entry mine{known(clock(home), home), home, Names::kAllocation, true};
    if (reuse == Reuse::kStreamOrdered) {
      Clock now = clock(home);
      join(now, clock(t_host));
      history_.each(begin, end, [&](Address at, Cell& cell) {
        if (!cell.freed) return;
        for (auto& e : cell.entries)
          if (!covers(now, e) && !cell.freed->has_passed(e)) findings_.note({Kind::kReused, e, mine, at, cell.end});
      });
    }
    history_.replace(begin, end, Cell{end, {mine}, nullptr});
  }

  // ---- findings ----
  void end_call() {
    findings_.end_call();
    if (history_.size() <= kMaxCells) return;
    history_.clear();
    overflows_++;
  }
  void forget_accesses() {
    history_.clear();
    sent_.clear();
  }
  void forget_findings() {
    findings_.clear();
    overflows_ = 0;
  }
  uint64_t total() const { return findings_.total(); }
  size_t cells() const { return history_.size(); }
  std::string report() const {
    std::string text = findings_.text(names_);
    if (overflows_)
      text += "note: more than " + std::to_string(kMaxCells) + " ranges of memory were tracked, " +
              "their history was dropped " + std::to_string(overflows_) + " times: races may have been missed\n";
    return text;
  }

 private:
  Names names_;
  std::vector<int> devices_;  // of each agent, -1 for a host thread
  std::vector<Clock> clocks_;
  std::map<std::pair<int, int64_t>, Agent> streams_;
  std::unordered_map<uint64_t, Clock> sent_;
  std::unordered_map<std::string, uint32_t> ids_;
  History history_;
  Findings findings_;
  uint64_t overflows_ = 0;
};

Detector& detector() {
  static auto* d = new Detector;  // never destroyed: threads may outlive main
  return *d;
}

// The detector, locked for one call, or nothing while it is off.
class Call {
 public:
  enum When { kIfEnabled, kAlways };
  explicit Call(When when = kIfEnabled) {
    if (when == kIfEnabled && !enabled()) return;
    d_ = &detector();
    lock_ = std::unique_lock<std::mutex>(d_->mutex);
  }
  ~Call() {
    if (d_) d_->end_call();
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  explicit operator bool() const { return d_ != nullptr; }
  Detector* operator->() const { return d_; }

 private:
  Detector* d_ = nullptr;
  std::unique_lock<std::mutex> lock_;
};

Address address(const void* ptr) { return reinterpret_cast<Address>(ptr); }
}  // namespace

void enable(bool on) {
  Call d(Call::kAlways);
  if (on && !enabled()) d->forget_accesses();
  g_enabled = on;
}
void reset() {
  Call d(Call::kAlways);
  d->forget_accesses();
  d->forget_findings();
}

Agent stream(int device, int64_t id) { return Call(Call::kAlways)->stream(device, id); }
Agent new_host(std::string_view name) {
  return Call(Call::kAlways)->add_agent("host thread '" + std::string(name) + "'", -1);
}
void act_as(Agent host) { t_host = host; }
void send(uint64_t token) {
  if (Call d; d) d->send(token);
}
void receive(uint64_t token) {
  if (Call d; d) d->receive(token);
}

void submit(Agent stream, std::string_view name, const Access* accesses, size_t count) {
  Call d;
  if (!d) return;
  d->enqueue(stream);
  d->tick(stream);
  const uint32_t id = d->name(name);
  for (size_t i = 0; i < count; i++) d->access(stream, id, accesses[i]);
}
void host_access(const void* ptr, size_t nbytes, bool write, std::string_view name) {
  if (Call d; d) d->access(t_host, d->name(name), {ptr, nbytes, write});
}

Stamp record(Agent stream) {
  Call d;
  if (!d) return nullptr;
  d->enqueue(stream);
  return std::make_shared<const Clock>(d->clock(stream));
}
void wait(Agent stream, const Stamp& stamp) {
  Call d;
  if (!d || !stamp) return;
  d->enqueue(stream);
  d->learn(stream, *stamp);
}
Stamp mark(Agent stream) {
  Call d;
  return d ? std::make_shared<const Clock>(d->clock(stream)) : nullptr;
}
void sync(const Stamp& stamp) {
  Call d;
  if (d && stamp) d->learn(t_host, *stamp);
}
void sync_stream(Agent stream) { sync(mark(stream)); }
void sync_device(int device) {
  if (Call d; d) d->learn_device(device);
}

void free(const void* ptr, size_t nbytes, Agent home, const Agent* recorded, size_t count) {
  Call d;
  if (d && nbytes) d->free(address(ptr), address(ptr) + nbytes, home, recorded, count);
}
void reached(const void* ptr, Agent agent) {
  if (Call d; d) d->reached(address(ptr), agent);
}
void alloc(const void* ptr, size_t nbytes, Agent home, Reuse reuse) {
  Call d;
  if (d && nbytes) d->alloc(address(ptr), address(ptr) + nbytes, home, reuse);
}

uint64_t count() { return Call(Call::kAlways)->total(); }
size_t tracked_ranges() { return Call(Call::kAlways)->cells(); }
std::string take_report() {
  Call d(Call::kAlways);
  std::string text = d->report();
  d->forget_findings();
  return text;
}

// ---- C interface (ctypes): Python code that touches pinned memory or hands work to another thread, and the tests ----
namespace {
struct Interface {
  std::mutex mutex;
  std::unordered_map<int64_t, Stamp> events;
  std::string report;  // taken from the detector, not yet by the caller
};
Interface& interface() {
  static auto* i = new Interface;
  return *i;
}
Stamp latest(int64_t event) {
  std::lock_guard<std::mutex> lock(interface().mutex);
  const auto found = interface().events.find(event);
  return found == interface().events.end() ? nullptr : found->second;
}
}  // namespace

extern "C" {
void sim_races_enable(int on) { enable(on != 0); }
int sim_races_enabled() { return enabled(); }
void sim_races_reset() {
  reset();
  std::lock_guard<std::mutex> lock(interface().mutex);
  interface().events.clear();
  interface().report.clear();
}
int32_t sim_races_stream(int device, int64_t id) { return stream(device, id); }
int32_t sim_races_new_host(const char* name) { return new_host(name); }
void sim_races_act_as(int32_t host) { act_as(host); }
void sim_races_send(uint64_t token) { send(token); }
void sim_races_receive(uint64_t token) { receive(token); }
void sim_races_submit(int32_t stream, const char* name, uint64_t count, const uint64_t* ptrs, const uint64_t* nbytes,
                      const uint8_t* writes) {
  std::vector<Access> accesses;
  for (uint64_t i = 0; i < count; i++)
    accesses.push_back({reinterpret_cast<const void*>(ptrs[i]), nbytes[i], writes[i] != 0});
  submit(stream, name, accesses.data(), accesses.size());
}
void sim_races_host_access(const void* ptr, uint64_t nbytes, int write, const char* name) {
  host_access(ptr, nbytes, write != 0, name);
}
void sim_races_record(int64_t event, int32_t stream) {
  auto stamp = record(stream);
  std::lock_guard<std::mutex> lock(interface().mutex);
  interface().events[event] = std::move(stamp);
}
void sim_races_wait(int64_t event, int32_t stream) { wait(stream, latest(event)); }
void sim_races_sync(int64_t event) { sync(latest(event)); }
void sim_races_sync_stream(int32_t stream) { sync_stream(stream); }
void sim_races_sync_device(int device) { sync_device(device); }
void sim_races_free(const void* ptr, uint64_t nbytes, int32_t home, const int32_t* recorded, uint64_t count) {
  free(ptr, nbytes, home, recorded, count);
}
void sim_races_reached(const void* ptr, int32_t agent) { reached(ptr, agent); }
void sim_races_alloc(const void* ptr, uint64_t nbytes, int32_t home, int stream_ordered) {
  alloc(ptr, nbytes, home, stream_ordered ? Reuse::kStreamOrdered : Reuse::kCompleted);
}
uint64_t sim_races_count() { return count(); }
uint64_t sim_races_tracked_ranges() { return tracked_ranges(); }
// Writes the report's bytes and forgets them, if they fit; returns how many there are.
uint64_t sim_races_take_report(char* buffer, uint64_t capacity) {
  std::lock_guard<std::mutex> lock(interface().mutex);
  auto& report = interface().report;
  report += take_report();
  const uint64_t n = report.size();
  if (!buffer || n > capacity) return n;
  std::memcpy(buffer, report.data(), n);
  report.clear();
  return n;
}
}  // extern "C"

}  // namespace lowtide::races
