// The few operators that a device must have itself: memory, copies, views; and which ones autocast casts.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "driver.h"
#include "graphs.h"
#include "memory.h"
#include "races.h"
#include "streams.h"

// Declared in ATen/autocast_mode.h, which takes five seconds to compile.
namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
}  // namespace at::autocast

namespace software_npu {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device place(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device
                                       : c10::Device(kNPU, static_cast<c10::DeviceIndex>(current_device()));
}

// A bool is 0 or 1: all other garbage would be no bool at all.
at::Tensor with_garbage(at::Tensor tensor) {
  if (tensor.scalar_type() == at::kBool && tensor.storage().nbytes()) {
    std::memset(tensor.storage().mutable_data(), 1, tensor.storage().nbytes());
  }
  return tensor;
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool> pin_memory,
                 std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!layout || *layout == at::kStrided, "the software NPU has strided tensors only");
  TORCH_CHECK(!pin_memory || !*pin_memory, "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(place(device));
  return with_garbage(at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(), kKeys,
                                                at::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(place(device));
  return with_garbage(at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size),
                                                        C10_AS_INTARRAYREF_SLOW(stride), device_allocator(), kKeys,
                                                        at::dtype_or_default(dtype)));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const int device = is_npu(to) ? to.device().index() : self.device().index();
  Graph* graph = capture_of(device);
  TORCH_CHECK(!graph || (is_npu(self) && is_npu(to)),
              "a copy between host and device is not permitted while a graph is captured");
  if (races_refused() && !graph) {
    const c10::Stream stream = current_stream(device);
    if (is_npu(self)) touch(trace_of(self.storage().data_ptr()), stream, false, "aten::copy_");
    if (is_npu(to)) touch(trace_of(to.storage().data_ptr()), stream, true, "aten::copy_");
    called(stream);
    const at::Tensor& hosts = is_npu(self) ? to : self;  // memory that is not pinned is copied by the host
    if (!is_npu(hosts) && (!non_blocking || !is_pinned(hosts.storage().data()))) {
      host_waits(clock_of(stream));
    } else if (!is_npu(self) && self.is_contiguous()) {
      sent(self.data_ptr(), self.nbytes(), stream);
    }
  }
  const at::Tensor target = is_npu(to) ? as_cpu(to) : to, source = is_npu(self) ? as_cpu(self) : self;
  target.copy_(source);
  if (graph) graph->add_action("aten::copy_", [target, source] { target.copy_(source); });
  return to;
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!format || *format == at::MemoryFormat::Contiguous, "resize_: contiguous only");
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  int64_t elements = 1;
  for (const int64_t length : sizes) elements *= length;
  const size_t bytes = (elements + self.storage_offset()) * self.element_size();
  if (elements && bytes > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.element_size());
  return self.set_(std::move(source), 0, {elements}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  TORCH_CHECK(stream.device_type() == kNPU, "record_stream: a stream of ", stream.device());
  record_use(trace_of(self.storage().data_ptr()), stream);
}

bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  return (is_npu(self) || self.device().is_cpu()) && (is_npu(from) || from.device().is_cpu());
}

// ---- autocast: floating arguments become the dtype of the region, or float32

template <bool lower>
void cast_and_call(const c10::OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const at::ScalarType to = lower ? at::autocast::get_autocast_dtype(kNPU) : at::kFloat;
  const auto cast = [to](const at::Tensor& tensor) {
    const bool wanted = is_npu(tensor) && at::isFloatingType(tensor.scalar_type()) && tensor.scalar_type() != at::kDouble;
    return wanted ? at::autocast::cached_cast(to, tensor, kNPU) : tensor;
  };
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor() && value.toTensor().defined()) {
      value = cast(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(cast(tensor));
      value = std::move(list);
    }
  }
  op.callBoxed(stack);
}

constexpr const char* kLower[] = {
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d", "conv3d", "einsum",
    "linalg_multi_dot", "linear", "matmul", "mm", "mv", "prelu", "scaled_dot_product_attention"};
constexpr const char* kFloat32[] = {
    "acos", "asin", "binary_cross_entropy_with_logits", "cosh", "cosine_embedding_loss", "cosine_similarity",
    "cross_entropy_loss", "cumprod", "cumsum", "erfinv", "exp", "expm1", "group_norm", "kl_div", "l1_loss",
    "layer_norm", "log", "log10", "log1p", "log2", "log_softmax.int", "mse_loss", "nll_loss", "norm.Scalar",
    "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "prod", "reciprocal", "rsqrt", "sinh", "smooth_l1_loss",
    "softmax.int", "softplus", "sum", "sum.dim_IntList", "tan"};

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("resize_", &resize_);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("record_stream", &record_stream);
  library.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

// A copy sees the conj and neg bits itself; torch would clear them first, by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (const char* name : kLower) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_and_call<true>>());
  for (const char* name : kFloat32) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_and_call<false>>());
  }
}

}  // namespace software_npu
