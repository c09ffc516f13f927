// What it costs to make a range again with everything discarded that hangs together with it, as DTR estimates it
// (Kirisame et al., ICLR 2021, the approximation with union-find).
//
// What is discarded forms components: a range that is discarded joins those of its discarded neighbours, the ranges it is
// made from and those made from it; the cost of a component is the sum of its members'. One that is made again takes its
// own cost out of its component, but does not split it: exact components would have to be walked whenever memory runs out.
#pragma once
#include <algorithm>
#include <cstdint>
#include <set>
#include <unordered_map>
#include <vector>

namespace lowtide {

class Neighbourhoods {
 public:
  // What a range that is in memory costs with all that is discarded around it.
  double cost_of(int64_t serial, double own, const std::vector<int64_t>& sources) const {
    for (size_t component : around(serial, sources)) own += costs_[component];
    return own;
  }

  void discarded(int64_t serial, double own, const std::vector<int64_t>& sources) {
    std::set<size_t> neighbours = around(serial, sources);
    size_t joined = parents_.size();
    parents_.push_back(joined);
    costs_.push_back(own);
    for (size_t component : neighbours) {
      parents_[component] = joined;
      costs_[joined] += costs_[component];
    }
    members_[serial] = {own, joined, sources};
    for (int64_t source : sources) made_from_[source].push_back(serial);
  }

  // It is in memory again, or no more. Nothing happens to one that was not discarded.
  void remade(int64_t serial) {
    auto found = members_.find(serial);
    if (found == members_.end()) return;
    costs_[root(found->second.component)] -= found->second.own;
    for (int64_t source : found->second.sources) std::erase(made_from_[source], serial);
    members_.erase(found);
    if (!members_.empty()) return;
    made_from_.clear();
    parents_.clear();
    costs_.clear();
  }

 private:
  struct Member {
    double own;
    size_t component;
    std::vector<int64_t> sources;
  };

  std::set<size_t> around(int64_t serial, const std::vector<int64_t>& sources) const {
    std::set<size_t> found;
    auto add = [&](int64_t neighbour) {
      auto member = members_.find(neighbour);
      if (member != members_.end()) found.insert(root(member->second.component));
    };
    for (int64_t source : sources) add(source);
    auto made = made_from_.find(serial);
    if (made != made_from_.end())
      for (int64_t each : made->second) add(each);
    return found;
  }

  size_t root(size_t component) const {
    while (parents_[component] != component) component = parents_[component] = parents_[parents_[component]];
    return component;
  }

  std::unordered_map<int64_t, Member> members_;                   // what is discarded
  std::unordered_map<int64_t, std::vector<int64_t>> made_from_;   // what of it is made from a range
  mutable std::vector<size_t> parents_;
  std::vector<double> costs_;  // of components
};

}  // namespace lowtide
