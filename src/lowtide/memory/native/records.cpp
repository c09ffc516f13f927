// Packs and records as Python sees them: what autograd saved, and where its bytes are.
#include "mover.h"

#include <ATen/core/Tensor.h>

using namespace lowtide;

extern "C" {

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

// How many hold a tensor's storage: tensors, views of it, Python objects and records.
int64_t lt_storage_holders(c10::TensorImpl* tensor) {
  return tensor->has_storage() ? int64_t(tensor->storage().use_count()) : 0;
}

// Make `gradient` the gradient of `parameter`. Unlike Python's setter this asks for no likeness: the parameter's own data
// may have been exchanged meanwhile.
void lt_put_gradient(c10::TensorImpl* parameter, c10::TensorImpl* gradient) {
  using Pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  parameter->mutable_grad() = at::Tensor(Pointer::reclaim_copy(gradient));
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
    m.meter.wait(+1);
    m.changed.wait_for(guard, std::chrono::milliseconds(timeout_ms), over);
    m.meter.wait(-1);
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
