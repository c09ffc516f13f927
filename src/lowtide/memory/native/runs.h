// Kept pages: runs of addresses that nobody uses, merged with their neighbours.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <utility>

namespace lowtide {

struct Run {
  char* start = nullptr;  // nullptr: there is none
  int64_t bytes = 0;

  char* end() const {
    return start + bytes;
  }
};

class Runs {
 public:
  // May be asked without a lock; everything else is guarded by its owner's.
  int64_t bytes() const {
    return bytes_.load(std::memory_order_relaxed);
  }

  void keep(char* start, int64_t length) {
    if (length <= 0) return;
    bytes_ += length;
    auto after = by_start_.lower_bound(start);
    if (after != by_start_.end() && after->first == start + length) {
      length += after->second;
      forget({after->first, after->second});
    }
    auto before = by_start_.lower_bound(start);
    if (before != by_start_.begin()) {
      --before;
      if (before->first + before->second == start) {
        start = before->first;
        length += before->second;
        forget({before->first, before->second});
      }
    }
    note({start, length});
  }

  // Take a part out of the run that it lies in.
  void cut(char* start, int64_t length) {
    if (length <= 0) return;
    auto found = std::prev(by_start_.upper_bound(start));
    Run run{found->first, found->second};
    forget(run);
    if (run.start < start) note({run.start, start - run.start});
    if (start + length < run.end()) note({start + length, run.end() - (start + length)});
    bytes_ -= length;
  }

  bool covers(const char* start, int64_t length) const {
    if (length <= 0) return true;
    auto after = by_start_.upper_bound(const_cast<char*>(start));
    if (after == by_start_.begin()) return false;
    auto found = std::prev(after);
    return start + length <= found->first + found->second;
  }

  Run smallest() const {
    return by_size_.empty() ? Run{} : run_at(by_size_.begin());
  }
  Run largest() const {
    return by_size_.empty() ? Run{} : run_at(std::prev(by_size_.end()));
  }
  // The smallest that has `least` bytes.
  Run smallest_of(int64_t least) const {
    auto found = by_size_.lower_bound({least, nullptr});
    return found == by_size_.end() ? Run{} : run_at(found);
  }
  // Visit runs of `least` bytes and more, the smallest first, until `visit` returns true.
  template <typename Visit>
  void each_of(int64_t least, Visit visit) const {
    for (auto it = by_size_.lower_bound({least, nullptr}); it != by_size_.end(); ++it)
      if (visit(run_at(it))) return;
  }

 private:
  using BySize = std::set<std::pair<int64_t, char*>>;

  static Run run_at(BySize::const_iterator at) {
    return {at->second, at->first};
  }
  void note(Run run) {
    by_start_.emplace(run.start, run.bytes);
    by_size_.emplace(run.bytes, run.start);
  }
  void forget(Run run) {
    by_start_.erase(run.start);
    by_size_.erase({run.bytes, run.start});
  }

  std::map<char*, int64_t> by_start_;
  BySize by_size_;
  std::atomic<int64_t> bytes_{0};
};

}  // namespace lowtide
