"""Layers with TransformerEngine's arguments and attributes; each a few lines of torch, without fp8 and
fusion."""

from __future__ import annotations

import torch
from torch.nn.functional import layer_norm, linear, rms_norm

from . import distributed, fp8, ops, optimizers, tensor  # noqa: F401
from .attention import DotProductAttention
from .extra_state import ExtraState

__all__ = ["DotProductAttention", "GroupedLinear", "LayerNorm", "LayerNormLinear", "Linear", "RMSNorm"]


class Module(ExtraState, torch.nn.Module):
    """What megatron-core reads of every TransformerEngine layer with weights."""

    fp8 = fp8_calibration = False

    def __init__(
        self,
        in_features,
        out_features,
        *,
        tp_size=1,
        tp_group=None,
        parallel_mode=None,
        sequence_parallel=False,
        bias=False,
        return_bias=False,
        init_method=None,
        params_dtype=torch.float32,
        device="cpu",
        fuse_wgrad_accumulation=False,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        ub_name=None,
    ):
        super().__init__()
        assert not return_bias and not fuse_wgrad_accumulation, "no Qwen has it"
        assert not bias or parallel_mode == "column", "Qwen2 has it at query, key and value alone"
        self.fp8_meta = {"fp8_checkpoint": False}
        self.use_bias, self.tp_size, self.parallel_mode = bias, tp_size, parallel_mode
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self._new = {"dtype": params_dtype, "device": device}
        self._init = init_method, get_rng_state_tracker, rng_tracker_name

    def _weight(self, name: str) -> None:
        weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, **self._new))
        init_method, tracker, name_of_state = self._init
        with torch.no_grad(), tracker().fork(*filter(None, [name_of_state])) if tracker else torch.no_grad():
            init_method(weight)
        self.register_parameter(name, weight)
        weight = getattr(self, name)  # accelerate may have put another one in its place
        weight.tensor_model_parallel = True  # also where there is one rank: verl asks for it
        weight.partition_dim, weight.partition_stride = int(self.parallel_mode == "row"), 1

    def _bias(self) -> None:
        bias = torch.nn.Parameter(torch.zeros(self.out_features, **self._new)) if self.use_bias else None
        if bias is not None:
            bias.tensor_model_parallel, bias.partition_dim, bias.partition_stride = True, 0, 1
        self.register_parameter("bias", bias)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        pass

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T with the communication of ``parallel_mode``."""
        from megatron.core.tensor_parallel import mappings

        if self.tp_size > 1 and self.parallel_mode == "column":
            enter = (
                mappings.gather_from_sequence_parallel_region
                if self.sequence_parallel
                else mappings.copy_to_tensor_model_parallel_region
            )
            return linear(enter(x), self.weight, self.bias)
        y = linear(x, self.weight, self.bias)
        if self.tp_size > 1 and self.parallel_mode == "row":
            leave = (
                mappings.reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else mappings.reduce_from_tensor_model_parallel_region
            )
            return leave(y)
        return y


class Linear(Module):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._weight("weight")
        self._bias()

    def forward(self, x, is_first_microbatch=None):
        return self._multiply(x)


class LayerNormLinear(Module):
    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        *,
        normalization,
        zero_centered_gamma=False,
        return_layernorm_output=False,
        **kwargs,
    ):
        super().__init__(in_features, out_features, **kwargs)
        assert normalization == "RMSNorm" and not zero_centered_gamma and not return_layernorm_output
        self.eps = eps
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, **self._new))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self._weight("weight")
        self._bias()

    def forward(self, x, is_first_microbatch=None):
        return self._multiply(rms_norm(x, (x.shape[-1],), self.layer_norm_weight, self.eps))


class GroupedLinear(Module):
    def __init__(self, num_gemms, *args, **kwargs):
        super().__init__(*args, **kwargs)
        assert self.tp_size == 1, "megatron-core splits experts itself"
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            self._weight(f"weight{i}")

    def forward(self, x, m_splits, is_first_microbatch=None):
        rows = x.split([int(m) for m in m_splits])
        return torch.cat([linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(rows)])


class RMSNorm(ExtraState, torch.nn.Module):
    def __init__(
        self,
        hidden_size,
        eps,
        sequence_parallel=False,
        zero_centered_gamma=False,
        params_dtype=torch.float32,
        device="cpu",
    ):
        super().__init__()
        assert not zero_centered_gamma
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x):
        return self._norm(x, self.weight.shape, self.weight, eps=self.eps)

    _norm = staticmethod(rms_norm)


class LayerNorm(RMSNorm):
    _norm = staticmethod(layer_norm)
