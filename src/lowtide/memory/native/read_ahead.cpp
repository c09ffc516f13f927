// See read_ahead.h.
#include "read_ahead.h"

#include "schedule.h"

#include <algorithm>

namespace lowtide {

void ReadAhead::enlist(Range* range, bool of_file) {
  line_[{-1, range->serial}] = range;
  if (of_file) line_[{range->slot.tier, range->slot.offset}] = range;
}

void ReadAhead::forget(Range* range) {
  line_.erase({-1, range->serial});
  auto found = line_.find({range->slot.tier, range->slot.offset});
  if (found != line_.end() && found->second == range) line_.erase(found);
}

void ReadAhead::forget_all() {
  line_.clear();
  streams_.clear();
  credit_ = kMostCredit / 2;
}

void ReadAhead::note_use(Range* range) {
  for (Stream& stream : streams_) {
    Position position = position_in(stream, range);
    if (!is_near(stream.at, position)) continue;
    stream.clock = ++clock_;
    if (position <= stream.at) return;
    stream.at = position;
    ++stream.follows;
    drop_passed(stream);
    stream.due = credit_ > 0 || ++credit_ > 0;
    return;
  }
  begin_stream({-1, range->serial});
  if (auto found = line_.find({range->slot.tier, range->slot.offset}); found != line_.end()) begin_stream(found->first);
}

void ReadAhead::begin_stream(Position at) {
  if (streams_.size() < kStreams) streams_.emplace_back();  // with the lowest clock
  Stream& stream =
      *std::min_element(streams_.begin(), streams_.end(), [](auto& a, auto& b) { return a.clock < b.clock; });
  drop_passed(stream);
  for (const Ahead& ahead : stream.ahead) {
    --credit_;
    ranges().make_oldest(ahead.range);
  }
  stream = Stream{at, 0, ++clock_};
}

ReadAhead::Position ReadAhead::position_in(const Stream& stream, const Range* range) const {
  int32_t line = stream.at.first;
  return line < 0 ? Position{-1, range->serial} : Position{range->slot.tier, range->slot.offset};
}

bool ReadAhead::is_near(Position from, Position to) const {
  if (from.first != to.first) return false;
  auto [before, after] = std::minmax(from, to);
  auto each = line_.upper_bound(before);
  for (int i = 0; i < kNear && each != line_.end() && each->first < after; ++i) ++each;
  return before == after || (each != line_.end() && each->first == after);
}

bool ReadAhead::is_waiting(const Ahead& ahead) {
  const Range* range = ahead.range;
  return range->serial == ahead.serial &&
      (range->place == Place::kArriving || (range->place == Place::kHere && range->unused));
}

void ReadAhead::drop_passed(Stream& stream) {
  std::erase_if(stream.ahead, [&](const Ahead& ahead) {
    bool passed = ahead.position <= stream.at, waiting = is_waiting(ahead);
    if (waiting && !passed) return false;
    bool used = !waiting && ahead.range->serial == ahead.serial && ahead.range->place == Place::kHere;
    if (used)
      credit_ = std::min(credit_ + 1, kMostCredit);
    else if (!passed)
      --credit_;
    return true;
  });
}

bool ReadAhead::expects(const Range* range) const {
  return std::any_of(streams_.begin(), streams_.end(), [&](const Stream& stream) {
    return std::any_of(stream.ahead.begin(), stream.ahead.end(), [&](const Ahead& ahead) {
      return ahead.range == range && is_waiting(ahead);
    });
  });
}

int64_t ReadAhead::bytes_ahead() {
  int64_t total = 0;
  for (Stream& stream : streams_) {
    drop_passed(stream);
    for (const Ahead& ahead : stream.ahead) total += ahead.range->bytes;
  }
  return total;
}

void ReadAhead::go_on() {
  for (Stream& stream : streams_)
    if (std::exchange(stream.due, false)) go_on(stream);
}

void ReadAhead::go_on(Stream& stream) {
  int64_t most = counters.budget.load() / kShare, bytes = bytes_ahead();
  int64_t follows = std::min<int64_t>(stream.follows, 32), count = 0;
  int seen = 0;
  for (auto each = line_.upper_bound(stream.at); each != line_.end() && each->first.first == stream.at.first; ++each) {
    Range* range = each->second;
    if (!is_at(each->first, range)) continue;
    if (++seen > kFurthest || bytes + range->bytes > most) return;
    if (range->place == Place::kArriving || (range->place == Place::kHere && range->unused)) ++count;
    if (count >= int64_t{1} << follows) return;
    if (range->place != Place::kAway) continue;
    if (!ranges().read_ahead(range)) return;
    stream.ahead.push_back({range, range->serial, each->first});
    bytes += range->bytes;
    ++count;
  }
}

bool ReadAhead::any_coming() const {
  return std::any_of(streams_.begin(), streams_.end(), [](const Stream& stream) {
    return std::any_of(stream.ahead.begin(), stream.ahead.end(), [](const Ahead& ahead) {
      return is_waiting(ahead) && ahead.range->place == Place::kArriving && ahead.range->pins == 0;
    });
  });
}

Range* ReadAhead::last() const {
  for (const Stream& stream : streams_)
    for (auto ahead = stream.ahead.rbegin(); ahead != stream.ahead.rend(); ++ahead)
      if (is_waiting(*ahead) && ranges().may_leave(ahead->range)) return ahead->range;
  return nullptr;
}

}  // namespace lowtide
