#include "memory.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/impl/alloc_cpu.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "driver.h"
#include "races.h"

namespace software_npu {
namespace {

constexpr int64_t kBlock = 512;  // an allocation takes whole blocks, as on the device

struct Figures {
  int64_t allocated = 0, allocated_peak = 0;
  int64_t reserved = 0, reserved_peak = 0;  // freed blocks stay reserved until empty_cache
  int64_t requested = 0, active = 0, allocations = 0, out_of_memory = 0;
  int64_t limit = INT64_MAX;
};
std::mutex figures_lock;
Figures figures[kMostDevices];

thread_local int this_device = 0;
thread_local std::shared_ptr<PluggedAllocator> plugged;

std::string readable(int64_t bytes) {
  char text[32];
  if (bytes < 1 << 20) {
    std::snprintf(text, sizeof text, "%.2f KiB", bytes / 1024.0);
  } else if (bytes < 1 << 30) {
    std::snprintf(text, sizeof text, "%.2f MiB", bytes / 1048576.0);
  } else {
    std::snprintf(text, sizeof text, "%.2f GiB", bytes / 1073741824.0);
  }
  return text;
}

int64_t whole_blocks(int64_t bytes) { return (bytes + kBlock - 1) / kBlock * kBlock; }

[[noreturn]] void refuse(int device, int64_t bytes) {
  Figures now;
  {
    std::lock_guard<std::mutex> guard(figures_lock);
    ++figures[device].out_of_memory;
    now = figures[device];
  }
  const int64_t taken = snpu_used_bytes(device), others = taken - snpu_own_bytes(device);
  TORCH_CHECK_WITH(OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", readable(bytes), " (NPU ",
                   device, "; ", readable(snpu_total_bytes()), " total capacity; ", readable(now.allocated),
                   " already allocated; ", readable(snpu_total_bytes() - taken), " free; ", readable(now.reserved),
                   " reserved in total by PyTorch)", others ? "; other processes hold " + readable(others) : "");
  std::abort();  // not reached
}

// Enters `bytes` of a device into the books; `from_driver`: they are the driver's, not a plugged allocator's.
void enter(int device, int64_t bytes, bool from_driver) {
  const int64_t size = whole_blocks(bytes);
  std::unique_lock<std::mutex> guard(figures_lock);
  Figures& now = figures[device];
  if (from_driver && (now.allocated + size > now.limit || !snpu_take(device, size))) {
    guard.unlock();
    refuse(device, bytes);
  }
  now.allocated += size;
  now.requested += bytes;
  now.active += 1;
  now.allocations += 1;
  now.allocated_peak = std::max(now.allocated_peak, now.allocated);
  now.reserved = std::max(now.reserved, now.allocated);
  now.reserved_peak = std::max(now.reserved_peak, now.reserved);
}

void leave(int device, int64_t bytes, bool from_driver) {
  const int64_t size = whole_blocks(bytes);
  if (from_driver) snpu_give(device, size);
  std::lock_guard<std::mutex> guard(figures_lock);
  figures[device].allocated -= size;
  figures[device].requested -= bytes;
  figures[device].active -= 1;
}

struct Block {
  void* data;
  int64_t bytes;
  int device;
  std::shared_ptr<PluggedAllocator> source;
  std::unique_ptr<Trace> trace;
};

void free_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  leave(block->device, block->bytes, !block->source);
  freed(std::move(block->trace));
  if (block->source) {
    block->source->give(block->data, block->bytes, block->device, nullptr);
  } else {
    c10::free_cpu(block->data);
  }
}

c10::DataPtr take_block(int64_t bytes, int device) {
  const c10::Device place(kNPU, static_cast<c10::DeviceIndex>(device));
  if (!bytes) return {nullptr, place};
  auto block = std::make_unique<Block>(Block{nullptr, bytes, device, plugged, new_trace(device)});
  if (plugged) {
    block->data = plugged->take(bytes, device, nullptr);
    if (!block->data) refuse(device, bytes);
  }
  enter(device, bytes, !plugged);
  if (!plugged) {
    block->data = c10::alloc_cpu(bytes);
    snpu_fill_with_garbage(block->data, bytes);
  }
  void* data = block->data;
  return {data, block.release(), &free_block, place};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return take_block(bytes, current_device()); }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
DeviceAllocator the_allocator;

std::mutex pinned_lock;
std::map<const char*, size_t> pinned_ranges;

void free_pinned(void* data) {
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    const auto found = pinned_ranges.find(static_cast<char*>(data));
    if (races_refused()) no_longer_sent(data, found->second);
    pinned_ranges.erase(found);
  }
  c10::free_cpu(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes ? bytes : 1);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned_ranges[static_cast<char*>(data)] = bytes ? bytes : 1;
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedAllocator the_pinned_allocator;

// ---- aliases

void drop_storage(void* context) { delete static_cast<c10::Storage*>(context); }

// Memory that a kernel of the host allocated for its result, which belongs to a device from now on.
struct Lent {
  c10::Storage host;
  int64_t bytes;
  int device;
  std::unique_ptr<Trace> trace;
};

void drop_lent(void* context) {
  std::unique_ptr<Lent> lent(static_cast<Lent*>(context));
  leave(lent->device, lent->bytes, true);
  freed(std::move(lent->trace));
}

// ---- memory that processes share

// A file without a name, mapped; whoever shared it keeps it in the books.
struct Shared {
  void* data;
  int64_t bytes;
  int device, file;
};

void drop_shared(void* context) {
  std::unique_ptr<Shared> shared(static_cast<Shared*>(context));
  munmap(shared->data, shared->bytes);
  close(shared->file);
  leave(shared->device, shared->bytes, true);
}

void drop_imported(void* context) {
  std::unique_ptr<Shared> shared(static_cast<Shared*>(context));
  munmap(shared->data, shared->bytes);
}

void* map_file(int file, int64_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  TORCH_CHECK(data != MAP_FAILED, "cannot map ", readable(bytes), " of shared memory: ", std::strerror(errno));
  return data;
}

at::Tensor over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) tensor.unsafeGetTensorImpl()->_set_conj(true);
  if (like.is_neg()) tensor.unsafeGetTensorImpl()->_set_neg(true);
  return tensor;
}

}  // namespace

REGISTER_ALLOCATOR(kNPU, &the_allocator)

c10::Allocator* device_allocator() { return &the_allocator; }
c10::Allocator* pinned_allocator() { return &the_pinned_allocator; }

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto next = pinned_ranges.upper_bound(static_cast<const char*>(address));
  if (next == pinned_ranges.begin()) return false;
  const auto& [first, bytes] = *--next;
  return static_cast<const char*>(address) < first + bytes;
}

int current_device() { return this_device; }

void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < snpu_device_count(), "invalid device npu:", device, ": there are ",
              snpu_device_count(), " NPUs (SOFTWARE_NPU_COUNT, ASCEND_RT_VISIBLE_DEVICES)");
  this_device = device;
}

std::map<std::string, int64_t> memory_figures(int device) {
  TORCH_CHECK(device >= 0 && device < snpu_device_count(), "invalid device npu:", device);
  std::lock_guard<std::mutex> guard(figures_lock);
  const Figures& now = figures[device];
  return {{"allocated_bytes.all.current", now.allocated},
          {"allocated_bytes.all.peak", now.allocated_peak},
          {"reserved_bytes.all.current", now.reserved},
          {"reserved_bytes.all.peak", now.reserved_peak},
          {"requested_bytes.all.current", now.requested},
          {"active_bytes.all.current", now.allocated},
          {"active_bytes.all.peak", now.allocated_peak},
          {"active.all.current", now.active},
          {"allocation.all.current", now.active},
          {"allocation.all.allocated", now.allocations},
          {"inactive_split_bytes.all.current", 0},
          {"inactive_split_bytes.all.peak", 0},
          {"num_alloc_retries", 0},
          {"num_ooms", now.out_of_memory}};
}

void reset_peaks(int device) {
  std::lock_guard<std::mutex> guard(figures_lock);
  figures[device].allocated_peak = figures[device].allocated;
  figures[device].reserved_peak = figures[device].reserved;
}

void empty_cache() {
  std::lock_guard<std::mutex> guard(figures_lock);
  for (Figures& now : figures) now.reserved = now.allocated;
}

void set_memory_fraction(int device, double fraction) {
  TORCH_CHECK_VALUE(fraction >= 0 && fraction <= 1, "a fraction of the memory is between 0 and 1, not ", fraction);
  std::lock_guard<std::mutex> guard(figures_lock);
  figures[device].limit = static_cast<int64_t>(fraction * snpu_total_bytes());
}

PluggedAllocator::PluggedAllocator(const std::string& library, const std::string& malloc_name,
                                   const std::string& free_name) {
  void* loaded = dlopen(library.c_str(), RTLD_NOW);
  TORCH_CHECK(loaded, "cannot load ", library, ": ", dlerror());
  take = reinterpret_cast<decltype(take)>(dlsym(loaded, malloc_name.c_str()));
  give = reinterpret_cast<decltype(give)>(dlsym(loaded, free_name.c_str()));
  TORCH_CHECK(take && give, library, " has no ", take ? free_name : malloc_name);
}

std::shared_ptr<PluggedAllocator> use_allocator(std::shared_ptr<PluggedAllocator> allocator) {
  std::swap(plugged, allocator);
  return allocator;
}

std::pair<int, int> share_memory(const at::Tensor& tensor) {
  TORCH_CHECK(is_npu(tensor), "memory of ", tensor.device(), " is not an NPU's to share");
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  const c10::DataPtr& now = storage->data_ptr();
  if (now.get_deleter() == &drop_shared) return {getpid(), static_cast<Shared*>(now.get_context())->file};
  TORCH_CHECK(now.get_deleter() != &drop_imported, "memory that another process shared cannot be shared again");
  auto* block = now.get_deleter() == &free_block ? static_cast<Block*>(now.get_context()) : nullptr;
  TORCH_CHECK(!block || !block->source, "memory of a pool cannot be shared with other processes");
  const int64_t bytes = storage->nbytes();
  TORCH_CHECK(bytes, "a tensor without elements has no memory to share");
  const int device = tensor.device().index(), file = memfd_create("software_npu", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, bytes) == 0, "no shared memory: ", std::strerror(errno));
  auto shared = std::make_unique<Shared>(Shared{map_file(file, bytes), bytes, device, file});
  std::memcpy(shared->data, now.get(), bytes);
  void* data = shared->data;
  c10::DataPtr before = storage->set_data_ptr({data, shared.release(), &drop_shared, tensor.device()});
  // The new memory takes the place of the old in the books: only what held it goes.
  if (block) {
    c10::free_cpu(block->data);
    delete block;
  } else {
    delete static_cast<Lent*>(before.get_context());
  }
  before.release_context();
  return {getpid(), file};
}

at::Tensor shared_memory(int process, int file, int64_t bytes, int device) {
  TORCH_CHECK(device >= 0 && device < snpu_device_count(), "invalid device npu:", device);
  const std::string name = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(file);
  const int opened = open(name.c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(opened >= 0, "the process that shared this memory is gone, or not ours: ", std::strerror(errno));
  void* data = map_file(opened, bytes);
  close(opened);
  c10::DataPtr mapped(data, new Shared{data, bytes, device, -1}, &drop_imported,
                      c10::Device(kNPU, static_cast<c10::DeviceIndex>(device)));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(mapped), &the_allocator, false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), caffe2::TypeMeta::Make<uint8_t>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({bytes});
  return tensor;
}

Trace* trace_of(const c10::DataPtr& data) {
  if (data.get_deleter() == &free_block) return static_cast<Block*>(data.get_context())->trace.get();
  return data.get_deleter() == &drop_lent ? static_cast<Lent*>(data.get_context())->trace.get() : nullptr;
}

at::Tensor same_memory(const at::Tensor& tensor) {
  return tensor.defined() ? over(tensor.storage(), c10::DispatchKey::PrivateUse1, tensor) : tensor;
}

at::Tensor as_cpu(const at::Tensor& tensor) {
  c10::StorageImpl* device = tensor.storage().unsafeGetStorageImpl();
  void* data = const_cast<void*>(device->data());
  TORCH_CHECK(!snpu_without_memory(data), "access to the memory of a tensor ", tensor.sizes(), " on ",
              tensor.device(), " that is unmapped: it sleeps, or was not woken up with this tag");
  c10::DataPtr alias(data, new c10::Storage(tensor.storage()), &drop_storage, c10::Device(c10::kCPU));
  c10::Storage host(c10::Storage::use_byte_size_t(), device->nbytes(), std::move(alias),
                    c10::GetAllocator(c10::kCPU), true);
  return over(std::move(host), c10::DispatchKey::CPU, tensor);
}

at::Tensor as_npu(const at::Tensor& tensor, int device) {
  const c10::DataPtr& data = tensor.storage().data_ptr();
  if (data.get_deleter() == &drop_storage) {  // an alias comes home
    return over(*static_cast<c10::Storage*>(data.get_context()), c10::DispatchKey::PrivateUse1, tensor);
  }
  const int64_t bytes = tensor.storage().nbytes();
  c10::DataPtr own;
  if (plugged) {  // into the pool, as everything that is allocated while it is used
    own = take_block(bytes, device);
    if (bytes) std::memcpy(own.get(), tensor.storage().data(), bytes);
  } else {
    std::unique_ptr<Trace> trace = bytes ? new_trace(device) : nullptr;
    enter(device, bytes, true);
    own = {const_cast<void*>(tensor.storage().data()), new Lent{tensor.storage(), bytes, device, std::move(trace)},
           &drop_lent, c10::Device(kNPU, static_cast<c10::DeviceIndex>(device))};
  }
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(own), &the_allocator, true);
  return over(std::move(storage), c10::DispatchKey::PrivateUse1, tensor);
}

}  // namespace software_npu
