"""vLLM's CPU backend for weights that change, as on the other stack (patch vllm_cpu_rollout)."""

from __future__ import annotations

import os
import types

from ascend_rl.glue.cann9_1.hooks import Hooks
from ascend_rl.rollout.vllm_cpu_rollout import keep_weights_in_place
from ascend_rl.speculation.rejection_sampler import expand

hooks = Hooks()


@hooks.after("vllm._custom_ops")
def plain_kernels(module: types.ModuleType) -> None:
    """The linear kernels read the parameters; the kernel of rms_norm ignores strides, so it gets none."""
    keep_weights_in_place(module, os.environ)
    kernel = module.rms_norm

    def rms_norm(out, input, weight, epsilon):
        kernel(out, input.contiguous() if input.device.type == "cpu" else input, weight, epsilon)

    module.rms_norm = rms_norm


@hooks.after("vllm.platforms.cpu")
def keep_the_worker_in_the_engine(module: types.ModuleType) -> None:
    """vLLM makes mp of distributed_executor_backend=uni, since only in a new process can it set OpenMP's
    variables. With VLLM_CPU_OMP_THREADS_BIND=nobind it sets none."""
    check = module.CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config) -> None:
        parallel = vllm_config.parallel_config
        wanted = parallel.distributed_executor_backend
        check(cls, vllm_config)
        if wanted == "uni" and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
            parallel.distributed_executor_backend = wanted

    module.CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


@hooks.after("vllm.model_executor.layers.fused_moe.cpu_fused_moe")
def plain_experts(module: types.ModuleType) -> None:
    """Its grouped kernel packs the weights. Without it, each forward pass constructs a layer for the
    activation, where no configuration of vLLM is set."""
    import torch

    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    module._CPU_MOE_ACT_FN[MoEActivation.SILU] = silu_and_mul
    module.CPUFusedMOE.check_grouped_gemm = lambda self, layer: (False, "none")


@hooks.after("vllm.model_executor.layers.fused_moe.cpu_fused_moe")
def leave_experts_to_their_ranks(module: types.ModuleType) -> None:
    """Experts are taken by their numbers in the whole layer, of which a rank holds some: others add zeros."""
    import torch

    experts = module.CPUFusedMOE
    call = experts.__call__

    def twice(x: torch.Tensor) -> torch.Tensor:  # what an activation halves
        return x.repeat(1, 2)

    def __call__(self, layer, *args, **kwargs):
        slots = kwargs.get("expert_map", args[8] if len(args) > 8 else None)
        if slots is not None and len(layer.gate_up_linear) < len(slots):
            for name, other in (("gate_up_linear", twice), ("down_linear", torch.zeros_like)):
                held = getattr(layer, name)
                setattr(layer, name, [held[slot] if slot >= 0 else other for slot in slots.tolist()])
        return call(self, layer, *args, **kwargs)

    experts.__call__ = __call__


@hooks.after("vllm.model_executor.layers.fused_moe.cpu_fused_moe")
def record_routes(module: types.ModuleType) -> None:
    """It chooses the experts without the layer's router, which would record them (ROUTER_REPLAY=R3)."""
    forward = module.CPUFusedMOE.forward_torch

    def forward_torch(self, layer, x, weights, experts, *args):
        if (capture := getattr(layer.router, "capture_fn", None)) is not None:
            capture(experts)
        return forward(self, layer, x, weights, experts, *args)

    module.CPUFusedMOE.forward_torch = forward_torch


@hooks.after("vllm.utils.cpu_triton_utils")
def take_the_precision(module: types.ModuleType) -> None:
    """The kernel of the rejection sampler lacks an argument that its caller passes: no drafts on a CPU."""
    kernel = module.sample_recovered_tokens_kernel
    function = kernel.func

    def sample(*args, USE_FP64_GUMBEL: bool = False, **kwargs):
        function(*args, **kwargs)

    kernel.func = sample


@hooks.after("vllm.v1.sample.rejection_sampler")
def expand_rows_on_a_cpu(module: types.ModuleType) -> None:
    """The kernel writes into a copy of its output unless that is int64, so temperatures stay undefined."""
    module.expand_batch_to_tokens = expand
