#include "driver.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

std::atomic<int64_t> used[kMostDevices], peak[kMostDevices];
std::atomic<int64_t> woken{0};
std::atomic<int> devices{-1};  // -1: not asked yet

int64_t number(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atoll(value) : otherwise;
}

int die_of[kMostDevices];  // of each device this process may use, its number in the host

int count_devices() {
  const int64_t asked = number("SOFTWARE_NPU_COUNT", 16);
  const int host = asked < 0 ? 0 : asked > kMostDevices ? kMostDevices : static_cast<int>(asked);
  const char* visible = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  for (int device = 0; device < kMostDevices; ++device) die_of[device] = device;
  if (!visible) return host;
  std::set<int> seen;
  std::stringstream list(visible);
  for (std::string item; std::getline(list, item, ',');) {  // the list ends where it names no device
    char* end = nullptr;
    const long device = std::strtol(item.c_str(), &end, 10);
    if (end == item.c_str() || device < 0 || device >= host || !seen.insert(device).second) break;
    die_of[seen.size() - 1] = static_cast<int>(device);
  }
  return static_cast<int>(seen.size());
}

// What each process has taken of each die, in a file that the processes of a host map. A process holds a lock on the
// byte of its row, which the kernel frees when it dies: a row without a lock is nobody's.
constexpr int kMostProcesses = 512;
struct Host {
  std::atomic<int> rows;  // used so far
  std::atomic<int64_t> peak[kMostDevices];
  std::atomic<int64_t> taken[kMostProcesses][kMostDevices];
};
Host* host = nullptr;
int host_file = -1;
std::atomic<int> own_row{-1};
std::mutex host_lock;

bool lock_row(int row, short how) {
  struct flock range = {};
  range.l_type = how;
  range.l_whence = SEEK_SET;
  range.l_start = row;
  range.l_len = 1;
  return fcntl(host_file, F_SETLK, &range) == 0;
}

[[noreturn]] void stop(const char* file, const char* why) {
  std::fprintf(stderr, "SOFTWARE_NPU_MEMORY_FILE=%s: %s\n", file, why);
  std::abort();
}

// This process's row; null where the memory of its NPUs is its own.
std::atomic<int64_t>* own_taken() {
  if (own_row >= 0) return host->taken[own_row];
  const char* file = std::getenv("SOFTWARE_NPU_MEMORY_FILE");
  if (!file || !*file) return nullptr;
  snpu_device_count();  // knows the dies
  static const int once = pthread_atfork([] { host_lock.lock(); }, [] { host_lock.unlock(); }, [] {
    own_row = -1;  // locks of files are not inherited
    host_lock.unlock();
  });
  (void)once;
  std::lock_guard<std::mutex> guard(host_lock);
  if (own_row >= 0) return host->taken[own_row];
  if (!host) {
    host_file = open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (host_file < 0 || ftruncate(host_file, sizeof(Host))) stop(file, std::strerror(errno));
    void* mapped = mmap(nullptr, sizeof(Host), PROT_READ | PROT_WRITE, MAP_SHARED, host_file, 0);
    if (mapped == MAP_FAILED) stop(file, std::strerror(errno));
    host = static_cast<Host*>(mapped);
  }
  int row = 0;
  while (row < kMostProcesses && !lock_row(row, F_WRLCK)) ++row;
  if (row == kMostProcesses) stop(file, "more processes than it has rows");
  for (int most = host->rows; row >= most && !host->rows.compare_exchange_weak(most, row + 1);) {
  }
  for (auto& bytes : host->taken[row]) bytes = 0;
  for (int device = 0; device < kMostDevices; ++device) {
    if (used[device]) host->taken[row][die_of[device]] = used[device].load();  // of a fork: its parent's memory
  }
  own_row = row;
  return host->taken[row];
}

int64_t taken_by_all(int die) {
  int64_t sum = 0;
  for (int row = 0, rows = host->rows; row < rows; ++row) sum += host->taken[row][die];
  return sum;
}

// Frees what processes that have died had taken.
void bury() {
  std::lock_guard<std::mutex> guard(host_lock);
  for (int row = 0, rows = host->rows; row < rows; ++row) {
    if (row == own_row || !lock_row(row, F_WRLCK)) continue;
    for (auto& bytes : host->taken[row]) bytes = 0;
    lock_row(row, F_UNLCK);
  }
}

void lift(std::atomic<int64_t>& peak, int64_t to) {
  for (int64_t most = peak; to > most && !peak.compare_exchange_weak(most, to);) {
  }
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

int64_t snpu_used_bytes(int device) {
  if (!own_taken()) return used[device];
  bury();
  return taken_by_all(die_of[device]);
}

int64_t snpu_own_bytes(int device) { return used[device]; }

bool snpu_take(int device, int64_t bytes) {
  std::atomic<int64_t>* taken = own_taken();  // before this process's own figures change: a new row starts with them
  int64_t now = used[device] += bytes;
  lift(peak[device], now);
  if (taken) {
    const int die = die_of[device];
    taken[die] += bytes;
    now = taken_by_all(die);
    if (now > host->peak[die]) {
      bury();
      now = taken_by_all(die);
      if (now <= snpu_total_bytes()) lift(host->peak[die], now);
    }
  }
  if (now <= snpu_total_bytes()) return true;
  snpu_give(device, bytes);
  return false;
}

void snpu_give(int device, int64_t bytes) {
  std::atomic<int64_t>* taken = own_taken();
  used[device] -= bytes;
  if (taken) taken[die_of[device]] -= bytes;
}

int64_t snpu_peak_bytes(int device) { return peak[device]; }
int64_t snpu_die_peak_bytes(int device) { return own_taken() ? host->peak[die_of[device]] : peak[device]; }
int snpu_die(int device) { return snpu_device_count() > device ? die_of[device] : -1; }
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
