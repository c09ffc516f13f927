// Records: storages that autograd saved, and the threads that move their bytes to a tier and back.
//
// A record holds one reference to its storage. While that is the only one, nobody can read or change the bytes, so they
// may leave: there are no torn copies and no stale ones, whatever the program does with tensors it still holds (R1).
// Threads here never touch Python, except inside a medium that is written in Python; a storage is released, and the
// memory free, the moment its write lands (R4), without the interpreter taking part.
#pragma once
#include "checksum.h"
#include "meter.h"
#include "tier.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace lowtide {

constexpr int64_t kChunk = 8 << 20;
constexpr int64_t kBounce = 1 << 20;

// Where a record's bytes are, and who pays for them.
enum State : int {
  kResident = 0,  // fast memory only
  kLeaving = 1,   // being written; fast memory still pays
  kClean = 2,     // fast memory and tier both hold it; giving up fast memory costs nothing
  kAway = 3,      // the tier only
  kArriving = 4,  // being read; fast memory pays already
};

struct Job;

struct Record {
  int64_t id;
  int64_t bytes;
  c10::Storage storage;  // undefined while away
  State state = kResident;
  int64_t offset = -1;  // of its extent in the tier; -1: none
  int packs = 0;
  bool handed_out = false;  // since it was last written or read; see Note [Handed out]
  bool wanted = false;    // asked for while leaving: stay resident when the write lands
  bool finished = false;  // all packs are gone; only a transfer in flight keeps it
  bool logged_gone = false;  // the log has its end already: an unmanaged step would not have waited for a transfer
  int error = 0;
  uint64_t checksum = 0;
  bool has_checksum = false;
};

struct Pack {
  int64_t record;
  std::vector<int64_t> sizes, strides;
  int64_t storage_offset;
  c10::VariableVersion version;
  uint32_t saved_version;
};

struct Job {
  std::shared_ptr<Record> record;
  bool write;
  char* data;
  int64_t bytes, offset;
  int64_t issued = 0, pending = 0;
  int error = 0;
  uint64_t checksum = 0;
};

struct Completion {
  int64_t record, offset;
  int32_t kind;  // 0: written, 1: read, 2: finished (its extent is free)
  int32_t error;
};

struct Medium {
  std::vector<int> fds;
  int64_t stripe = 8 << 20;
  bool direct = false;
  bool verify = false;
  MediumCall call = nullptr;  // set: a medium written in Python
};

class Mover {
 public:
  std::mutex mutex;
  std::condition_variable changed;  // a record's state changed
  std::unordered_map<int64_t, std::shared_ptr<Record>> records;
  std::unordered_map<int64_t, Pack> packs;
  std::unordered_map<const c10::StorageImpl*, int64_t> by_storage;
  std::vector<int64_t> watched;  // records that somebody else still held when last looked at
  std::vector<Completion> completions;
  std::atomic<int> completion_count{0};
  int64_t next_record = 1, next_pack = 1;
  int64_t leaving_bytes = 0, arriving_bytes = 0;
  int64_t written_bytes = 0, read_bytes = 0;
  Meter meter;
  Medium medium;

  void start(int threads) {
    stopping_ = false;
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  }

  // Nothing new is taken on; what is queued is done. What records keep on the tier is worth nothing afterwards.
  void stop() {
    {
      std::lock_guard<std::mutex> guard(mutex);
      stopping_ = true;
    }
    queued_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
    std::lock_guard<std::mutex> guard(mutex);
    medium = Medium{};  // its descriptors' numbers will soon be somebody else's
    for (auto& [id, record] : records) {
      if (record->state == kClean) record->state = kResident;
      if (record->state == kAway) record->error = kLost;
      record->offset = -1;
    }
  }

  // Forget the writes that have not begun: their records stay where they are.
  void cancel_writes() {
    std::vector<c10::Storage> released;
    int64_t bytes = 0;
    {
      std::lock_guard<std::mutex> guard(mutex);
      for (auto at = writes_.begin(); at != writes_.end();) {
        if ((*at)->issued > 0) {
          ++at;
          continue;
        }
        Record& record = *(*at)->record;
        record.state = kResident;
        leaving_bytes -= record.bytes;
        bytes += record.bytes;
        if (record.finished) released.push_back(finish(record));
        at = writes_.erase(at);
      }
    }
    changed.notify_all();
    released.clear();
    transfer_ended(bytes);
  }

  bool stopping() const {
    return stopping_;
  }

  bool running() const {
    return !threads_.empty();
  }

  void enqueue(std::shared_ptr<Job> job, bool urgent) {
    auto& queue = job->write ? writes_ : reads_;
    if (urgent)
      queue.push_front(std::move(job));
    else
      queue.push_back(std::move(job));
    queued_.notify_all();
  }

  // A demanded read overtakes prefetches that have not begun.
  void hurry(int64_t record) {
    auto at = std::find_if(reads_.begin(), reads_.end(), [&](auto& job) { return job->record->id == record; });
    if (at == reads_.end() || at == reads_.begin()) return;
    auto job = *at;
    reads_.erase(at);
    reads_.push_front(job);
  }

  // Note [Fork]: a direct read that is under way while the process forks may lose its bytes to copy-on-write (open(2)),
  // so a fork waits for the chunks in flight. Not for a medium in Python: its thread may need the GIL that we hold.
  void pause_for_fork() {
    mutex.lock();
    forking_ = true;
    if (medium.call) return;
    std::unique_lock<std::mutex> guard(mutex, std::adopt_lock);
    idle_.wait(guard, [&] { return transferring_ == 0; });
    guard.release();
  }

  void resume_after_fork() {
    forking_ = false;
    mutex.unlock();
    queued_.notify_all();
  }

  // A child has none of our threads, and must not notify conditions on which they waited: glibc would wait for them to
  // leave. The descriptors stay taken, by nothing: whoever opened them will close them again, by their numbers.
  void abandon_in_child() {
    forking_ = false;
    stopping_ = true;
    mutex.unlock();
    for (auto& thread : threads_) thread.detach();
    threads_.clear();
    int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int fd : medium.fds) dup3(nothing, fd, O_CLOEXEC);
    if (nothing >= 0) close(nothing);
    medium.fds.clear();
    reads_.clear();
    writes_.clear();
    transferring_ = 0;
    meter = Meter{};
    for (auto& [id, record] : records) {
      if (record->state == kLeaving) record->state = kResident;
      if (record->state == kArriving) record->state = kAway;
      if (record->state == kAway) record->error = kLost;
    }
  }

 private:
  // Guarded by `mutex`. Returns the job to take a chunk of: reads first, they may be waited for.
  std::shared_ptr<Job> front() {
    for (auto* queue : {&reads_, &writes_})
      if (!queue->empty()) return queue->front();
    return nullptr;
  }

  void work() {
    std::unique_ptr<char, decltype(&free)> bounce(nullptr, &free);
    std::unique_lock<std::mutex> guard(mutex);
    for (;;) {
      queued_.wait(guard, [&] { return !forking_ && (stopping_ || !reads_.empty() || !writes_.empty()); });
      auto job = front();
      if (!job) return;  // stopping, and nothing left to do
      int64_t at = job->issued;
      int64_t n = std::min(kChunk, job->bytes - at);
      job->issued += n;
      ++job->pending;
      if (job->issued == job->bytes) (job->write ? writes_ : reads_).pop_front();
      bool skip = job->error != 0;
      ++transferring_;
      auto begun = meter.begin(job->write);
      guard.unlock();
      int error = skip ? 0 : transfer(*job, at, n, bounce);
      guard.lock();
      --transferring_;
      meter.end(job->write, begun, n, static_cast<double>(n) / static_cast<double>(job->bytes));
      idle_.notify_all();
      if (error && !job->error) job->error = error;
      if (--job->pending == 0 && job->issued == job->bytes) complete(job, guard);
    }
  }

  void complete(const std::shared_ptr<Job>& job, std::unique_lock<std::mutex>& guard) {
    Record& record = *job->record;
    if (medium.verify && !job->error) {
      guard.unlock();
      uint64_t sum = checksum_of(job->data, record.bytes);
      guard.lock();
      if (job->write) {
        record.checksum = sum;
        record.has_checksum = true;
      } else if (record.has_checksum && sum != record.checksum) {
        job->error = kCorrupted;
      }
    }
    c10::Storage released;
    record.error = job->error;
    if (job->write) {
      leaving_bytes -= record.bytes;
      if (job->error) {
        record.state = kResident;  // R4: a failed write keeps the value in memory
      } else {
        written_bytes += record.bytes;
        if (record.handed_out)
          record.state = kResident;
        else if (record.wanted || record.storage.use_count() != 1)
          record.state = kClean;
        else
          released = send_away(record);
      }
      record.wanted = false;
    } else {
      arriving_bytes -= record.bytes;
      if (job->error) {
        by_storage.erase(record.storage.unsafeGetStorageImpl());
        released = std::move(record.storage);
        record.storage = c10::Storage();
        record.state = kAway;
      } else {
        read_bytes += record.bytes;
        record.state = kClean;
      }
    }
    completions.push_back({record.id, record.offset, job->write ? 0 : 1, job->error});
    if (record.finished) {
      c10::Storage last = finish(record);
      if (last) released = std::move(last);
    }
    completion_count.store(static_cast<int>(completions.size()), std::memory_order_release);
    bool evicted = record.finished ? record.logged_gone : record.state == kAway && !job->error;
    guard.unlock();
    changed.notify_all();
    set_evicting(evicted);
    released = c10::Storage();  // the memory is free here
    set_evicting(false);
    transfer_ended(job->bytes);
    guard.lock();
  }

  int transfer(Job& job, int64_t at, int64_t n, std::unique_ptr<char, decltype(&free)>& bounce) {
    if (medium.call) return medium.call(job.write, job.offset + at, job.data + at, n);
    while (n > 0) {
      int64_t where = job.offset + at;
      int64_t stripe = where / medium.stripe, within = where % medium.stripe;
      int64_t count = static_cast<int64_t>(medium.fds.size());
      int fd = medium.fds[stripe % count];
      int64_t file_offset = (stripe / count) * medium.stripe + within;
      int64_t piece = std::min(n, medium.stripe - within);
      int error = file_piece(job, fd, job.data + at, piece, file_offset, bounce);
      if (error) return error;
      at += piece;
      n -= piece;
    }
    return 0;
  }

  // One piece within a stripe. Extents are whole pages, and so are large blocks: they go straight between memory and disk.
  int file_piece(
      Job& job, int fd, char* data, int64_t n, int64_t offset, std::unique_ptr<char, decltype(&free)>& bounce) {
    bool aligned = reinterpret_cast<uintptr_t>(data) % kPage == 0 && reinterpret_cast<uintptr_t>(job.data) % kPage == 0;
    if (!medium.direct || (aligned && n % kPage == 0)) return move_all(fd, job.write, data, n, offset);
    if (aligned && owns_padding(job)) return move_all(fd, job.write, data, round_to_page(n), offset);
    if (!bounce) {
      void* p = nullptr;
      if (posix_memalign(&p, kPage, kBounce)) return ENOMEM;
      bounce.reset(static_cast<char*>(p));
    }
    while (n > 0) {
      int64_t part = std::min(n, kBounce), padded = round_to_page(part);
      if (job.write) {
        std::memcpy(bounce.get(), data, part);
        std::memset(bounce.get() + part, 0, padded - part);
      }
      int error = move_all(fd, job.write, bounce.get(), padded, offset);
      if (error) return error;
      if (!job.write) std::memcpy(data, bounce.get(), part);
      data += part;
      offset += part;
      n -= part;
    }
    return 0;
  }

  // True if the block is one of our page ranges, whose last page belongs to it whole.
  static bool owns_padding(const Job& job) {
    return job.bytes >= kLarge && serial_of(job.record->storage.unsafeGetStorageImpl()) > 0;
  }

  static int move_all(int fd, bool write, char* data, int64_t n, int64_t offset) {
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

 public:
  // Guarded by `mutex`. Forget a record whose packs are gone; the caller destroys the result without the lock.
  c10::Storage finish(Record& record) {
    c10::Storage released;
    if (record.storage) {
      by_storage.erase(record.storage.unsafeGetStorageImpl());
      released = std::move(record.storage);
      record.storage = c10::Storage();
    }
    completions.push_back({record.id, record.offset, 2, 0});
    completion_count.store(static_cast<int>(completions.size()), std::memory_order_release);
    records.erase(record.id);
    return released;
  }

  // Guarded by `mutex`. The caller destroys the result without the lock.
  c10::Storage send_away(Record& record) {
    by_storage.erase(record.storage.unsafeGetStorageImpl());
    c10::Storage released = std::move(record.storage);
    record.storage = c10::Storage();
    record.state = kAway;
    return released;
  }

 private:
  std::deque<std::shared_ptr<Job>> reads_, writes_;
  std::condition_variable queued_;
  std::vector<std::thread> threads_;
  std::condition_variable idle_;
  int transferring_ = 0;
  bool forking_ = false;
  std::atomic<bool> stopping_{true};
};

// Never destroyed: packs may be dropped while the process exits.
inline Mover& mover() {
  static Mover* instance = new Mover;
  return *instance;
}

inline std::shared_ptr<Record> find(int64_t id) {
  auto at = mover().records.find(id);
  return at == mover().records.end() ? nullptr : at->second;
}

}  // namespace lowtide
