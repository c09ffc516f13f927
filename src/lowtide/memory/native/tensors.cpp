// Tensors as Python hands them over: taken over, moved, lent, looked at.
#include "schedule.h"
#include "updates.h"

#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

using namespace lowtide;

namespace {

// The memory of a tensor from before: its own allocator's, which frees it once our pages are out of it.
struct Adopted {
  c10::DataPtr original;
  Range* range;
};

void delete_adopted(void* context) {
  auto* adopted = static_cast<Adopted*>(context);
  {
    std::lock_guard<std::mutex> guard(pages().mutex);
    if (logging.load(std::memory_order_relaxed)) log_event(Event::kFree, adopted->range->serial, adopted->range->block);
    if (adopted->range->liens > 0) {
      adopted->range->orphan = true;
      adopted->range->keeper = adopted;
      adopted->range->free_keeper = [](void* keeper) { delete static_cast<Adopted*>(keeper); };
      return;
    }
    ranges().disown(adopted->range);
  }
  delete adopted;
}

Range* range_of(const c10::TensorImpl* tensor) {
  if (!tensor->has_storage()) return nullptr;
  const c10::StorageImpl* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  return storage ? ranges().of_data(storage->data()) : nullptr;
}

// Have a range that is pinned as no update is put off that concerns it. False: that failed, and it is not pinned any more.
bool updated_waiting(int64_t serial, bool changes, std::unique_lock<std::mutex>& guard) {
  if (!updates().any()) return true;
  guard.unlock();
  bool done = updates().run_for(serial, changes);
  guard.lock();
  if (!done) ranges().unpin(ranges().of_serial(serial));
  return done;
}

}  // namespace

extern "C" {

// Have a tensor's bytes be those of a place in a source. Returns 0, or -1: it is no range, or in use.
int lt_refer(c10::TensorImpl* tensor, int tier, int64_t offset) {
  std::unique_lock<std::mutex> guard(pages().mutex);
  Range* range = range_of(tensor);
  if (!range) return -1;
  ranges().pin(range);
  if (!updated_waiting(range->serial, true, guard)) return -1;
  ranges().unpin(range);
  return ranges().refer(range, Slot{tier, offset}) ? 0 : -1;
}

// Take over the memory behind a tensor that PyTorch's own allocator made. Returns its whole pages' bytes, 0 if it stays;
// memory that was taken over before is ours already. What its storage grows by later is under the budget in any case.
int64_t lt_adopt(c10::TensorImpl* tensor) {
  if (!tensor->has_storage()) return 0;
  c10::StorageImpl* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  if (storage->allocator() == c10::GetDefaultCPUAllocator()) storage->set_allocator(budget_allocator());
  const c10::DataPtr& data = storage->data_ptr();
  if (data.get_deleter() == &delete_adopted) return static_cast<Adopted*>(data.get_context())->range->bytes;
  if (!storage->data() || data.get() != data.get_context()) return 0;
  if (data.get_deleter() != c10::GetDefaultCPUAllocator()->raw_deleter()) return 0;
  std::lock_guard<std::mutex> guard(pages().mutex);
  Range* range = ranges().adopt(static_cast<char*>(data.get()), static_cast<int64_t>(storage->nbytes()));
  if (!range) return 0;
  void* address = data.get();
  auto* adopted = new Adopted{c10::DataPtr(), range};
  adopted->original = storage->set_data_ptr(
      c10::DataPtr(address, adopted, &delete_adopted, c10::Device(c10::DeviceType::CPU)));
  return range->bytes;
}

// Start to give a tensor's pages up. Returns 0, or -1 if they cannot leave now.
int lt_leave(c10::TensorImpl* tensor, int tier, int coder) {
  std::lock_guard<std::mutex> guard(pages().mutex);
  Range* range = range_of(tensor);
  return range && ranges().leave(range, tier, false, coder) ? 0 : -1;
}

// Start to have a tensor's pages in slow memory, where it is touched in place. Returns 0, or -1: not now.
int lt_place_in(c10::TensorImpl* tensor, int tier) {
  std::lock_guard<std::mutex> guard(pages().mutex);
  Range* range = range_of(tensor);
  return range && ranges().leave(range, tier, true) ? 0 : -1;
}

// Start to have a tensor's pages in fast memory. Returns 0, or -1: not now.
int lt_fetch(c10::TensorImpl* tensor) {
  std::lock_guard<std::mutex> guard(pages().mutex);
  Range* range = range_of(tensor);
  return range && ranges().prefetch(range) ? 0 : -1;
}

// The serial number of the block behind a tensor; below zero: memory that is not ours; 0: none.
int64_t lt_serial_of_tensor(c10::TensorImpl* tensor) {
  if (!tensor->has_storage()) return 0;
  const c10::StorageImpl* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  return storage && storage->nbytes() > 0 ? serial_of(storage) : 0;
}

// Where a tensor's bytes are: 0 here, 1 leaving, 2 away, 3 arriving, 4 in slow memory; -1: it is not a range.
int lt_place(c10::TensorImpl* tensor) {
  std::lock_guard<std::mutex> guard(pages().mutex);
  Range* range = range_of(tensor);
  return range ? static_cast<int>(range->place) : -1;
}

// Bring the bytes behind a tensor or a storage back, and keep them until lt_take_back: the kernel does not fault, it fails.
// Returns the range's serial, or 0: it is none, or its bytes cannot be read.
int64_t lt_lend_storage(c10::StorageImpl* storage) {
  std::unique_lock<std::mutex> guard(pages().mutex);
  Range* range = ranges().of_data(storage->data());
  if (!range) return 0;
  int64_t serial = range->serial;
  // Whoever has the address may write.
  ranges().pin(range);
  if (!updated_waiting(serial, true, guard)) return 0;
  remakes().have_waiting(remakes().dependents(range), guard, false);
  if (Ranges::is_discarded(range)) remakes().have_waiting({serial}, guard, true);
  if (ranges().bring_waiting(range, guard, true)) {
    ranges().touch(range, true);
    ranges().read_on();
    ranges().note_write(range);
    ++range->lent;
    return serial;
  }
  if (range->serial == serial) ranges().unpin(range);
  return 0;
}

int64_t lt_lend(c10::TensorImpl* tensor) {
  return tensor->has_storage() ? lt_lend_storage(tensor->unsafe_storage().unsafeGetStorageImpl()) : 0;
}

// Bring the bytes behind a storage or a tensor back for whoever only reads them, and keep them until lt_unpin: they stay
// clean. Returns the range's serial, 0: it is none, or -1: its bytes cannot be read.
int64_t lt_lend_storage_to_read(c10::StorageImpl* storage) {
  std::unique_lock<std::mutex> guard(pages().mutex);
  Range* range = ranges().of_data(storage->data());
  if (!range) return 0;
  int64_t serial = range->serial;
  ranges().pin(range);
  if (!updated_waiting(serial, false, guard)) return -1;
  if (Ranges::is_discarded(range)) remakes().have_waiting({serial}, guard, true);
  if (ranges().bring_waiting(range, guard, true)) {
    ranges().touch(range, false);
    ranges().read_on();
    return serial;
  }
  if (range->serial == serial) ranges().unpin(range);
  return -1;
}

int64_t lt_lend_to_read(c10::TensorImpl* tensor) {
  return tensor->has_storage() ? lt_lend_storage_to_read(tensor->unsafe_storage().unsafeGetStorageImpl()) : 0;
}

// A number that a tensor's bytes have as long as they are unchanged; 0: whether they change is not known now.
int64_t lt_version(c10::TensorImpl* tensor) {
  std::lock_guard<std::mutex> guard(pages().mutex);
  Range* range = range_of(tensor);
  bool known = range && !range->barred && ranges().is_clean(range) && !ranges().tiers[range->slot.tier].addressable && range->lent == 0;
  return known ? range->copy : 0;
}
}
