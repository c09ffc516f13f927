// A tier: where bytes live when they are not in fast memory. Files that are striped, a medium with an engine of its own, such as
// a server, or one written in Python; or one file that is slow memory, which ranges map in place.
#pragma once
#include "range.h"
#include "slow.h"
#include "source.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <set>
#include <vector>

namespace lowtide {

// Which bytes of a tier belong to whom: best fit, split, coalesce; whole pages.
class Extents {
 public:
  explicit Extents(int64_t capacity = -1) : capacity_(capacity) {}

  // An offset for `n` bytes, or -1: the tier is full.
  int64_t take(int64_t n) {
    auto fit = by_size_.lower_bound({n, 0});
    int64_t offset;
    if (fit != by_size_.end()) {
      auto [length, at] = *fit;
      offset = at;
      remove(at, length);
      if (length > n) add(at + n, length - n);
    } else {
      offset = end_;
      if (capacity_ >= 0 && offset + n > capacity_) return -1;
      end_ += n;
    }
    used_ += n;
    return offset;
  }

  void give(int64_t offset, int64_t n) {
    used_ -= n;
    auto after = by_start_.lower_bound(offset);
    if (after != by_start_.end() && after->first == offset + n) {
      n += after->second;
      remove(after->first, after->second);
    }
    auto before = by_start_.lower_bound(offset);
    if (before != by_start_.begin()) {
      --before;
      if (before->first + before->second == offset) {
        offset = before->first;
        n += before->second;
        remove(before->first, before->second);
      }
    }
    if (offset + n == end_)
      end_ = offset;
    else
      add(offset, n);
  }

  int64_t used() const {
    return used_;
  }

  // What is left, in however many pieces; a large number where no bound is known.
  int64_t room() const {
    return capacity_ < 0 ? INT64_MAX - used_ : capacity_ - used_;
  }

  // How many free bytes lie right before `offset`.
  int64_t free_before(int64_t offset) const {
    auto after = by_start_.lower_bound(offset);
    if (after == by_start_.begin()) return 0;
    auto [start, length] = *std::prev(after);
    return start + length == offset ? length : 0;
  }

  // Move an extent down by all bytes that are free right before it. Returns its new offset.
  int64_t slide(int64_t offset, int64_t n) {
    int64_t to = offset - free_before(offset);
    give(offset, n);
    used_ += n;
    if (to == end_) {
      end_ += n;
      return to;
    }
    int64_t length = by_start_.at(to);
    remove(to, length);
    if (length > n) add(to + n, length - n);
    return to;
  }

 private:
  void add(int64_t offset, int64_t n) {
    by_start_.emplace(offset, n);
    by_size_.emplace(n, offset);
  }
  void remove(int64_t offset, int64_t n) {
    by_start_.erase(offset);
    by_size_.erase({n, offset});
  }

  int64_t capacity_, end_ = 0, used_ = 0;
  std::map<int64_t, int64_t> by_start_;
  std::set<std::pair<int64_t, int64_t>> by_size_;
};

constexpr int kShortRead = 10001;  // not an errno: fewer bytes than were written
constexpr int kCorrupted = 10002;  // not an errno: another checksum than was written
constexpr int kNotRemade = 10004;  // not an errno: the calls that made it could not run again
constexpr int kLost = 10003;       // not an errno: the tier was closed before the bytes were asked for again

// Moves bytes of a medium that is written in Python, on a mover's thread. Returns an errno or one of the codes above.
using MediumCall = int (*)(int write, int64_t offset, void* data, int64_t bytes);

// The same of a medium that has native functions for it, and whether nothing is known against what it holds.
using EngineCall = int (*)(void* context, int write, int64_t offset, void* data, int64_t bytes);
using AliveCall = int (*)(void* context);

struct Tier {
  std::vector<int> fds;
  int64_t stripe = 8 << 20;
  MediumCall call = nullptr;
  EngineCall engine = nullptr;
  AliveCall alive = nullptr;
  void* context = nullptr;
  bool addressable = false;  // its pages can be mapped: operators compute on them
  SlowRates rates;           // of an addressable tier
  MigrationLink link;
  std::shared_ptr<const Source> source;  // it is files to read from, and takes nothing
  Extents extents;
  int64_t written_bytes = 0, read_bytes = 0;
  int64_t laid_out = 0;  // bytes of an addressable tier's file that are allocated

  // An offset for `n` bytes, or -1: the tier is full, for the reason that `error` says. What is mapped must be allocated
  // before: a full disk could not be told to whoever writes there.
  int64_t take(int64_t n, int& error) {
    int64_t offset = extents.take(n);
    error = ENOSPC;
    if (offset < 0 || !addressable || offset + n <= laid_out) return offset;
    constexpr int64_t kGrowth = 16 << 20;
    int64_t more = std::max(offset + n - laid_out, kGrowth);
    error = posix_fallocate(fds[0], laid_out, more);
    if (error) error = posix_fallocate(fds[0], laid_out, more = offset + n - laid_out);
    if (error) {
      extents.give(offset, n);
      return -1;
    }
    laid_out += more;
    return offset;
  }

  // Whether it reads what leaves at its addresses: files are written from pages that the kernel holds meanwhile.
  bool reads_addresses() const {
    return call || engine;
  }

  // Whether it still holds what it took, as far as that can be told without asking.
  bool holds() const {
    return !alive || alive(context);
  }

  // Move whole pages; blocks. Returns 0, an errno or one of the codes above.
  int move(bool write, char* data, int64_t n, int64_t offset) const {
    if (source) return write ? EROFS : source->read(data, n, offset);
    if (call) return call(write, offset, data, n);
    if (engine) return engine(context, write, offset, data, n);
    auto files = static_cast<int64_t>(fds.size());
    while (n > 0) {
      int64_t number = offset / stripe, within = offset % stripe;
      int64_t piece = files == 1 ? n : std::min(n, stripe - within);
      int64_t at = files == 1 ? offset : (number / files) * stripe + within;
      int error = move_in_file(fds[files == 1 ? 0 : number % files], write, data, piece, at);
      if (error) return error;
      data += piece;
      offset += piece;
      n -= piece;
    }
    return 0;
  }

 private:
  static int move_in_file(int fd, bool write, char* data, int64_t n, int64_t offset) {
    while (n > 0) {
      ssize_t moved = write ? pwrite(fd, data, n, offset) : pread(fd, data, n, offset);
      if (moved < 0) {
        if (errno == EINTR) continue;
        return errno;
      }
      if (moved == 0) return write ? EIO : kShortRead;
      data += moved;
      offset += moved;
      n -= moved;
    }
    return 0;
  }
};

}  // namespace lowtide
