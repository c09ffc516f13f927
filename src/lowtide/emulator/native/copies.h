// Copies: inside the device as a kernel, between host and device through an engine.
#pragma once
#include <ATen/core/Tensor.h>

namespace lowtide::sim {

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking);
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target);
// The bytes of a device tensor as a CPU tensor, when its stream has done what was queued: for collectives over host memory.
at::Tensor host_window(const at::Tensor& t);

}  // namespace lowtide::sim
