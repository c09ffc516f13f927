// What the race detector found: pairs of sides, folded and counted, and the lines that tell of them.
#pragma once
#include <cinttypes>
#include <cstdio>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "races_history.h"

namespace lowtide::races {

enum class Kind {
  kRace,          // two accesses, at least one of them a write
  kFreedInUse,    // a free that an earlier access is not ordered before
  kUsedWhenFree,  // an access, or a second free, after the free
  kReused,        // an allocation that an access before the free is not ordered before
};

// Two sides, of which `first` was submitted first.
struct Finding {
  Kind kind;
  Entry first, second;
  Address begin, end;
  uint64_t times = 1;
  auto key() const {
    return std::make_tuple(kind, first.agent, first.name, first.write, second.agent, second.name, second.write);
  }
};

// How findings call the sides.
struct Names {
  // The texts that every detector starts with.
  static constexpr uint32_t kAllocation = 0, kFree = 1, kOther = 2;
  std::vector<std::string> jobs{"allocation", "free", "(another job)"};
  std::vector<std::string> agents;
  std::vector<bool> is_host;
};

class Findings {
 public:
  // One pair in one call is one finding, over however many cells it stretches; its range is the first unbroken one.
  void note(const Finding& f) {
    for (auto& known : call_)
      if (known.key() == f.key()) {
        if (known.end == f.begin) known.end = f.end;
        return;
      }
    call_.push_back(f);
  }
  void end_call() {
    for (auto& f : call_) count(f);
    call_.clear();
  }
  void clear() {
    all_.clear();
    index_.clear();
    total_ = unnamed_ = 0;
  }
  uint64_t total() const { return total_; }

  std::string text(const Names& names) const {
    std::string out;
    for (auto& f : all_) out += line(f, names) + (f.times > 1 ? " [" + std::to_string(f.times) + " times]\n" : "\n");
    if (unnamed_) out += "note: " + std::to_string(unnamed_) + " more races between other pairs of jobs\n";
    return out;
  }

 private:
  static constexpr size_t kMaxPairs = 2048;

  void count(const Finding& f) {
    total_++;
    const auto known = index_.find(f.key());
    if (known != index_.end()) {
      all_[known->second].times++;
    } else if (all_.size() < kMaxPairs) {
      index_[f.key()] = all_.size();
      all_.push_back(f);
    } else {
      unnamed_++;
    }
  }

  static std::string line(const Finding& f, const Names& names) {
    char range[64];
    std::snprintf(range, sizeof range, "0x%" PRIxPTR "+%zu", f.begin, static_cast<size_t>(f.end - f.begin));
    const auto verb = [](const Entry& e) { return e.write ? " writes " : " reads "; };
    const auto side = [&](const Entry& e) { return "'" + names.jobs[e.name] + "' on " + names.agents[e.agent]; };
    const std::string first = names.agents[f.first.agent], second = names.agents[f.second.agent];
    const bool streams = !names.is_host[f.first.agent] && !names.is_host[f.second.agent];
    const std::string none = streams ? "no event orders them (" : "nothing orders them (";
    const std::string used = side(f.first) + verb(f.first) + range;
    switch (f.kind) {
      case Kind::kRace:
        if (f.first.name == Names::kAllocation)
          return "race: " + side(f.second) + verb(f.second) + range + " while it is allocated on " + first +
                 ", whose earlier jobs may still use that memory: " + none + remedy(f, names, "the allocation") + ")";
        return "race: " + used + " while " + side(f.second) + verb(f.second) + "it: " + none +
               remedy(f, names, "it") + ")";
      case Kind::kFreedInUse:
        return "use after free: " + used + " while it is freed on " + second + ": " + none +
               (streams ? "call record_stream for " + first + " before the free, or " : "") + remedy(f, names, "it") +
               (streams ? " before the free)" : ")");
      case Kind::kUsedWhenFree:
        return "use after free: " +
               (f.second.name == Names::kFree ? "a second free on " + second + " of " + range
                                              : side(f.second) + verb(f.second) + range) +
               ", which was freed on " + first + " before (keep the tensor until its last use is submitted)";
      case Kind::kReused:
        return "use after free: " + used + " while the freed block is given out again on " + second + ": " + none +
               "the allocator must wait until " + first + " has passed the free)";
    }
    return "";
  }

  static std::string remedy(const Finding& f, const Names& names, const char* what) {
    const auto &first = names.agents[f.first.agent], &second = names.agents[f.second.agent];
    if (names.is_host[f.first.agent])
      return "hand over from " + first + " to the thread that does or submits the other";
    if (names.is_host[f.second.agent]) return "synchronize " + first + ", or an event recorded on it, before that";
    return "record an event on " + first + " after " + what + " and wait for it on " + second;
  }

  std::vector<Finding> call_, all_;
  std::map<decltype(std::declval<Finding>().key()), size_t> index_;
  uint64_t total_ = 0, unnamed_ = 0;
};

}  // namespace lowtide::races
