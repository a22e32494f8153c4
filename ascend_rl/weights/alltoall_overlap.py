"""Expert weights in the layout of MindSpeed's alltoall overlap: loaded from a checkpoint, exported to vLLM.

Grouped matmul wants the experts of a rank in one tensor, [in, out] each, so megatron-core's GroupedMLP, which
the overlap extends, has two parameters per layer instead of an [out, in] pair for each expert (H hidden
channels, I channels of an expert on this rank, E experts on this rank):

    weight1: [H, E * 2 * I]     in memory [E, H, 2 * I], the columns of an expert are gate, then up
    weight2: [E * I, H]         in memory [E, I, H]

An expert is a block of memory; of weight1 it is *not* a range of columns, whatever the shape says. On disk
there is one layout for all kinds of experts; GroupedMLP saves and loads transposed copies. So a loader must
use what ``dist_checkpointing.load`` returns; only the other parameters are filled in place.

Invariants (tests/test_alltoall_overlap.py): for every EP and ETP each rank gets every expert once, under its
name, equal to brute force; a share of the wrong size is an error. Cost: a rank receives each value it lacks
once, and holds EP experts besides the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ascend_rl.settings.switch import CannotWork, refuse, switched_on

SWITCH = "USE_ALLTOALL_OVERLAP"
GROUPED = (".mlp.experts.weight1", ".mlp.experts.weight2")


def is_grouped(name: str) -> bool:
    """Whether a Megatron parameter of this name holds all experts of a rank."""
    return name.endswith(GROUPED)


def refuse_mbridge(use_mbridge: bool) -> None:
    """Raises CannotWork when mbridge would have to move weights of this layout, which it cannot."""
    if switched_on(SWITCH) and use_mbridge:
        reason = (
            "mbridge can neither load nor export experts kept as weight1/weight2: set "
            "megatron.use_mbridge=False and load a checkpoint of converter_hf_to_mcore.py "
            "(megatron.use_dist_checkpointing=True, megatron.dist_checkpointing_path=...)"
        )
        refuse(f"{SWITCH}=1", [reason])


def grouped_weights(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of ``model``, by name, that a load does not fill in place.

    Raises:
        CannotWork: there are some, but the switch is off; verl would leave them as they are, silently.
    """
    weights = {name: parameter for name, parameter in model.named_parameters() if is_grouped(name)}
    if weights and not switched_on(SWITCH):
        raise CannotWork(
            f"the model keeps its experts as weight1/weight2 ({len(weights)} tensors, such as "
            f"{min(weights)}), which are not loaded unless {SWITCH}=1. Set it, or build the model without "
            "moe_alltoall_overlap_comm and moe_use_legacy_grouped_gemm (override_transformer_config)"
        )
    return weights


@torch.no_grad()
def restore(weights: dict[str, torch.nn.Parameter], loaded: dict[str, Any], prefix: str = "") -> None:
    """Copy ``loaded[prefix + name]``, as ``dist_checkpointing.load`` returned it, to each of ``weights``."""
    for name, parameter in weights.items():
        parameter.copy_(loaded[prefix + name])


def split_experts(name: str, weight: torch.Tensor, experts: int, hidden: int) -> Iterator[torch.Tensor]:
    """The experts of weight1 (each [2 * I, H]) or weight2 (each [H, I]): contiguous copies, [out, in].

    Example, weight2 of 2 experts, H = 1, I = 2: [[a], [b], [c], [d]] gives [[a, b]] and [[c, d]].
    """
    shape = (experts, hidden, -1) if name.endswith("1") else (experts, -1, hidden)
    for block in weight.detach().view(shape):
        yield block.t().contiguous()


def merge_shards(name: str, shards: list[torch.Tensor]) -> list[torch.Tensor]:
    """One expert from its shards of expert tensor parallelism: [gate, up], each [I, H], or [down], [H, I]."""
    if name.endswith("2"):
        return [torch.cat(shards, dim=1)]
    gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
    return [torch.cat(gates), torch.cat(ups)]


def hf_experts(
    name: str, weight: torch.Tensor, converter, ep_group, etp_group
) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face's names and tensors of all experts of a layer; all ranks of the groups iterate together.

    Args:
        name: of a grouped parameter, with the number of the layer in the whole model.
        weight: this rank's share of it.
        converter: verl's weight converter of the model, which names experts as it does those of TEGroupedMLP.

    Raises:
        ValueError: ``weight`` is not a share by EP and ETP.
    """
    config, ep_size, etp_size = converter.mcore_config, ep_group.size(), etp_group.size()
    experts, hidden, layer = config.num_moe_experts // ep_size, config.hidden_size, name.rpartition(".")[0]
    matrices = 2 if name.endswith("1") else 1
    needed = experts * matrices * hidden * config.moe_ffn_hidden_size // etp_size
    if weight.numel() != needed:
        raise ValueError(
            f"{name} has shape {list(weight.shape)}, but EP {ep_size} and ETP {etp_size} leave {experts} "
            f"experts with {needed} values to a rank; moe_tp_extend_ep, which cuts otherwise, is unsupported"
        )
    for local, shard in enumerate(split_experts(name, weight, experts, hidden)):
        parts = merge_shards(name, _gathered(shard, etp_group))
        for rank, whole in enumerate(zip(*(_gathered(part, ep_group) for part in parts), strict=True)):
            single = f"{layer}.linear_fc{name[-1]}.weight{rank * experts + local}"
            yield from zip(*converter.convert_param(single, list(whole)), strict=True)


def _gathered(tensor: torch.Tensor, group) -> list[torch.Tensor]:
    """``tensor`` of every rank of ``group``, in the order of ranks."""
    if group.size() == 1:
        return [tensor]
    tensors = [torch.empty_like(tensor) for _ in range(group.size())]
    torch.distributed.all_gather(tensors, tensor, group=group)
    return tensors
