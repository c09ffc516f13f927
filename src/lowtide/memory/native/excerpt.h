// Which pages of a range an operator reads that uses only a part of it.
//
// Note [Excerpts]: an embedding looks up a few rows of a table, a mixture of experts uses a slice of a block that holds them
// all. Where autograd is off, and the range is clean and away, only the pages with that part are read, put at their
// addresses read-only, and taken away when the operator ends; the range itself stays away. Whoever touches another page of
// it meanwhile faults, and the whole comes back over the excerpt: the bytes are the same. To plans and to the order in which
// ranges leave this is no use of the range, so it does not come back for it. Slices are excerpts if they are less than a
// fifth of their range (a gate of an LSTM is more), and not everything fits.
#pragma once
#include "range.h"

#include <algorithm>
#include <vector>

namespace lowtide {

struct PageRun {
  int64_t at, bytes;  // in its range
};

struct Excerpt {
  Range* range;
  int64_t serial;
  const char* data;           // the tensor's own address
  bool rows;                  // that are looked up; else a slice
  std::vector<PageRun> runs;
  int64_t mapped = 0;         // bytes that are at their addresses and count
  int64_t bytes() const {
    int64_t total = 0;
    for (const PageRun& run : runs) total += run.bytes;
    return total;
  }
};

// A read costs as much time as so many bytes more, on the disks of today.
constexpr int64_t kReadCost = 128 << 10;
constexpr int64_t kLeastExcerpted = 1 << 20;

inline bool is_worth(const Excerpt& excerpt, int64_t share) {
  auto reads = static_cast<int64_t>(excerpt.runs.size());
  return excerpt.bytes() + (excerpt.rows ? reads * kReadCost : 0) <= excerpt.range->bytes / share;
}

// Whole pages around bytes that are given from the tensor memory's own beginning.
inline void add_bytes(Excerpt& excerpt, int64_t from, int64_t to) {
  int64_t before = excerpt.range->start - excerpt.range->data;  // another allocator's first bytes are in no range
  from = std::max<int64_t>(from - before, 0) & ~(kPage - 1);
  to = std::min(round_to_page(std::max<int64_t>(to - before, 0)), excerpt.range->bytes);
  if (to > from) excerpt.runs.push_back({from, to - from});
}

inline void join_runs(std::vector<PageRun>& runs) {
  std::sort(runs.begin(), runs.end(), [](const PageRun& a, const PageRun& b) { return a.at < b.at; });
  std::vector<PageRun> joined;
  for (const PageRun& run : runs) {
    if (joined.empty() || run.at > joined.back().at + joined.back().bytes)
      joined.push_back(run);
    else
      joined.back().bytes = std::max(joined.back().bytes, run.at + run.bytes - joined.back().at);
  }
  runs = std::move(joined);
}

}  // namespace lowtide
