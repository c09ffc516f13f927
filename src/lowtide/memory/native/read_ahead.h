// What is read before it is used, where no plan says what comes next.
//
// Note [Reading ahead]: a loop over parameters, a save, an evaluation and the first pass of `serve` use ranges in the order in
// which they were made, or in which they lie in their file; a layer may use its weights in another. So uses that go on
// from where others were, give or take a few ranges, are a stream, and what follows is read while the program works, twice as
// much with every such use. It is read into room that is free, or that clean ranges have which were used long ago: nothing
// is written for it. Ranges that came ahead leave before any that has to be written; those of a stream that is forgotten
// leave first of all. Uses that nobody announces are seen where they fault only: what a stream has passed counts as used.
// What comes ahead in vain is counted: where that is the rule (experts that are chosen
// anew for each word), nothing is read ahead until streams have run on for a while.
#pragma once
#include "range.h"

#include <map>
#include <utility>
#include <vector>

namespace lowtide {

class ReadAhead {
 public:
  // A range's bytes are on a tier from here on.
  void enlist(Range* range, bool of_file);
  void forget(Range* range);
  void forget_all();
  // A range is used that nobody had used since it came back.
  void note_use(Range* range);
  // Read on from where the last uses were that were a stream's.
  void go_on();
  // What came ahead, is furthest from its use, and may leave now; or nullptr.
  Range* last() const;
  // Whether anything is on its way that nobody has asked for.
  bool any_coming() const;
  // Whether a range came ahead, and is expected to be used.
  bool expects(const Range* range) const;

 private:
  static constexpr size_t kStreams = 8;
  static constexpr int kNear = 8;        // ranges from one use of a stream to the next, at most
  static constexpr int kFurthest = 64;   // ranges that are looked at for what is away
  static constexpr int64_t kShare = 3;   // what came ahead is at most this part of the budget
  static constexpr int kMostCredit = 16;

  // The number of a file and an offset in it; or -1 and the range's serial.
  using Position = std::pair<int32_t, int64_t>;
  struct Ahead {
    Range* range;
    int64_t serial;
    Position position;
  };
  struct Stream {
    Position at;  // the furthest use
    int64_t follows = 0;
    int64_t clock = 0;  // of the last one
    bool due = false;   // to be read on
    std::vector<Ahead> ahead;
  };

  Position position_in(const Stream& stream, const Range* range) const;
  bool is_near(Position from, Position to) const;
  static bool is_at(Position position, const Range* range) {
    return position.first < 0 || (range->slot.tier == position.first && range->slot.offset == position.second);
  }
  static bool is_waiting(const Ahead& ahead);
  void begin_stream(Position at);
  void drop_passed(Stream& stream);
  int64_t bytes_ahead();
  void go_on(Stream& stream);

  std::map<Position, Range*> line_;  // those that were away at some time
  std::vector<Stream> streams_;
  int64_t clock_ = 0;
  int credit_ = kMostCredit / 2;
};

}  // namespace lowtide
