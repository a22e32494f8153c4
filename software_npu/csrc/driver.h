// What the driver of an accelerator knows: its devices, the memory of each, and ranges of addresses that have
// memory behind them or not. A library of its own without torch, so that an allocator that is plugged into torch
// (vllm_ascend_c.cpp) works on the same memory as torch does.
#pragma once

#include <cstddef>
#include <cstdint>

constexpr int kMostDevices = 64;

extern "C" {
// Devices this process may use: SOFTWARE_NPU_COUNT (16) of a host, less what ASCEND_RT_VISIBLE_DEVICES leaves out.
int snpu_device_count();

// Bytes of one device: SOFTWARE_NPU_MEMORY_MB (8192). What is used is used by this process, or by all that share
// the devices by SOFTWARE_NPU_MEMORY_FILE.
int64_t snpu_total_bytes();
int64_t snpu_used_bytes(int device);
int64_t snpu_own_bytes(int device);  // of this process

// The most this process ever took, and of a die (a device by its number in the host) all that share it together.
int64_t snpu_peak_bytes(int device);
int64_t snpu_die_peak_bytes(int device);
int snpu_die(int device);  // -1: there is no such device

// Ranges that got memory again after they had lost it.
int64_t snpu_woken();

// Takes memory of a device; false if it lacks that much. What was taken is given back with the same size.
bool snpu_take(int device, int64_t bytes);
void snpu_give(int device, int64_t bytes);

// A range of addresses, its length rounded up to the granularity. It has no memory before snpu_map, which
// returns false if the device lacks that much, and none after snpu_unmap: what was there is lost.
size_t snpu_granularity();
void* snpu_reserve(size_t bytes, int device);
bool snpu_map(void* address);
void snpu_unmap(void* address);
void snpu_release(void* address);

// Whether an address lies in a range that has no memory now.
bool snpu_without_memory(const void* address);

// What is found in memory that nobody has written yet: NaN in every floating type, -1 in every integer.
void snpu_fill_with_garbage(void* address, size_t bytes);
}
