#include "fallback.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_set>

#include "device.h"
#include "graphs.h"
#include "memory.h"
#include "races.h"

namespace software_npu {
namespace {

// Operators that take tensors of the host among those of a device: indices, lengths, sizes.
bool may_mix(const std::string& name) {
  static const std::unordered_set<std::string> those = {
      "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::set_",
      "aten::_pack_padded_sequence", "aten::tensor_split"};
  return those.count(name) || name.rfind("atb::", 0) == 0;
}

// Operators whose result the host must see before it can continue.
bool waits_for_device(const std::string& name) {
  static const std::unordered_set<std::string> those = {
      "aten::_local_scalar_dense", "aten::nonzero", "aten::equal",         "aten::masked_select",
      "aten::_unique2",            "aten::unique_dim", "aten::unique_consecutive", "aten::is_nonzero"};
  return those.count(name) > 0;
}

thread_local int depth = 0;
struct Depth {
  Depth() { ++depth; }
  ~Depth() { --depth; }
};

bool counting = false;
std::mutex counts_lock;
std::map<std::string, int64_t> counts;

// One call: its tensors lent to the host, and taken back.
class Loan {
 public:
  explicit Loan(const c10::OperatorHandle& op) : op_(op) {}

  void lend(c10::IValue& value) {
    if (value.isTensor()) {
      value = lend(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(lend(tensor));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        list.push_back(tensor ? std::optional<at::Tensor>(lend(*tensor)) : tensor);
      }
      value = std::move(list);
    } else if (value.isDevice() && value.toDevice().type() == kNPU) {
      const c10::Device named = value.toDevice();
      if (device_ < 0) device_ = named.has_index() ? named.index() : current_device();
      value = c10::Device(c10::kCPU);
    }
  }

  void check_devices() const {
    const auto& name = op_.operator_name();
    TORCH_CHECK(device_ < 0 || other_device_ < 0, "Expected all tensors to be on the same device, but found at least ",
                "two devices, npu:", device_, " and npu:", other_device_, "! (", name, ")");
    TORCH_CHECK(lent_.empty() || !host_.defined() || may_mix(name.name), "Expected all tensors to be on the same ",
                "device, but found at least two devices, npu:", device_, " and cpu! (", name, ", a tensor ",
                host_.defined() ? host_.sizes() : c10::IntArrayRef(), " is on the cpu)");
  }

  int device() const { return device_ < 0 ? current_device() : device_; }

  // out= and resize_ may have changed shape or memory of an alias: its original follows.
  void follow() {
    for (auto& [original, alias] : lent_) {
      const bool moved = alias.storage().data() != original.storage().data();
      if (!moved && alias.sizes() == original.sizes() && alias.strides() == original.strides() &&
          alias.storage_offset() == original.storage_offset()) {
        continue;
      }
      c10::TensorImpl* impl = original.unsafeGetTensorImpl();
      if (moved) impl->set_storage_keep_dtype(as_npu(alias, device()).storage());
      impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }

  void take_back(c10::IValue& value) {
    if (value.isTensor()) {
      value = take_back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(take_back(tensor));
      value = std::move(list);
    }
  }

 private:
  at::Tensor lend(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!is_npu(tensor)) {
      if (tensor.dim() > 0 && tensor.device().is_cpu()) host_ = tensor;
      return tensor;
    }
    if (device_ < 0 || lent_.empty()) {
      device_ = tensor.device().index();
    } else if (device_ != tensor.device().index()) {
      other_device_ = tensor.device().index();
    }
    lent_.emplace_back(tensor, as_cpu(tensor));
    return lent_.back().second;
  }

  at::Tensor take_back(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    for (auto& [original, alias] : lent_) {
      if (alias.is_same(tensor)) return original;
    }
    return as_npu(tensor, device());
  }

  const c10::OperatorHandle& op_;
  std::vector<std::pair<at::Tensor, at::Tensor>> lent_;  // of the device, its alias
  int device_ = -1, other_device_ = -1;
  at::Tensor host_;
};

// Random numbers come from the device's generator: as an argument where there is one; else by lending its state
// to the default generator of the host for the length of the call.
class Randomness {
 public:
  Randomness(const c10::OperatorHandle& op, c10::IValue* arguments, int device) {
    const auto& declared = op.schema().arguments();
    bool has_argument = false;
    for (size_t i = 0; i < declared.size(); ++i) {
      if (arguments[i].isGenerator()) {
        has_argument = true;
        const at::Generator given = arguments[i].toGenerator();
        TORCH_CHECK(given.device().type() == kNPU, op.operator_name(), ": Expected a 'npu' device type for generator ",
                    "but found '", given.device().type(), "'");
        arguments[i] = draw(given);
      } else if (arguments[i].isNone() && declared[i].name() == "generator") {
        has_argument = true;
        arguments[i] = draw(default_generator(device));
      }
    }
    if (has_argument || !op.hasTag(at::Tag::nondeterministic_seeded)) return;
    own_ = draw(default_generator(device));
    hosts_ = at::detail::getDefaultCPUGenerator();
    before_ = hosts_.get_state();
    hosts_.set_state(own_.get_state());
  }

  ~Randomness() {
    if (!own_.defined()) return;
    own_.set_state(hosts_.get_state());
    hosts_.set_state(before_);
  }

 private:
  at::Generator own_, hosts_;
  at::Tensor before_;
};

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) visit(tensor.value_or(at::Tensor()));
  }
}

// A call on the current stream that is refused if it races.
void run_in_order(const c10::OperatorHandle& op, Stack* stack) {
  const auto& name = op.operator_name().name;
  const auto& declared = op.schema().arguments();
  std::optional<c10::Stream> stream;
  const auto touch_all = [&](size_t first, size_t count, const auto& writes) {
    for (size_t i = 0; i < count; ++i) {
      each_tensor((*stack)[first + i], [&](const at::Tensor& tensor) {
        if (!is_npu(tensor)) return;
        stream = current_stream(tensor.device().index());
        touch(trace_of(tensor.storage().data_ptr()), *stream, writes(i), name);
      });
    }
  };
  touch_all(stack->size() - declared.size(), declared.size(),
            [&](size_t i) { return declared[i].alias_info() && declared[i].alias_info()->isWrite(); });
  run_on_host(op, stack);
  const auto& returned = op.schema().returns();
  touch_all(stack->size() - returned.size(), returned.size(), [&](size_t i) { return !returned[i].alias_info(); });
  if (!stream) return;
  called(*stream);
  if (waits_for_device(name)) host_waits(clock_of(*stream));
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& name = op.operator_name().name;
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "the software NPU has no ",
                              "kernel for ", op.operator_name());
  if (counting) {
    std::lock_guard<std::mutex> guard(counts_lock);
    ++counts[name];
  }
  if (update_call(op, stack)) return;
  Graph* graph = nullptr;
  const size_t count = op.schema().arguments().size(), returned = op.schema().returns().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    const c10::IValue& value = (*stack)[i];
    at::Tensor tensor;
    if (value.isTensor()) {
      tensor = value.toTensor();
    } else if (value.isTensorList() && !value.toTensorList().empty()) {
      tensor = value.toTensorList().get(0);
    }
    if (is_npu(tensor)) {
      graph = capture_of(tensor.device().index());
      break;
    }
  }
  if (!graph) graph = capture_of(current_device());
  if (!graph) return races_refused() ? run_in_order(op, stack) : run_on_host(op, stack);
  TORCH_CHECK(!waits_for_device(name), name, " waits for the device: not permitted while a graph is captured");
  const Stack inputs(stack->end() - count, stack->end());
  run_on_host(op, stack);
  graph->add_call(op, inputs, Stack(stack->end() - returned, stack->end()));
}

}  // namespace

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const size_t first = stack->size() - op.schema().arguments().size();
  Loan loan(op);
  for (size_t i = first; i < stack->size(); ++i) loan.lend((*stack)[i]);
  loan.check_devices();
  {
    const Randomness randomness(op, stack->data() + first, loan.device());
    const Depth inside;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  loan.follow();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) loan.take_back((*stack)[i]);
}

bool runs_for_device() { return depth > 0; }

void count_calls(bool on) {
  std::lock_guard<std::mutex> guard(counts_lock);
  counting = on;
  counts.clear();
}

std::map<std::string, int64_t> counted_calls() {
  std::lock_guard<std::mutex> guard(counts_lock);
  return counts;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace software_npu
