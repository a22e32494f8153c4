"""Train by the plans of `hdp` in verl's Megatron actor or engine (USE_HDP=1).

Problem: the planner says which ranks of a context parallel (CP) group share a sequence; attention, RoPE,
packing and the loss have to follow, and the update must stay the same.

Idea, in four steps:
1. split: each CP group's sequences become micro-batches of rings; all ranks compute the plans of all groups
   from the gathered lengths, so they agree on the number of micro-batches without more communication;
2. pack: a rank packs the sequences of its own ring, each split into 2 * ring chunks as in plain CP;
3. the ring travels with the bounds of the packed sequences, down to RoPE and attention. It cannot be global
   state: in a pipeline, forwards, backwards and recomputations of several micro-batches interleave;
4. unpack: one sum brings the log-probs of all rings to all ranks of the CP group, a rank's own with gradient.
   The loss is then that of a micro-batch under plain CP, weighed by `loss.whole_batch_loss`.

Invariants (tests/test_hdp_training.py, tests/patched/test_enable_hdp.py): every token is on one rank of its
CP group; log-probs, gradients and updates are those of the mini-batch in one micro-batch, however split.
Cost: per micro-batch, one sum of [sequences, width] floats over the CP group; process groups are made once.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ascend_rl.process.counts import count
from ascend_rl.settings.switch import CannotWork, refuse, switched_on

if TYPE_CHECKING:  # numba takes long to import, and this module is imported wherever megatron-core is
    from ascend_rl.hdp.hdp import CostModel, Plan

ENGINE_WORKERS = "engine workers follow no plan: set trainer.use_legacy_worker_impl=auto"
RINGS = "hdp_rings"  # a micro-batch's key: [sequences, 2] int64, first rank and size of each one's ring


@dataclass(frozen=True)
class Ring:
    """The ranks that share this rank's sequences of a micro-batch.

    Attributes:
        ranks: global ranks.
        rank: this rank's place among them.
        group: their process group; None for a single rank.
        whole: whether they are the whole CP group.
    """

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None
    whole: bool = False

    @property
    def size(self) -> int:
        return len(self.ranks)


# --- in the layers of a model


def ring_of(bounds: torch.Tensor) -> Ring | None:
    """The ring that `pack` sent along with the bounds of packed sequences (cu_seqlens)."""
    return getattr(bounds, "hdp_ring", None)


def place(bounds: torch.Tensor, cp_size: int, cp_rank: int) -> tuple[int, int]:
    """How many ranks share the packed sequences, and this rank's place; without rings the CP group's."""
    ring = ring_of(bounds)
    return (cp_size, cp_rank) if ring is None else (ring.size, ring.rank)


def use_ring(attention, bounds: torch.Tensor | None) -> None:
    """Make TransformerEngine's attention work in the ring of the packed sequences."""
    if (ring := ring_of(bounds)) is not None:
        attention.set_context_parallel_group(ring.group, list(ring.ranks), attention.cp_stream)


def ring_parameters(bounds: torch.Tensor | None) -> dict[str, Any]:
    """What MindSpeed's ring attention (its ``cp_para``) needs for the ring of the packed sequences.

    A ring has one communicator and no inner window; the ring of the whole CP group keeps its original setup.
    """
    ring = ring_of(bounds)
    if ring is None or ring.whole:
        return {}
    ranks = list(ring.ranks)
    return {
        "cp_group": ring.group,
        "cp_size": ring.size,
        "rank": ring.rank,
        "cp_global_ranks": ranks,
        "cp_group_for_send_recv_overlap": None,
        "cp_inner_ranks": [ranks[ring.rank]],
        "cp_outer_ranks": ranks,
        "cp_dkv_outer_ranks": ranks,
        "cp_group_for_intra_window": None,
        "cp_group_for_intra_window_send_recv_overlap": None,
    }


# --- packing and unpacking


class Share:
    """This rank's tokens of a micro-batch.

    Attributes:
        bounds: [sequences of the ring + 1] int32, where whole sequences begin and end, with padding; carries
            the ring.
        longest: tokens of the longest sequence, with padding.
        row, column: [T] where each token that is not padding is in the micro-batch's matrices.
        at: [T] its place among this rank's ``tokens``.
    """

    def __init__(self, mask: torch.Tensor, mine: list[int], ring: Ring, tp_size: int):
        align = 2 * ring.size * tp_size  # for one rank too: MindSpeed's ring attention halves every sequence
        ends, longest, tokens = [0], 0, 0
        rows, columns, places = [], [], []
        for i in mine:
            column = mask[i].nonzero()[:, 0]
            padded = -(-len(column) // align) * align
            chunk = padded // (2 * ring.size)
            starts = ring.rank * chunk, (2 * ring.size - 1 - ring.rank) * chunk
            position = torch.cat([torch.arange(start, start + chunk, device=mask.device) for start in starts])
            held = position < len(column)
            columns.append(column[position[held]])
            rows.append(torch.full_like(columns[-1], i))
            places.append(tokens + held.nonzero()[:, 0])
            ends.append(ends[-1] + padded)
            tokens += 2 * chunk
            longest = max(longest, padded)
        self.bounds = torch.tensor(ends, dtype=torch.int32, device=mask.device)
        self.bounds.hdp_ring = ring
        self.longest, self.tokens = longest, tokens
        self.row, self.column, self.at = torch.cat(rows), torch.cat(columns), torch.cat(places)


class MicroBatch:
    """The rings of a micro-batch while the model's forward runs on it."""

    def __init__(self, rings: torch.Tensor, parallel: HybridDataParallel):
        self.parallel = parallel
        rank = parallel.cp_rank
        pairs = rings.tolist()
        self.mine = [i for i, (first, size) in enumerate(pairs) if first <= rank < first + size]
        self.ring = parallel.ring(*pairs[self.mine[0]])
        self._share: Share | None = None

    def share(self, mask: torch.Tensor) -> Share:
        if self._share is None:
            self._share = Share(mask, self.mine, self.ring, self.parallel.tp_size)
            count("hdp_rings" if self.ring.size > 1 else "hdp_alone")
        return self._share

    def pack(self, values: torch.Tensor, mask: torch.Tensor, packed_seq_params: type, first_stage: bool):
        """What verl's preprocess_packed_seqs returns, for this rank's ring.

        Args:
            values, mask: [sequences, width].
            packed_seq_params: megatron-core's class of that name.
            first_stage: False returns ``values`` unchanged, for stages that embed no tokens.
        """
        share = self.share(mask)
        params = packed_seq_params(
            qkv_format="thd",
            cu_seqlens_q=share.bounds, cu_seqlens_kv=share.bounds,
            cu_seqlens_q_padded=share.bounds, cu_seqlens_kv_padded=share.bounds,
            max_seqlen_q=share.longest, max_seqlen_kv=share.longest,
        )  # fmt: skip
        if not first_stage:
            return values, params
        packed = values.new_zeros(share.tokens)
        packed[share.at] = values[share.row, share.column]
        return packed.unsqueeze(0), params

    def unpack(self, packed: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[1, tokens] of each rank -> [sequences, width] on every rank, 0 at padding; own with gradient."""
        share = self.share(mask)
        where = share.row, share.column
        own = packed.new_zeros(mask.shape).index_put(where, packed[0, share.at])
        everyone = own.detach().clone()
        dist.all_reduce(everyone, group=self.parallel.cp_group)  # a sum of one term: a token is on one rank
        mine = torch.zeros_like(mask, dtype=torch.bool)
        mine[where] = True
        return torch.where(mine, own, everyone)


_CURRENT: ContextVar[MicroBatch | None] = ContextVar("hdp_micro_batch", default=None)


def current() -> MicroBatch | None:
    """The micro-batch whose forward is running; None without a plan (critic, plain CP)."""
    return _CURRENT.get()


# --- planning


def agree(
    lengths: Sequence[Sequence[int]], cp: int, cap_tokens: int, model: CostModel, multiple: int = 1
) -> list[Plan]:
    """A plan for each CP group's own sequences, all with the same number of micro-batches.

    Args:
        lengths: for each CP group, the tokens of each of its sequences.

    Raises:
        ValueError: as `hdp.plan`.
    """
    from ascend_rl.hdp.hdp import plan

    count = 1
    while True:
        plans = [plan(own, cp, 1, cap_tokens, model, multiple=multiple, at_least=count) for own in lengths]
        most = max(p.micro_batches for p in plans)
        if all(p.micro_batches == most for p in plans):
            return plans
        count = most


def cost_model(transformer: Any) -> CostModel:
    """HDP_COST_MODEL=token,pair,ring_step,ring_token,micro_batch, as from `hdp.fit`, or by the model's sizes.

    Args:
        transformer: megatron-core's TransformerConfig.
    """
    from ascend_rl.hdp.hdp import CostModel, scaled

    text = os.environ.get("HDP_COST_MODEL")
    if not text:
        hidden, tp = transformer.hidden_size, transformer.tensor_model_parallel_size
        attention = transformer.num_attention_heads * transformer.kv_channels
        kv = transformer.num_query_groups * transformer.kv_channels
        ffn = transformer.ffn_hidden_size
        if transformer.num_moe_experts:
            ffn = transformer.moe_router_topk * transformer.moe_ffn_hidden_size
        linear = hidden * (2 * attention + 2 * kv + 3 * ffn)
        return scaled(linear / tp, attention / tp, kv / tp)
    try:
        token, pair, ring_step, ring_token, micro_batch = map(float, text.split(","))
    except ValueError:
        raise CannotWork(
            f"HDP_COST_MODEL={text}: give five numbers, token,pair,ring_step,ring_token,micro_batch, as "
            "ascend_rl.hdp.hdp.fit finds them"
        ) from None
    return CostModel(token, pair, ring_step, ring_token, micro_batch)


@functools.cache
def ring_groups(cp_groups: tuple[tuple[int, ...], ...]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """This rank's process groups, by global ranks, for every ring of 2 to all but one ranks of a CP group.

    Every rank has to call this, with the ranks of all CP groups in the same order.
    """
    groups = {}
    for ranks in cp_groups:
        for size in range(2, len(ranks)):
            for first in range(len(ranks) - size + 1):
                members = ranks[first : first + size]
                group = dist.new_group(list(members))
                if dist.get_rank() in members:
                    groups[members] = group
    return groups


def problems(actor: Mapping[str, Any], transformer: Any, mtp: Any) -> list[str]:
    """Settings that do not work with HDP, and what to set instead.

    Args:
        actor: configuration of the actor or of the reference policy.
        transformer: megatron-core's TransformerConfig.
        mtp: verl's configuration of multi-token prediction, or None.
    """
    megatron, replay = actor["megatron"], actor.get("router_replay") or {}
    loss = actor.get("policy_loss") or {}
    rules = [
        (megatron["context_parallel_size"] < 2, "context_parallel_size=1 has no rings: use 2 or more"),
        (not megatron.get("use_remove_padding", True), "use_remove_padding=False packs nothing: use True"),
        (actor.get("use_fused_kernels"), "use_fused_kernels=True has its own forward: use False"),
        (replay.get("mode", "disabled") != "disabled", "router_replay follows plain CP: use disabled"),
        (mtp is not None and mtp.get("enable"), "multi-token prediction knows no rings: switch it off"),
        (loss.get("loss_mode") == "geo_mean", "loss_mode=geo_mean weighs micro-batches alike: use another"),
        (
            loss and not actor.get("whole_batch_loss"),  # the reference policy has no loss
            "other micro-batches would be another objective: set actor.whole_batch_loss=True",
        ),
        (getattr(transformer, "fp8", None), "fp8 pads otherwise: train in bfloat16"),
        (
            getattr(transformer, "context_parallel_algo", "megatron_cp_algo") != "megatron_cp_algo",
            "other ways of context parallelism have no rings: use context_parallel_algo=megatron_cp_algo",
        ),
        (
            getattr(transformer, "attention_mask_type", "causal") != "causal",
            "rings need attention_mask_type=causal",
        ),
    ]
    return [text for applies, text in rules if applies]


class HybridDataParallel:
    """What an actor needs to train by plans; created once per actor, by all ranks together.

    Attributes:
        metrics: of the last split, for the trainer's log.
    """

    def __init__(self, mpu, device: str | int | torch.device, model: CostModel):
        """``mpu``: megatron-core's parallel_state."""
        self.cp_group, self.dp_group = mpu.get_context_parallel_group(), mpu.get_data_parallel_group()
        self.cp_rank, self.dp_rank = mpu.get_context_parallel_rank(), mpu.get_data_parallel_rank()
        self.tp_size, self.device = mpu.get_tensor_model_parallel_world_size(), device
        self.ranks = tuple(dist.get_process_group_ranks(self.cp_group))
        everyone = self._gather(list(self.ranks), dist.group.WORLD)
        self.groups = ring_groups(tuple(sorted({tuple(ranks) for ranks in everyone})))
        self.model = model
        self.dump = os.environ.get("HDP_DUMP") if dist.get_rank() == 0 else None
        self.metrics: dict[str, float] = {}

    def _gather(self, numbers: list[int], group) -> list[list[int]]:
        own = torch.tensor(numbers, device=self.device)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, own, group=group)
        return [numbers.tolist() for numbers in found]

    def ring(self, first: int, size: int) -> Ring:
        """This rank's ring: ranks ``first .. first + size - 1`` of its CP group."""
        members = self.ranks[first : first + size]
        whole = size == len(self.ranks)
        group = self.cp_group if whole else self.groups.get(members)
        return Ring(members, self.cp_rank - first, group, whole)

    def split(
        self, batch, use_dynamic_bsz: bool, max_token_len: int | None, multiple: int, update: bool = False
    ):
        """Micro-batches by plan, and the rows of ``batch`` in each, like verl's rearrange_micro_batches.

        Args:
            batch: TensorDict of this CP group's sequences.
            use_dynamic_bsz, max_token_len, multiple, update: see ``divide``.
        """
        lengths = batch["attention_mask"].sum(-1).tolist()
        pictures = "multi_modal_inputs" in batch.keys() and any(batch["multi_modal_inputs"])  # {} of a text
        parts = self.divide(lengths, use_dynamic_bsz, max_token_len, multiple, update, pictures)
        micro_batches = []
        for rows, rings in parts:
            micro_batches.append(batch[rows])
            micro_batches[-1][RINGS] = rings
        return micro_batches, [rows.tolist() for rows, _ in parts]

    def divide(
        self, lengths: list[int], use_dynamic_bsz: bool, max_token_len: int | None, multiple: int,
        update: bool, pictures: bool,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:  # fmt: skip
        """Of each micro-batch by plan the rows of this CP group's batch, and their rings.

        Args:
            lengths: tokens of this CP group's sequences; every CP group has the same number of them.
            max_token_len: tokens in a micro-batch of the CP group, over all its ranks.
            multiple: the number of micro-batches is a multiple of this, for interleaved pipelines.
            update: rather than log-probs; for the dump.
            pictures: some sequences have multi-modal inputs.

        Raises:
            CannotWork: a setting allows no plan.
        """
        rules = [
            (
                not use_dynamic_bsz,
                "micro-batches are planned by tokens: set use_dynamic_bsz=True for the actor and "
                "log_prob_use_dynamic_bsz=True for rollout and reference",
            ),
            (pictures, "only text is packed: set USE_HDP=0 for multi-modal inputs"),
        ]
        refuse("USE_HDP=1", [reason for applies, reason in rules if applies])
        everyone = self._gather(lengths, self.dp_group)
        cap = max_token_len // len(self.ranks)
        plans = agree(everyone, len(self.ranks), cap, self.model, multiple)
        plan = plans[self.dp_rank]
        rings = torch.stack([torch.from_numpy(plan.first), torch.from_numpy(plan.size)], 1)
        found = (plan.micro_batch == m for m in range(plan.micro_batches))
        self.metrics = {
            "hdp/micro_batches": plan.micro_batches,
            "hdp/ring_size": float(plan.size.mean()),
            "hdp/alone": float((plan.size == 1).mean()),
            "hdp/balance": plan.bound / plan.makespan,
        }
        if self.dump:
            self._dump("update" if update else "log_prob", everyone, plans)
        return [(rows, rings[rows]) for rows in (torch.from_numpy(of.nonzero()[0]) for of in found)]

    def _dump(self, phase: str, lengths: list[list[int]], plans: list[Plan]) -> None:
        with open(self.dump, "a") as file:
            for group, (own, plan) in enumerate(zip(lengths, plans, strict=True)):
                entry = {"phase": phase, "cp_group": group, "lengths": own}
                entry |= {key: getattr(plan, key).tolist() for key in ("micro_batch", "first", "size")}
                file.write(json.dumps(entry | {"makespan": plan.makespan, "bound": plan.bound}) + "\n")

    def on(self, micro_batch, forward: Callable) -> Callable:
        """``forward``, run with the rings of ``micro_batch``."""

        def call(*args, **kwargs):
            token = _CURRENT.set(MicroBatch(micro_batch[RINGS], self))
            try:
                return forward(*args, **kwargs)
            finally:
                _CURRENT.reset(token)

        return call


def enabled() -> bool:
    return switched_on("USE_HDP")


def refuse_engine_workers() -> None:
    """Refuse HDP with verl's engine workers, which split and pack in their own way.

    Raises:
        CannotWork: HDP is switched on.
    """
    if enabled():
        refuse("USE_HDP=1", [ENGINE_WORKERS])


def setup(actor: Mapping[str, Any], transformer: Any, mtp: Any, mpu, device) -> HybridDataParallel | None:
    """The `HybridDataParallel` of an actor under USE_HDP=1; None without it.

    Raises:
        CannotWork: settings do not work together; it says what to set instead.
    """
    if not enabled():
        return None
    refuse("USE_HDP=1", problems(actor, transformer, mtp))
    return HybridDataParallel(mpu, device, cost_model(transformer))
