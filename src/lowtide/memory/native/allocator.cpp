// PyTorch's CPU allocator, whose blocks are under the budget (budget.cpp).
#include "remakes.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

namespace lowtide {
namespace {

// So that torch.profiler's memory columns say what they say without us (R5).
void tell_profiler(void* block, int64_t change) {
  if (C10_UNLIKELY(c10::memoryProfilingEnabled()))
    c10::reportMemoryUsageToProfiler(
        block, change, counters.live, counters.reserved, c10::Device(c10::DeviceType::CPU));
}

void delete_block(void* block) {
  if (!block) return;
  int64_t bytes = give_block(block);
  tell_profiler(block, -bytes);
}

class BudgetAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (n == 0) return {nullptr, nullptr, &delete_block, cpu};
    if (C10_UNLIKELY(ranges().troubled.load(std::memory_order_relaxed)) && !remaking)
      if (std::string trouble = trouble_text(); !trouble.empty()) TORCH_CHECK_WITH(OutOfMemoryError, false, trouble);
    void* block = take_block(static_cast<int64_t>(n));
    if (!block) TORCH_CHECK_WITH(OutOfMemoryError, false, refusal_text());
    tell_profiler(block, static_cast<int64_t>(n) >= kLarge ? round_to_page(n) : static_cast<int64_t>(n));
    return {block, block, &delete_block, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &delete_block;
  }
  void copy_data(void* to, const void* from, size_t n) const override {
    default_copy_data(to, from, n);
  }
};

BudgetAllocator allocator;

}  // namespace

c10::Allocator* budget_allocator() {
  return &allocator;
}

bool is_ours(const c10::StorageImpl* storage) {
  const c10::DataPtr& data = storage->data_ptr();
  return data.get_deleter() == &delete_block && data.get() == data.get_context();
}

int64_t serial_of(const c10::StorageImpl* storage) {
  const c10::DataPtr& data = storage->data_ptr();
  return serial_of(data.get_deleter() == &delete_block ? data.get_context() : nullptr, storage->data());
}

}  // namespace lowtide

using namespace lowtide;

extern "C" {

void lt_install() {
  open_budget();
  c10::SetCPUAllocator(budget_allocator(), 100);
}

void lt_uninstall() {
  c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), 100);
  close_budget();
}

int lt_is_ours(const c10::StorageImpl* storage) {
  return is_ours(storage) ? 1 : 0;
}
}
