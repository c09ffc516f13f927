#include "copies.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include "call.h"
#include "span.h"

namespace lowtide::sim {

using at::Tensor;

namespace {

const std::string kCopyName = "aten::copy_";

void copy_on_device(const Tensor& source, const Tensor& target) {
  int from = source.device().index(), to = target.device().index();
  Call of_source, of_target;
  Tensor a = of_source.to_cpu(source), b = of_target.to_cpu(target);
  Device& on = device(to);
  if (from != to) {
    // As CUDA does: both sides' current streams are ordered around the copy, which runs on the source's.
    Stream &theirs = device(from).current_stream(), &ours = on.current_stream();
    theirs.wait(ours.record());
    std::vector<races::Access> accesses;
    add_access(accesses, source, false);
    add_access(accesses, target, true);
    theirs.push([a, b] {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      b.copy_(a);
    }, [&] { races::submit(theirs.agent(), kCopyName, accesses.data(), accesses.size()); });
    ours.wait(theirs.record());
    return;
  }
  std::vector<races::Access> accesses;
  if (races::enabled()) {
    add_access(accesses, source, false);
    add_access(accesses, target, true);
  }
  Stream& stream = on.current_stream();
  auto announce = [&] { races::submit(stream.agent(), kCopyName, accesses.data(), accesses.size()); };
  if (kernel_device >= 0) {
    b.copy_(a);
    return;
  }
  follow_thread_count();
  stream.push([a, b, &on, id = stream.id()] {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    follow_thread_count();
    auto start = on.activity.begin(Work::kKernel);
    b.copy_(a);
    end_kernel(on, start, id, kCopyName);
  }, announce, true);
}

std::string copy_name(bool to_device, size_t nbytes) {
  return std::string(to_device ? "copy h2d of " : "copy d2h of ") + c10::CachingAllocator::format_size(nbytes);
}

// Both sides of one dtype and one dense layout: the link moves plain bytes.
void copy_over_link(bool to_device, const Tensor& host, const Tensor& t, bool non_blocking) {
  Device& on = device(t.device().index());
  Engine& engine = to_device ? on.h2d : on.d2h;
  size_t nbytes = t.numel() * t.element_size();
  char* in_host = static_cast<char*>(host.unsafeGetTensorImpl()->mutable_data());
  char* in_device = on.arena.kernel_address(t.unsafeGetTensorImpl()->mutable_data());
  char *to = to_device ? in_device : in_host, *from = to_device ? in_host : in_device;
  Stream& stream = on.current_stream();
  bool asynchronous = non_blocking && is_pinned(in_host);
  auto announce = [&] {
    races::submit(stream.agent(), copy_name(to_device, nbytes), {{from, nbytes, false}, {to, nbytes, true}});
  };
  if (asynchronous) {
    stream.push([&engine, to, from, nbytes, id = stream.id()] { engine.copy(to, from, nbytes, id); }, announce);
    keep_until_copied(host, to_stream(on.index, stream.id()));
    return;
  }
  stream.announce(announce);
  {
    WithoutGil released;
    stream.begin_own();
    engine.copy(to, from, nbytes, stream.id());
    stream.end_own();
  }
  if (races::enabled()) races::sync_stream(stream.agent());
  on.raise_pending_error();
}

bool is_dense(const Tensor& t) {
  return t.is_non_overlapping_and_dense();
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.strides() == b.strides() && is_dense(a) && is_dense(b) &&
         a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

// A plain tensor of the target's dtype on `where`, laid out as the target if that is dense.
Tensor staging(const Tensor& target, c10::Device where) {
  auto options = target.options().device(where);
  return is_dense(target) ? at::empty_strided(target.sizes(), target.strides(), options)
                          : at::empty(target.sizes(), options);
}

}  // namespace

Tensor copy_from(const Tensor& given, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  Tensor source = given.sizes() == target.sizes() ? given : given.expand(target.sizes());
  if (source.is_privateuseone() && target.is_privateuseone()) {
    copy_on_device(source, target);
    return target;
  }
  bool to_device = target.is_privateuseone();
  c10::DeviceGuard guard(to_device ? target.device() : source.device());
  if (same_bytes(source, target)) {
    copy_over_link(to_device, to_device ? source : target, to_device ? target : source, non_blocking);
    return target;
  }
  // Converted where the values come from, moved as plain bytes, scattered where they go. Conversions block.
  bool plain_target = is_dense(target) && !target.is_conj() && !target.is_neg();
  if (to_device) {
    Tensor converted = staging(target, at::kCPU);
    converted.copy_(source);
    Tensor moved = plain_target ? target : staging(target, target.device());
    copy_over_link(true, converted, moved, false);
    if (!plain_target) copy_on_device(moved, target);
  } else {
    Tensor converted = staging(target, source.device());
    copy_on_device(source, converted);
    Tensor moved = plain_target ? target : staging(target, at::kCPU);
    copy_over_link(false, moved, converted, non_blocking && plain_target);
    if (!plain_target) const_cast<Tensor&>(target).copy_(moved);
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

Tensor host_window(const Tensor& t) {
  Device& on = device(t.device().index());
  on.current_stream().drain();
  if (races::enabled()) races::sync_stream(on.current_stream().agent());
  Call call;
  return call.to_cpu(t);
}

}  // namespace lowtide::sim
