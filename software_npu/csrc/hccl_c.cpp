// HCCL's functions for C, of which this library has the name (build.py): what finds libhccl.so by itself, such as
// vllm-ascend's PyHcclCommunicator, finds these. gloo over the same memory, between processes of this host.
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <torch/csrc/utils/pybind.h>

#include <cstring>

#include "driver.h"
#include "hccl.h"

namespace {

constexpr char kHost[] = "127.0.0.1";
constexpr at::ScalarType kTypes[] = {at::kChar,   at::kShort,  at::kInt,    at::kHalf,   at::kFloat,  at::kLong,
                                     at::kUInt64, at::kByte,   at::kUInt16, at::kUInt32, at::kDouble, at::kBFloat16};
constexpr c10d::ReduceOp::RedOpType kOperations[] = {c10d::ReduceOp::SUM, c10d::ReduceOp::PRODUCT,
                                                     c10d::ReduceOp::MAX, c10d::ReduceOp::MIN};

struct RootInfo {
  char internal[4108];  // here: the port of the first rank's store
};

std::vector<c10::intrusive_ptr<c10d::TCPStore>> stores;  // of groups whose first rank is in this process
thread_local std::string failure;

int checked(const std::function<void()>& call) {
  try {
    call();
    return 0;
  } catch (const std::exception& error) {
    failure = error.what();
    return 1;
  }
}

c10::intrusive_ptr<c10d::TCPStore> store_at(uint16_t port, bool server) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = server;
  return c10::make_intrusive<c10d::TCPStore>(kHost, options);
}

// The host's view of `count` elements.
software_npu::Tensors at_address(void* address, uint64_t count, int type) {
  TORCH_CHECK(type >= 0 && type < static_cast<int>(std::size(kTypes)), "HCCL: there is no data type ", type);
  TORCH_CHECK(!snpu_without_memory(address), "HCCL: access to memory that sleeps");
  return {at::from_blob(address, {static_cast<int64_t>(count)}, at::TensorOptions(kTypes[type]))};
}

using Gloo = c10::intrusive_ptr<c10d::Backend>;
c10d::Backend& group(void* communicator) { return **static_cast<Gloo*>(communicator); }

}  // namespace

extern "C" {
const char* HcclGetErrorString(int) { return failure.c_str(); }

int HcclGetRootInfo(RootInfo* info) {
  return checked([&] {
    stores.push_back(store_at(0, true));
    std::memset(info, 0, sizeof(*info));
    std::snprintf(info->internal, sizeof(info->internal), "%d", stores.back()->getPort());
  });
}

int HcclCommInitRootInfo(uint32_t ranks, const RootInfo* info, uint32_t rank, void** communicator) {
  return checked([&] {
    const auto store = store_at(static_cast<uint16_t>(std::stoi(info->internal)), false);
    pybind11::gil_scoped_acquire python;  // torch installs no header of gloo's
    const auto gloo = pybind11::module_::import("torch.distributed").attr("ProcessGroupGloo");
    const auto made = gloo(c10::static_intrusive_pointer_cast<c10d::Store>(store), rank, ranks);
    *communicator = new Gloo(made.cast<Gloo>());
  });
}

int HcclAllReduce(void* from, void* to, uint64_t count, int type, int operation, void* communicator, void*) {
  return checked([&] {
    TORCH_CHECK(operation >= 0 && operation < 4, "HCCL: there is no reduction ", operation);
    software_npu::Tensors result = at_address(to, count, type);
    result[0].copy_(at_address(from, count, type)[0]);
    c10d::AllreduceOptions options;
    options.reduceOp = kOperations[operation];
    software_npu::count_collective("hccl::allreduce");
    group(communicator).allreduce(result, options)->wait();
  });
}

int HcclBroadcast(void* buffer, uint64_t count, int type, uint32_t root, void* communicator, void*) {
  return checked([&] {
    software_npu::Tensors tensors = at_address(buffer, count, type);
    c10d::BroadcastOptions options;
    options.rootRank = root;
    software_npu::count_collective("hccl::broadcast");
    group(communicator).broadcast(tensors, options)->wait();
  });
}

int HcclCommDestroy(void* communicator) {
  delete static_cast<Gloo*>(communicator);
  return 0;
}
}
