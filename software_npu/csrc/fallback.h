// Every operator without a kernel of its own: the kernel of the host runs on aliases of the same memory.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <string>
#include <vector>

namespace software_npu {

// Arguments on the stack become results. Refuses arguments on several devices, naming the operator.
void run_on_host(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack);

// Whether a kernel that runs now was called with tensors of a device.
bool runs_for_device();

// Calls by operator since counting began; off unless asked for.
void count_calls(bool on);
std::map<std::string, int64_t> counted_calls();

}  // namespace software_npu
