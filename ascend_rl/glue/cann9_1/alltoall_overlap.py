"""MindSpeed core_r0.16.0's alltoall overlap (USE_ALLTOALL_OVERLAP=1) on megatron-core 0.16.1 and mbridge.

Its layers keep a rank's experts in weight1 and weight2 (weights/alltoall_overlap.py), for which mbridge has
no names. So each rank reads its own experts, and an export sends each rank all others by AllToAllV.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from ascend_rl.glue.cann9_1.hooks import Hooks
from ascend_rl.weights.moe_alltoallv import WithoutExperts, hf_slice, stream
from ascend_rl.weights.reshard import PARTS, Slice

hooks = Hooks()
ALL_EXPERTS = SimpleNamespace(tensor_model_parallel_size=1, data_parallel_size=1, expert_parallel_size=1)


@hooks.after("mindspeed.core.transformer.moe.moe_feature.overlap.experts")
def take_the_groups(module: ModuleType) -> None:
    """The constructor lacks the pg_collection that its layer passes and GroupedMLP needs."""
    experts = module.AlltoAllOverLapGmmExpertsImpl

    def __init__(self, num_local_experts: int, config: Any = None, pg_collection: Any = None):
        super(experts, self).__init__(num_local_experts, config, pg_collection)
        if config.gated_linear_unit:
            assert config.activation_func is torch.nn.functional.silu, "fused SwiGLU needs silu"
            self.activation_func = module.fused_swiglu

    experts.__init__ = __init__


@hooks.after("mindspeed.core.transformer.moe.moe_feature.overlap.moe_layer")
def take_the_padding_mask(module: ModuleType) -> None:
    """megatron-core 0.16.1 passes one, None without dynamic context parallelism."""
    layer = module.AlltoAllOverlapMoeLayer
    original = layer.forward

    def forward(self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        assert padding_mask is None, "MindSpeed's overlap knows no padding mask"
        return original(self, hidden_states)

    layer.forward = forward


@hooks.after("mbridge.core.bridge")
def move_grouped_experts(module: ModuleType) -> None:
    bridge = module.Bridge
    load, export = bridge.load_weights, bridge.export_weights

    def overlaps(self) -> bool:
        return getattr(self.config, "moe_alltoall_overlap_comm", False)

    def load_weights(self, models: list, *args, **kwargs) -> None:
        if not overlaps(self):
            return load(self, models, *args, **kwargs)
        others = [WithoutExperts(model) for model in models]
        load(self, others, *args, **kwargs)
        for model in others:
            read_experts(model.model, self.safetensor_io.load_one_hf_weight)

    def export_weights(self, models: list) -> Iterator[tuple[str, torch.Tensor]]:
        if not overlaps(self) or isinstance(models[0], WithoutExperts):
            return export(self, models)
        from megatron.core import parallel_state

        every = stream(models, functools.partial(export, self), self.hf_config, ALL_EXPERTS, parallel_state)
        return ((name, tensor.clone()) for name, tensor in every)  # its buffer is reused; a save keeps all

    bridge.load_weights, bridge.export_weights = load_weights, export_weights


@torch.no_grad()
def read_experts(model: torch.nn.Module, read: Any) -> None:
    """Fill the experts of this rank; ``read`` gives the tensor of a name."""
    from megatron.core import parallel_state

    if parallel_state.get_expert_tensor_parallel_world_size() != 1:
        raise ValueError("the alltoall overlap needs actor.megatron.expert_tensor_parallel_size=1")
    for layer in model.decoder.layers:
        if hasattr(layer.mlp, "experts"):
            experts = layer.mlp.experts
            first = parallel_state.get_expert_model_parallel_rank() * experts.num_local_experts
            for index in range(experts.num_local_experts):
                for part in PARTS:
                    name = Slice(layer.layer_number - 1, first + index, part).name
                    hf_slice(experts, index, part).copy_(read(name))
