#include "driver.h"

#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>

namespace {

std::atomic<int64_t> used[kMostDevices], peak[kMostDevices];
std::atomic<int64_t> woken{0};
std::atomic<int> devices{-1};  // -1: not asked yet

int64_t number(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atoll(value) : otherwise;
}

int count_devices() {
  const int64_t asked = number("SOFTWARE_NPU_COUNT", 16);
  const int host = asked < 0 ? 0 : asked > kMostDevices ? kMostDevices : static_cast<int>(asked);
  const char* visible = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!visible) return host;
  std::set<int> seen;
  std::stringstream list(visible);
  for (std::string item; std::getline(list, item, ',');) {  // the list ends where it names no device
    char* end = nullptr;
    const long device = std::strtol(item.c_str(), &end, 10);
    if (end == item.c_str() || device < 0 || device >= host || !seen.insert(device).second) break;
  }
  return static_cast<int>(seen.size());
}

struct Range {
  size_t bytes;
  int device;
  bool mapped;
  bool slept = false;
};
std::mutex ranges_lock;
std::map<const char*, Range> ranges;  // by first address
std::atomic<int> unmapped_ranges{0};

}  // namespace

int snpu_device_count() {
  static const int once = pthread_atfork(nullptr, nullptr, [] { devices = -1; });  // a child may see others
  (void)once;
  int known = devices;
  if (known < 0) devices = known = count_devices();
  return known;
}

int64_t snpu_total_bytes() {
  static const int64_t bytes = number("SOFTWARE_NPU_MEMORY_MB", 8192) << 20;
  return bytes;
}

int64_t snpu_used_bytes(int device) { return used[device]; }

bool snpu_take(int device, int64_t bytes) {
  const int64_t now = used[device] += bytes;
  if (now > snpu_total_bytes()) {
    used[device] -= bytes;
    return false;
  }
  for (int64_t most = peak[device]; now > most && !peak[device].compare_exchange_weak(most, now);) {
  }
  return true;
}

void snpu_give(int device, int64_t bytes) { used[device] -= bytes; }

int64_t snpu_peak_bytes(int device) { return peak[device]; }
int64_t snpu_woken() { return woken; }

size_t snpu_granularity() { return 64 << 10; }

void* snpu_reserve(size_t bytes, int device) {
  bytes = (bytes + snpu_granularity() - 1) / snpu_granularity() * snpu_granularity();
  void* address = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return nullptr;
  std::lock_guard<std::mutex> guard(ranges_lock);
  ranges[static_cast<char*>(address)] = {bytes, device, false};
  ++unmapped_ranges;
  return address;
}

bool snpu_map(void* address) {
  std::lock_guard<std::mutex> guard(ranges_lock);
  auto found = ranges.find(static_cast<char*>(address));
  if (found == ranges.end()) return false;
  Range& range = found->second;
  if (range.mapped) return true;
  if (!snpu_take(range.device, range.bytes)) return false;
  if (mprotect(address, range.bytes, PROT_READ | PROT_WRITE)) {
    snpu_give(range.device, range.bytes);
    return false;
  }
  snpu_fill_with_garbage(address, range.bytes);
  range.mapped = true;
  woken += range.slept;
  --unmapped_ranges;
  return true;
}

void snpu_unmap(void* address) {
  std::lock_guard<std::mutex> guard(ranges_lock);
  auto found = ranges.find(static_cast<char*>(address));
  if (found == ranges.end() || !found->second.mapped) return;
  Range& range = found->second;
  // New pages without access in the place of the old ones: their contents are gone.
  mmap(address, range.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  snpu_give(range.device, range.bytes);
  range.mapped = false;
  range.slept = true;
  ++unmapped_ranges;
}

void snpu_release(void* address) {
  snpu_unmap(address);
  std::lock_guard<std::mutex> guard(ranges_lock);
  auto found = ranges.find(static_cast<char*>(address));
  if (found == ranges.end()) return;
  munmap(address, found->second.bytes);
  ranges.erase(found);
  --unmapped_ranges;
}

bool snpu_without_memory(const void* address) {
  if (!unmapped_ranges) return false;
  std::lock_guard<std::mutex> guard(ranges_lock);
  auto next = ranges.upper_bound(static_cast<const char*>(address));
  if (next == ranges.begin()) return false;
  const auto& [first, range] = *--next;
  return !range.mapped && static_cast<const char*>(address) < first + range.bytes;
}

void snpu_fill_with_garbage(void* address, size_t bytes) {
  if (address) std::memset(address, 0xff, bytes);
}
