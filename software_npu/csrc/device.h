// What torch asks of every type of device: guard, hooks, generators.
#pragma once

#include <ATen/core/Generator.h>

namespace software_npu {

void register_device();

// The generator of the host that draws an NPU generator's numbers for one operator: it has the same state at all times.
at::Generator draw(const at::Generator& npu);
const at::Generator& default_generator(int device);

}  // namespace software_npu
