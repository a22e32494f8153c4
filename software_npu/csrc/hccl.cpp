#include "hccl.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <mutex>

#include "graphs.h"
#include "memory.h"

namespace software_npu {
namespace {

std::mutex counts_lock;
std::map<std::string, int64_t> counts;

// The host's view of what is sent or received.
at::Tensor host(const at::Tensor& tensor) {
  TORCH_CHECK(is_npu(tensor), "HCCL takes tensors of the NPU, not of ", tensor.device());
  TORCH_CHECK(tensor.is_contiguous() || tensor.is_non_overlapping_and_dense(), "HCCL: Tensors must be contiguous");
  return as_cpu(tensor);
}
Tensors host(const Tensors& tensors) {
  Tensors views;
  for (const at::Tensor& tensor : tensors) views.push_back(host(tensor));
  return views;
}
std::vector<Tensors> host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> views;
  for (const Tensors& tensors : lists) views.push_back(host(tensors));
  return views;
}
at::Tensor flat(const at::Tensor& tensor) { return host(tensor).view({-1}); }
Tensors flat(const Tensors& tensors) {
  Tensors views;
  for (const at::Tensor& tensor : tensors) views.push_back(flat(tensor));
  return views;
}

int device_of(const Tensors& tensors) { return tensors.empty() ? current_device() : tensors[0].device().index(); }

// What has ended already. gloo's own work may write its results again when it is waited for again.
struct Done final : c10d::Work {
  explicit Done(const Tensors& results) : future(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors())) {
    future->markCompleted(c10::IValue(results));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  c10::intrusive_ptr<c10::ivalue::Future> future;
};

// Several together.
struct All final : c10d::Work {
  explicit All(std::vector<software_npu::Work> parts) : works(std::move(parts)) {}
  bool isCompleted() override {
    for (const auto& work : works) {
      if (!work->isCompleted()) return false;
    }
    return true;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& work : works) work->wait(timeout);
    return true;
  }

  std::vector<software_npu::Work> works;  // within the class, Work is its base
};

// gloo has no average: it sums, and the sum is divided here, which waits for it.
template <typename Options>
Work averaged(const Options& options, const Tensors& results, int size,
              const std::function<Work(const Options&)>& start) {
  if (options.reduceOp != c10d::ReduceOp::AVG) return start(options);
  Options sum = options;
  sum.reduceOp = c10d::ReduceOp::SUM;
  start(sum)->wait();
  for (const at::Tensor& tensor : results) tensor.div_(size);
  return c10::make_intrusive<Done>(results);
}

}  // namespace

void count_collective(const char* what) {
  std::lock_guard<std::mutex> guard(counts_lock);
  ++counts[what];
}

std::map<std::string, int64_t> collective_counts() {
  std::lock_guard<std::mutex> guard(counts_lock);
  return counts;
}

ProcessGroupHCCL::ProcessGroupHCCL(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, std::string name)
    : c10d::Backend(rank, size), gloo_(std::move(gloo)), name_(std::move(name)) {}

Work ProcessGroupHCCL::submit(const char* what, int device, std::function<Work()> start) {
  Graph* graph = capture_of(device);
  count_collective(what);
  Work work = start();
  if (graph) {
    work->wait();
    graph->add_action(what, [what, start] {
      count_collective(what);
      start()->wait();
    });
  }
  if (coalesced_) coalesced_->push_back(work);
  return work;
}

void ProcessGroupHCCL::startCoalescing() { coalesced_.emplace(); }

Work ProcessGroupHCCL::endCoalescing() {
  TORCH_CHECK(coalesced_, "endCoalescing without startCoalescing");
  auto work = c10::make_intrusive<All>(std::move(*coalesced_));
  coalesced_.reset();
  return work;
}

Work ProcessGroupHCCL::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return submit("hccl::broadcast", device_of(tensors), [this, views = host(tensors), options]() mutable {
    return gloo_->broadcast(views, options);
  });
}

Work ProcessGroupHCCL::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return submit("hccl::allreduce", device_of(tensors), [this, views = host(tensors), options]() mutable {
    return averaged<c10d::AllreduceOptions>(options, views, getSize(),
                                            [&](const auto& given) { return gloo_->allreduce(views, given); });
  });
}

Work ProcessGroupHCCL::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return submit("hccl::allreduce", device_of(tensors), [this, views = host(tensors), options]() mutable {
    return averaged<c10d::AllreduceCoalescedOptions>(
        options, views, getSize(), [&](const auto& given) { return gloo_->allreduce_coalesced(views, given); });
  });
}

Work ProcessGroupHCCL::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return submit("hccl::reduce", device_of(tensors), [this, views = host(tensors), options]() mutable {
    return averaged<c10d::ReduceOptions>(options, options.rootRank == getRank() ? views : Tensors(), getSize(),
                                         [&](const auto& given) { return gloo_->reduce(views, given); });
  });
}

Work ProcessGroupHCCL::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::AllgatherOptions& options) {
  return submit("hccl::allgather", device_of(inputs),
                [this, out = host(outputs), in = host(inputs), options]() mutable -> Work {
                  bool equal = true;
                  for (const at::Tensor& part : out[0]) equal = equal && part.numel() == out[0][0].numel();
                  if (equal) return gloo_->allgather(out, in, options);
                  // HCCL takes ranks' shares of different lengths, gloo does not: each rank sends its own to all.
                  out[0][getRank()].copy_(in[0]);
                  for (int rank = 0; rank < getSize(); ++rank) {
                    Tensors part{out[0][rank]};
                    c10d::BroadcastOptions from;
                    from.rootRank = rank;
                    gloo_->broadcast(part, from)->wait();
                  }
                  return c10::make_intrusive<Done>(out[0]);
                });
}

Work ProcessGroupHCCL::_allgather_base(at::Tensor& output, at::Tensor& input,
                                       const c10d::AllgatherOptions& options) {
  return submit("hccl::allgather", input.device().index(),
                [this, out = flat(output), in = flat(input), options]() mutable {
                  return gloo_->_allgather_base(out, in, options);
                });
}

Work ProcessGroupHCCL::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::AllgatherOptions& options) {
  return submit("hccl::allgather", device_of(inputs),
                [this, out = flat(outputs), in = flat(inputs), options]() mutable {
                  return gloo_->allgather_into_tensor_coalesced(out, in, options);
                });
}

Work ProcessGroupHCCL::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  return submit("hccl::gather", device_of(inputs), [this, out = host(outputs), in = host(inputs), options]() mutable {
    return gloo_->gather(out, in, options);
  });
}

Work ProcessGroupHCCL::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  return submit("hccl::scatter", device_of(outputs),
                [this, out = host(outputs), in = host(inputs), options]() mutable {
                  return gloo_->scatter(out, in, options);
                });
}

Work ProcessGroupHCCL::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                      const c10d::ReduceScatterOptions& options) {
  return submit("hccl::reduce_scatter", device_of(outputs),
                [this, out = host(outputs), in = host(inputs), options]() mutable {
                  return averaged<c10d::ReduceScatterOptions>(
                      options, out, getSize(), [&](const auto& given) { return gloo_->reduce_scatter(out, in, given); });
                });
}

Work ProcessGroupHCCL::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                            const c10d::ReduceScatterOptions& options) {
  return submit("hccl::reduce_scatter", output.device().index(),
                [this, out = flat(output), in = flat(input), options]() mutable {
                  return averaged<c10d::ReduceScatterOptions>(options, {out}, getSize(), [&](const auto& given) {
                    return gloo_->_reduce_scatter_base(out, in, given);
                  });
                });
}

Work ProcessGroupHCCL::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::ReduceScatterOptions& options) {
  return submit("hccl::reduce_scatter", device_of(outputs),
                [this, out = flat(outputs), in = flat(inputs), options]() mutable {
                  return averaged<c10d::ReduceScatterOptions>(options, out, getSize(), [&](const auto& given) {
                    return gloo_->reduce_scatter_tensor_coalesced(out, in, given);
                  });
                });
}

Work ProcessGroupHCCL::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                     std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  TORCH_CHECK(output.numel() || input.numel(), "HCCL: an all-to-all that neither sends nor receives anything on rank ",
              getRank(), " is refused: both buffers are empty");
  return submit("hccl::alltoall", output.device().index(),
                [this, out = host(output), in = host(input), output_splits, input_splits, options]() mutable {
                  return gloo_->alltoall_base(out, in, output_splits, input_splits, options);
                });
}

// gloo exchanges one buffer only: the tensors go into one and come out of one.
Work ProcessGroupHCCL::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  Tensors out = flat(outputs), in = flat(inputs);
  std::vector<int64_t> output_splits, input_splits;
  int64_t received = 0, sent = 0;
  for (const at::Tensor& tensor : out) received += tensor.numel(), output_splits.push_back(tensor.numel());
  for (const at::Tensor& tensor : in) sent += tensor.numel(), input_splits.push_back(tensor.numel());
  TORCH_CHECK(received || sent, "HCCL: an all-to-all that neither sends nor receives anything on rank ", getRank(),
              " is refused: all buffers are empty");
  return submit("hccl::alltoall", device_of(outputs),
                [this, out, in, output_splits, input_splits, received, sent, options]() mutable {
                  at::Tensor buffer = in[0].new_empty({sent}), result = out[0].new_empty({received});
                  int64_t begin = 0;
                  for (const at::Tensor& tensor : in) {
                    buffer.narrow(0, begin, tensor.numel()).copy_(tensor);
                    begin += tensor.numel();
                  }
                  gloo_->alltoall_base(result, buffer, output_splits, input_splits, options)->wait();
                  begin = 0;
                  for (const at::Tensor& tensor : out) {
                    tensor.copy_(result.narrow(0, begin, tensor.numel()));
                    begin += tensor.numel();
                  }
                  return c10::make_intrusive<Done>(out);
                });
}

Work ProcessGroupHCCL::send(Tensors& tensors, int to, int tag) {
  return submit("hccl::send", device_of(tensors), [this, views = host(tensors), to, tag]() mutable {
    return gloo_->send(views, to, tag);
  });
}

Work ProcessGroupHCCL::recv(Tensors& tensors, int from, int tag) {
  return submit("hccl::recv", device_of(tensors), [this, views = host(tensors), from, tag]() mutable {
    return gloo_->recv(views, from, tag);
  });
}

Work ProcessGroupHCCL::barrier(const c10d::BarrierOptions& options) {
  c10d::BarrierOptions given = options;
  given.device_ids.clear();
  given.device.reset();
  return submit("hccl::barrier", current_device(), [this, given] { return gloo_->barrier(given); });
}

}  // namespace software_npu
