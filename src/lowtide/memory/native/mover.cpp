// Records: storages that autograd saved, and the threads that move their bytes to a tier and back.
//
// A record holds one reference to its storage. While that is the only one, nobody can read or change the bytes, so they
// may leave: there are no torn copies and no stale ones, whatever the program does with tensors it still holds (R1).
// Threads here never touch Python, except inside a medium that is written in Python; a storage is released, and the
// memory free, the moment its write lands (R4), without the interpreter taking part.
#include "lowtide.h"

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
namespace {

constexpr int64_t kChunk = 8 << 20;
constexpr int64_t kBounce = 1 << 20;
constexpr int kShortRead = 10001;  // not an errno: fewer bytes than were written
constexpr int kCorrupted = 10002;  // not an errno: another checksum than was written
constexpr int kLost = 10003;       // not an errno: the tier was closed before the bytes were asked for again

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

using MediumCall = int (*)(int write, int64_t offset, void* data, int64_t bytes);

struct Medium {
  std::vector<int> fds;
  int64_t stripe = 8 << 20;
  bool direct = false;
  bool verify = false;
  MediumCall call = nullptr;  // set: a medium written in Python
};

// A 64-bit checksum in four independent lanes (each step is invertible, so any single changed word changes it).
uint64_t checksum_of(const char* data, int64_t bytes) {
  constexpr uint64_t kMul = 0x9E3779B97F4A7C15ull;
  uint64_t lane[4] = {1, 2, 3, 4};
  int64_t i = 0;
  for (; i + 32 <= bytes; i += 32)
    for (int k = 0; k < 4; ++k) {
      uint64_t word;
      std::memcpy(&word, data + i + 8 * k, 8);
      lane[k] = (lane[k] ^ word) * kMul;
      lane[k] ^= lane[k] >> 29;
    }
  uint64_t sum = static_cast<uint64_t>(bytes);
  for (; i < bytes; ++i) sum = (sum ^ static_cast<unsigned char>(data[i])) * kMul;
  for (uint64_t l : lane) sum = ((sum ^ l) * kMul) ^ (sum >> 31);
  return sum;
}

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
      guard.unlock();
      int error = skip ? 0 : transfer(*job, at, n, bounce);
      guard.lock();
      --transferring_;
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
Mover& mover() {
  static Mover* instance = new Mover;
  return *instance;
}

std::shared_ptr<Record> find(int64_t id) {
  auto at = mover().records.find(id);
  return at == mover().records.end() ? nullptr : at->second;
}

void pause_for_fork() {
  mover().pause_for_fork();
}
void resume_after_fork() {
  mover().resume_after_fork();
}
void after_fork_in_child() {
  mover().abandon_in_child();
}

}  // namespace
}  // namespace lowtide

using namespace lowtide;

extern "C" {

// Use these files, or `call` if it is set, as the tier below; returns 0, or -1 if one is in use already.
int lt_mover_start(
    const int* fds, int fd_count, int64_t stripe, int direct, int verify, int threads, MediumCall call) {
  survive_forks();  // first: the movers take their own lock before the budget's
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(&pause_for_fork, &resume_after_fork, &after_fork_in_child); });
  Mover& m = mover();
  if (m.running()) return -1;
  m.medium = Medium{std::vector<int>(fds, fds + fd_count), stripe, direct != 0, verify != 0, call};
  m.written_bytes = m.read_bytes = 0;
  m.start(threads);
  return 0;
}

// Finish what is queued and join the threads.
void lt_mover_stop() {
  WithoutGil released;
  if (!in_forked_child()) mover().stop();
}

// Forget the writes that have not begun: for an end that is near.
void lt_mover_cancel_writes() {
  WithoutGil released;
  if (!in_forked_child()) mover().cancel_writes();
}

// leaving, arriving, written, read, records
void lt_mover_counters(int64_t* out) {
  Mover& m = mover();
  std::lock_guard<std::mutex> guard(m.mutex);
  out[0] = m.leaving_bytes;
  out[1] = m.arriving_bytes;
  out[2] = m.written_bytes;
  out[3] = m.read_bytes;
  out[4] = static_cast<int64_t>(m.records.size());
}

// The bytes of the storage behind a tensor; -1 if its memory is not ours: numpy's, a file's, another process's. Such memory
// can change behind the storage's back, so it never moves (R1), and moving it would free nothing.
int64_t lt_storage_bytes(c10::TensorImpl* tensor) {
  if (!tensor->has_storage()) return -1;
  const c10::StorageImpl* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  if (!storage) return -1;
  if (storage->nbytes() == 0) return 0;
  return is_ours(storage) ? static_cast<int64_t>(storage->nbytes()) : -1;
}

// The serial number of the block behind a tensor; below zero: memory that is not ours; 0: none.
int64_t lt_serial_of_tensor(c10::TensorImpl* tensor) {
  if (!tensor->has_storage()) return 0;
  const c10::StorageImpl* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  return storage && storage->nbytes() > 0 ? serial_of(storage) : 0;
}

// 1 if others than tensors reach the memory behind a tensor: PyTorch marks what it lends to numpy, maps or shares.
int lt_is_shared(c10::TensorImpl* tensor) {
  if (!tensor->has_storage()) return 1;
  const c10::StorageImpl* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  return storage && storage->resizable() ? 0 : 1;
}

// Make `alias` (empty, of the same dtype) the same memory as `tensor`, with its version but without its graph.
int lt_alias(c10::TensorImpl* tensor, c10::TensorImpl* alias) try {
  alias->set_version_counter(tensor->version_counter());
  alias->set_storage_keep_dtype(tensor->storage());
  alias->set_sizes_and_strides(tensor->sizes(), tensor->strides(), tensor->storage_offset());
  return 0;
} catch (...) {
  return -1;  // C++ exceptions end here: ctypes cannot pass them on
}

// Note a saved tensor. out: record, 1 if the record is new, storage bytes, version now. Returns the pack.
int64_t lt_pack(c10::TensorImpl* tensor, int64_t* out) try {
  Mover& m = mover();
  const c10::Storage& storage = tensor->storage();
  Pack p;  // made first: a tensor without sizes throws before anything is noted
  p.sizes = tensor->sizes().vec();
  p.strides = tensor->strides().vec();
  p.storage_offset = tensor->storage_offset();
  p.version = tensor->version_counter();
  p.saved_version = p.version.enabled() ? p.version.current_version() : 0;
  std::lock_guard<std::mutex> guard(m.mutex);
  auto known = m.by_storage.find(storage.unsafeGetStorageImpl());
  bool is_new = known == m.by_storage.end();
  int64_t id = is_new ? m.next_record++ : known->second;
  if (is_new) {
    auto record = std::make_shared<Record>();
    record->id = id;
    record->bytes = static_cast<int64_t>(storage.nbytes());
    record->storage = storage;
    m.records.emplace(id, record);
    m.by_storage.emplace(storage.unsafeGetStorageImpl(), id);
    m.watched.push_back(id);
  }
  auto& record = m.records.at(id);
  ++record->packs;
  record->finished = false;  // saved again while its last transfer was still under way
  int64_t pack = m.next_pack++;
  p.record = id;
  out[0] = id;
  out[1] = is_new;
  out[2] = record->bytes;
  out[3] = p.saved_version;
  if (logging.load(std::memory_order_relaxed))
    log_event(Event::kPack, id, serial_of(storage.unsafeGetStorageImpl()), record->bytes);
  m.packs.emplace(pack, std::move(p));
  return pack;
} catch (...) {
  return -1;  // C++ exceptions end here: ctypes cannot pass them on
}

// The version of the saved tensor now: another one than at the pack means that it was changed in place since.
int64_t lt_pack_version(int64_t pack) try {
  Mover& m = mover();
  std::lock_guard<std::mutex> guard(m.mutex);
  const Pack& p = m.packs.at(pack);
  return p.version.enabled() ? p.version.current_version() : 0;
} catch (...) {
  return -1;  // C++ exceptions end here: ctypes cannot pass them on
}

// Make `tensor` (empty, of the right dtype) the saved tensor of a resident record. Returns 0, or -1 if it is not resident.
int lt_pack_attach(int64_t pack, c10::TensorImpl* tensor) try {
  Mover& m = mover();
  std::lock_guard<std::mutex> guard(m.mutex);
  const Pack& p = m.packs.at(pack);
  Record& record = *m.records.at(p.record);
  if (record.state == kAway || record.state == kArriving) return -1;
  // Note [Handed out]: whoever gets the tensor may change it without autograd noticing (`x.data`), so the tier's copy is
  // worth nothing from here on: the record counts as never written.
  if (record.state == kClean) record.state = kResident;
  record.handed_out = true;
  // A change of what is handed out is a change of what was saved, as it is without hooks.
  if (p.version.enabled()) tensor->set_version_counter(p.version);
  tensor->set_storage_keep_dtype(record.storage);
  tensor->set_sizes_and_strides(p.sizes, p.strides, p.storage_offset);
  return 0;
} catch (...) {
  return -2;  // C++ exceptions end here: ctypes cannot pass them on
}

// Forget a saved tensor. out: its record, its extent's offset or -1. Returns 1 if the record and its extent are free now.
int lt_pack_close(int64_t pack, int64_t* out) {
  Mover& m = mover();
  c10::Storage released;
  std::unique_lock<std::mutex> guard(m.mutex);
  out[0] = out[1] = -1;
  auto at = m.packs.find(pack);
  if (at == m.packs.end()) return 0;
  auto record = m.records.at(at->second.record);
  m.packs.erase(at);
  if (--record->packs > 0) return 0;
  if (logging.load(std::memory_order_relaxed)) {
    bool moving = record->state == kLeaving || record->state == kArriving;
    record->logged_gone = moving && record->storage.use_count() == 1;
    log_event(Event::kGone, record->id, record->state == kAway || record->logged_gone, record->bytes);
  }
  if (record->state == kLeaving || record->state == kArriving) {
    record->finished = true;
    return 0;
  }
  out[0] = record->id;
  out[1] = record->offset;
  if (record->storage) {
    m.by_storage.erase(record->storage.unsafeGetStorageImpl());
    released = std::move(record->storage);
  }
  m.records.erase(record->id);
  guard.unlock();
  return 1;  // `released` goes here, without the lock
}

// Look at a record again: it was held elsewhere, or is being used.
void lt_watch(int64_t id) {
  Mover& m = mover();
  std::lock_guard<std::mutex> guard(m.mutex);
  if (std::find(m.watched.begin(), m.watched.end(), id) == m.watched.end()) m.watched.push_back(id);
}

// Take up to `most` records that nobody but Lowtide holds any more since the last call. Returns how many.
int lt_take_sole(int64_t* out, int most) {
  Mover& m = mover();
  std::lock_guard<std::mutex> guard(m.mutex);
  int found = 0;
  size_t kept = 0;
  for (int64_t id : m.watched) {
    auto record = find(id);
    if (!record) continue;
    if (found < most && record->storage && record->storage.use_count() == 1) {
      out[found++] = id;
      if (logging.load(std::memory_order_relaxed)) log_event(Event::kSole, id);
    } else {
      m.watched[kept++] = id;
    }
  }
  m.watched.resize(kept);
  return found;
}

int lt_record_state(int64_t id) {
  Mover& m = mover();
  std::lock_guard<std::mutex> guard(m.mutex);
  auto record = find(id);
  return record ? record->state : -1;
}

// Start to write a sole resident record at `offset`. Returns 0, or -1 if it is gone, held elsewhere or not resident.
int lt_record_write(int64_t id, int64_t offset) {
  Mover& m = mover();
  std::lock_guard<std::mutex> guard(m.mutex);
  auto record = find(id);
  if (m.stopping() || !record || record->state != kResident || record->storage.use_count() != 1) return -1;
  if (static_cast<int64_t>(record->storage.nbytes()) != record->bytes) return -1;  // resized by its owner: not ours to move
  auto job = std::make_shared<Job>();
  job->record = record;
  job->write = true;
  job->data = static_cast<char*>(const_cast<void*>(record->storage.data()));
  job->bytes = record->bytes;
  job->offset = offset;
  record->state = kLeaving;
  record->handed_out = false;
  record->offset = offset;
  record->wanted = false;
  m.leaving_bytes += record->bytes;
  transfer_began(record->bytes);
  m.enqueue(job, false);
  return 0;
}

// Keep a leaving record in fast memory. Returns its state afterwards: anything but away means that it is there.
int lt_record_keep(int64_t id) {
  Mover& m = mover();
  std::lock_guard<std::mutex> guard(m.mutex);
  auto record = find(id);
  if (!record) return -1;
  if (record->state == kLeaving) record->wanted = true;
  return record->state;
}

// Give up the fast bytes of a sole clean record at once. Returns its bytes, 0 if that is not possible now.
int64_t lt_record_drop(int64_t id) {
  Mover& m = mover();
  c10::Storage released;
  int64_t bytes = 0;
  {
    std::lock_guard<std::mutex> guard(m.mutex);
    auto record = find(id);
    if (!record || record->state != kClean || record->storage.use_count() != 1) return 0;
    bytes = record->bytes;
    released = m.send_away(*record);
  }
  set_evicting(true);
  released = c10::Storage();
  set_evicting(false);
  return bytes;
}

// Give up the fast bytes of a sole resident record without a copy: whoever does that can make them again. Returns 0, or -1
// if that is not possible now.
int lt_record_discard(int64_t id) {
  Mover& m = mover();
  c10::Storage released;
  {
    std::lock_guard<std::mutex> guard(m.mutex);
    auto record = find(id);
    if (!record || record->state != kResident || record->storage.use_count() != 1) return -1;
    if (static_cast<int64_t>(record->storage.nbytes()) != record->bytes) return -1;  // resized by its owner
    record->has_checksum = m.medium.verify;
    if (m.medium.verify)
      record->checksum = checksum_of(static_cast<const char*>(record->storage.data()), record->bytes);
    released = m.send_away(*record);
    record->offset = -1;
  }
  set_evicting(true);
  released = c10::Storage();
  set_evicting(false);
  return 0;
}

// Make the storage of `tensor` that of a record which was given up without a copy. Returns 0, -1 if it is not one or not
// its size, -2 if it has another checksum.
int lt_record_adopt(int64_t id, c10::TensorImpl* tensor) {
  Mover& m = mover();
  if (!tensor->has_storage()) return -1;
  const c10::Storage& storage = tensor->unsafe_storage();
  if (!is_ours(storage.unsafeGetStorageImpl())) return -1;
  std::lock_guard<std::mutex> guard(m.mutex);
  auto record = find(id);
  if (!record || record->state != kAway || record->offset >= 0) return -1;
  if (static_cast<int64_t>(storage.nbytes()) != record->bytes) return -1;
  if (record->has_checksum && checksum_of(static_cast<const char*>(storage.data()), record->bytes) != record->checksum)
    return -2;
  if (!m.by_storage.emplace(storage.unsafeGetStorageImpl(), id).second) return -1;
  record->storage = storage;
  record->state = kResident;
  record->handed_out = false;
  record->error = 0;
  return 0;
}

// Make `tensor` (empty, of the dtype wanted) all of a resident record's storage. Returns 0, or -1 if it is not resident.
int lt_record_attach(int64_t id, c10::TensorImpl* tensor) try {
  Mover& m = mover();
  std::lock_guard<std::mutex> guard(m.mutex);
  Record& record = *m.records.at(id);
  if (record.state == kAway || record.state == kArriving) return -1;
  if (record.state == kClean) record.state = kResident;  // see Note [Handed out]
  record.handed_out = true;
  tensor->set_storage_keep_dtype(record.storage);
  tensor->set_sizes_contiguous({record.bytes / static_cast<int64_t>(tensor->dtype().itemsize())});
  return 0;
} catch (...) {
  return -2;  // C++ exceptions end here: ctypes cannot pass them on
}

// 1 if others than tensors reach a record's memory; see `lt_is_shared`. What is away is nobody's.
int lt_record_is_shared(int64_t id) {
  Mover& m = mover();
  std::lock_guard<std::mutex> guard(m.mutex);
  auto record = find(id);
  return record && record->storage && !record->storage.resizable() ? 1 : 0;
}

// Start to read a record that is away. Returns 0: under way or there; 1: no room (only without `demand`); -1: gone,
// or its tier is; -2: no room.
int lt_record_read(int64_t id, int demand) {
  Mover& m = mover();
  int64_t bytes;
  {
    std::lock_guard<std::mutex> guard(m.mutex);
    auto record = find(id);
    if (!record) return -1;
    if (record->state != kAway) {
      if (demand && record->state == kArriving) m.hurry(id);
      return 0;
    }
    if (m.stopping() || record->offset < 0) return -1;
    bytes = record->bytes;
  }
  set_fetching_record(id);
  void* block = take_block(bytes, demand ? Patience::kWait : Patience::kRefuse);
  set_fetching_record(-1);
  if (!block) return demand ? -2 : 1;
  c10::Allocator* allocator = budget_allocator();
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      bytes,
      c10::DataPtr(block, block, allocator->raw_deleter(), c10::Device(c10::DeviceType::CPU)),
      allocator,
      /*resizable=*/true));
  std::lock_guard<std::mutex> guard(m.mutex);
  auto record = find(id);
  if (!record || m.stopping()) return -1;
  if (record->state != kAway) return 0;  // another thread was faster; this block goes back
  auto job = std::make_shared<Job>();
  job->record = record;
  job->write = false;
  job->data = static_cast<char*>(block);
  job->bytes = bytes;
  job->offset = record->offset;
  m.by_storage.emplace(storage.unsafeGetStorageImpl(), id);
  record->storage = std::move(storage);
  record->state = kArriving;
  m.arriving_bytes += bytes;
  transfer_began(bytes);
  m.enqueue(job, demand != 0);
  return 0;
}

// Wait until a record's transfer is over. Returns its state, or -1 if it is gone, or -2 after the timeout.
int lt_record_wait(int64_t id, int64_t timeout_ms) {
  Mover& m = mover();
  int64_t start = now_ns();
  int state;
  {
    WithoutGil released;
    std::unique_lock<std::mutex> guard(m.mutex);
    auto record = find(id);
    if (!record) return -1;
    auto over = [&] { return record->state != kArriving && record->state != kLeaving; };
    if (over()) return record->state;
    m.changed.wait_for(guard, std::chrono::milliseconds(timeout_ms), over);
    state = over() ? record->state : -2;
  }
  add_stall_ns(now_ns() - start);
  return state;
}

// The error of a record's last transfer: an errno, or one of the codes at the top.
int lt_record_error(int64_t id) {
  Mover& m = mover();
  std::lock_guard<std::mutex> guard(m.mutex);
  auto record = find(id);
  return record ? record->error : 0;
}

int lt_completion_count() {
  return mover().completion_count.load(std::memory_order_acquire);
}

// Take up to `most` completions as (record, offset, kind, error) each. Returns how many.
int lt_take_completions(int64_t* out, int most) {
  Mover& m = mover();
  std::lock_guard<std::mutex> guard(m.mutex);
  int n = std::min<int>(most, static_cast<int>(m.completions.size()));
  for (int i = 0; i < n; ++i) {
    const Completion& c = m.completions[i];
    out[4 * i] = c.record;
    out[4 * i + 1] = c.offset;
    out[4 * i + 2] = c.kind;
    out[4 * i + 3] = c.error;
  }
  m.completions.erase(m.completions.begin(), m.completions.begin() + n);
  m.completion_count.store(static_cast<int>(m.completions.size()), std::memory_order_release);
  return n;
}

void lt_mark_unpack(int64_t pack) {
  if (!logging.load(std::memory_order_relaxed)) return;
  Mover& m = mover();
  std::lock_guard<std::mutex> guard(m.mutex);
  auto at = m.packs.find(pack);
  if (at != m.packs.end()) log_event(Event::kUnpack, at->second.record);
}
}
