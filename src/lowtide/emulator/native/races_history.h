// What each byte remembers of its accesses: the shadow memory of the race detector.
#pragma once
#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "races.h"

namespace lowtide::races {

using Address = uintptr_t;

// The last access of a kind by an agent: its `epoch`-th job, or the host's `epoch`-th stretch between two hand-overs.
struct Entry {
  uint64_t epoch;
  Agent agent;
  uint32_t name;
  bool write;
  bool operator==(const Entry& o) const {
    return epoch == o.epoch && agent == o.agent && name == o.name && write == o.write;
  }
};

inline uint64_t known(const Clock& clock, Agent agent) {
  return static_cast<size_t>(agent) < clock.size() ? clock[agent] : 0;
}
inline bool covers(const Clock& clock, const Entry& e) { return e.epoch <= known(clock, e.agent); }
inline void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (size_t i = 0; i < from.size(); i++) into[i] = std::max(into[i], from[i]);
}

// The point of a free: what each of its agents had been given until then, and which were seen to have passed it.
struct FreePoint {
  struct Of {
    Agent agent;
    Clock clock;
    bool reached;
  };
  Agent home;
  std::vector<Of> agents;

  bool awaits(const Entry& e) const {
    return std::any_of(agents.begin(), agents.end(), [&](const Of& of) { return covers(of.clock, e); });
  }
  bool has_passed(const Entry& e) const {
    return std::any_of(agents.begin(), agents.end(), [&](const Of& of) { return of.reached && covers(of.clock, e); });
  }
};

// Note [History of a byte]
// Of each agent the last read and the last write are kept: if that one is ordered before an access, so are its earlier
// ones. A write drops what is ordered before it: whoever is not ordered after the dropped access is not ordered after
// the write either, and is found against the write. So "does this access race?" has an exact answer, also after a race,
// and a byte holds at most two entries for an agent.
struct Cell {
  Address end = 0;
  std::vector<Entry> entries;
  std::shared_ptr<FreePoint> freed;  // set while the memory is free

  template <class F>
  void drop(F over) {
    entries.erase(std::remove_if(entries.begin(), entries.end(), over), entries.end());
  }
};

// Bytes with the same history form one cell; an access cuts cells at its ends, and neighbours that became equal join.
class History {
 public:
  // `visit(begin, cell)` for the cells of [begin, end), in order and without gaps.
  template <class F>
  void each(Address begin, Address end, F visit) {
    tile(begin, end);
    for (auto it = cells_.find(begin); it != cells_.end() && it->first < end; ++it) visit(it->first, it->second);
    coalesce(begin, end);
  }
  void replace(Address begin, Address end, Cell cell) {
    split(begin);
    split(end);
    cells_.erase(cells_.lower_bound(begin), cells_.lower_bound(end));
    cell.end = end;
    cells_[begin] = std::move(cell);
  }
  Cell* find(Address where) {
    auto it = cells_.upper_bound(where);
    return it == cells_.begin() || (--it)->second.end <= where ? nullptr : &it->second;
  }
  size_t size() const { return cells_.size(); }
  void clear() { cells_.clear(); }

 private:
  void split(Address where) {
    auto it = cells_.lower_bound(where);
    if (it == cells_.begin() || (--it)->second.end <= where) return;
    cells_.emplace(where, it->second);
    it->second.end = where;
  }
  void tile(Address begin, Address end) {
    split(begin);
    split(end);
    Address where = begin;
    for (auto it = cells_.lower_bound(begin); where < end; ++it) {
      const Address next = it == cells_.end() ? end : std::min(end, it->first);
      if (where < next) it = cells_.emplace(where, Cell{next, {}, nullptr}).first;
      where = it->second.end;
    }
  }
  void coalesce(Address begin, Address end) {
    auto it = cells_.find(begin);
    if (it != cells_.begin()) --it;
    while (it->second.end <= end) {
      const auto next = std::next(it);
      if (next == cells_.end()) return;
      if (next->first == it->second.end && next->second.freed == it->second.freed &&
          next->second.entries == it->second.entries) {
        it->second.end = next->second.end;
        cells_.erase(next);
      } else {
        it = next;
      }
    }
  }

  std::map<Address, Cell> cells_;
};

}  // namespace lowtide::races
