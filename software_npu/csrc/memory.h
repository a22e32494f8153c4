// The memory of the devices as torch sees it: one allocator, figures per device, pools, aliases on the host.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <map>
#include <memory>
#include <string>
#include <utility>

namespace software_npu {

constexpr auto kNPU = c10::DeviceType::PrivateUse1;

inline bool is_npu(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kNPU; }

// The device of this thread.
int current_device();
void set_current_device(int device);  // refuses what does not exist

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

// Figures of one device by name, in bytes or in numbers of blocks.
std::map<std::string, int64_t> memory_figures(int device);
void reset_peaks(int device);
void empty_cache();
void set_memory_fraction(int device, double fraction);

// Another source of memory than the driver's: functions of a library, called as torch_npu calls them.
struct PluggedAllocator {
  PluggedAllocator(const std::string& library, const std::string& malloc_name, const std::string& free_name);
  void* (*take)(size_t bytes, int device, void* stream);
  void (*give)(void* address, size_t bytes, int device, void* stream);
};

// Where this thread's allocations go; null: to the driver. Returns what it was before.
std::shared_ptr<PluggedAllocator> use_allocator(std::shared_ptr<PluggedAllocator> allocator);

// Puts a tensor's memory, with all that views it, where other processes can map it: this process and a file of its
// own. The other makes bytes of them; the memory counts as the first one's.
std::pair<int, int> share_memory(const at::Tensor& tensor);
at::Tensor shared_memory(int process, int file, int64_t bytes, int device);

// A tensor on the host over the same memory, and what the host's kernels return, back on the device.
// `as_cpu` refuses memory that is asleep.
at::Tensor as_cpu(const at::Tensor& tensor);
at::Tensor as_npu(const at::Tensor& tensor, int device);

// What is known of the use of this memory (races.h); null: nothing.
struct Trace;
Trace* trace_of(const c10::DataPtr& data);

// The same memory, shape and strides in a tensor of its own: what a later `set_` or `.data =` leaves alone.
at::Tensor same_memory(const at::Tensor& tensor);

}  // namespace software_npu
