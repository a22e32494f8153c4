"""Hybrid data parallelism (USE_HDP=1) in verl's Megatron engine, on megatron-core and MindSpeed.

verl's engine keeps sequences in nested tensors, without padding, and weighs micro-batches as the objective
wants it. TransformerEngine's attention takes its group from PackedSeqParams; RoPE and MindSpeed's ring
attention get the ring here, which comes with cu_seqlens (hdp/hdp_training.py).
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from ascend_rl.glue.cann9_1.hooks import Hooks, then
from ascend_rl.hdp import hdp_training
from ascend_rl.hdp.hdp_training import RINGS, HybridDataParallel

hooks = Hooks()
_PLANS: ContextVar[HybridDataParallel | None] = ContextVar("hdp_plans", default=None)


@hooks.after("verl.workers.engine_workers")
def set_up_hdp(module: ModuleType) -> None:
    def give_plans(self) -> None:
        if self.actor is not None:
            self.actor.engine.hdp = plans_of(self.actor.engine, self.config.actor.policy_loss)
        if self.ref is not None:
            self.ref.engine.hdp = plans_of(self.ref.engine, None)

    then(module.ActorRolloutRefWorker, "init_model", give_plans)


def plans_of(engine: Any, policy_loss: Any) -> HybridDataParallel | None:
    from megatron.core import parallel_state
    from verl.utils.device import get_device_name

    if not hdp_training.enabled():
        return None
    megatron = engine.engine_config
    actor = {
        "megatron": {
            "context_parallel_size": megatron.context_parallel_size,
            "use_remove_padding": megatron.use_remove_padding,
        },
        "router_replay": {"mode": megatron.router_replay.mode},
        "use_fused_kernels": megatron.use_fused_kernels,
        "policy_loss": policy_loss,
        "whole_batch_loss": True,  # verl 0.9.1 knows no other
    }
    mtp = engine.model_config.mtp
    return hdp_training.setup(actor, engine.tf_config, mtp, parallel_state, get_device_name())


@hooks.after("verl.workers.engine.megatron.transformer_impl")
def follow_plans(module: ModuleType) -> None:
    """Micro-batches of the plan; each one's forward step runs under its rings."""
    engine, prepare = module.MegatronEngine, module.prepare_micro_batches
    engine.hdp = None  # that of the worker is set once the model is built
    run, step = engine.forward_backward_batch, module.MegatronEngineWithLMHead.forward_step

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        token = _PLANS.set(self.hdp)
        try:
            output = run(self, data, loss_function, forward_only)
        finally:
            _PLANS.reset(token)
        if self.hdp is not None and output and not forward_only:
            output["metrics"].update({name: [value] for name, value in self.hdp.metrics.items()})
        return output

    def prepare_micro_batches(data: Any, dp_group: Any = None, num_batches_divided_by: Any = None, **rest):
        if (plans := _PLANS.get()) is None:
            return prepare(data, dp_group, num_batches_divided_by, **rest)
        return planned(plans, data, num_batches_divided_by or 1)

    def forward_step(self, batch_iter: Any, *args, **kwargs) -> Any:
        if self.hdp is None:
            return step(self, batch_iter, *args, **kwargs)
        batch = next(batch_iter)
        return self.hdp.on(batch, step)(self, iter([batch]), *args, **kwargs)

    engine.forward_backward_batch = forward_backward_batch
    module.prepare_micro_batches = prepare_micro_batches
    module.MegatronEngineWithLMHead.forward_step = forward_step


def planned(plans: HybridDataParallel, data: Any, multiple: int) -> tuple[list, list]:
    """verl's prepare_micro_batches."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.model import extract_multi_modal_inputs

    by_tokens = tu.get_non_tensor_data(data, key="use_dynamic_bsz", default=True)
    tokens = data["max_token_len_per_gpu"] * data["sp_size"] if by_tokens else None
    lengths = data["input_ids"].offsets().diff().tolist()
    pictures = bool(extract_multi_modal_inputs(data.get("multi_modal_inputs", [])))
    parts = plans.divide(lengths, by_tokens, tokens, multiple, torch.is_grad_enabled(), pictures)
    micro_batches = []
    for rows, rings in parts:
        micro_batches.append(tu.index_select_tensor_dict(data, rows))
        micro_batches[-1][RINGS] = rings
    return micro_batches, [rows.tolist() for rows, _ in parts]


@hooks.after("verl.models.mcore.util")
def pack_by_ring(module: ModuleType) -> None:
    pack, unpack = module.preprocess_thd_engine, module.postprocess_thd_engine

    def preprocess_thd_engine(
        values: torch.Tensor, pre_process: bool = True, need_roll: bool = False, **options
    ):
        if (rings := hdp_training.current()) is None:
            return pack(values, pre_process, need_roll, **options)
        lengths = values.offsets().diff()[:, None]
        padded = values.to_padded_tensor(0)
        column = torch.arange(padded.shape[1], device=padded.device)
        if need_roll:
            padded = padded.gather(1, (column + 1) % lengths)
        params = functools.partial(
            module.PackedSeqParams, cp_group=rings.ring.group, local_cp_size=rings.ring.size
        )
        packed, params = rings.pack(padded, column < lengths, params, pre_process)
        return packed, params, None  # positions are of multi-token prediction

    def postprocess_thd_engine(
        output: torch.Tensor,
        params: Any,
        values: torch.Tensor,
        rows: int,
        post_process: bool = True,
        **options,
    ):
        if (rings := hdp_training.current()) is None:
            return unpack(output, params, values, rows, post_process, **options)
        if not post_process:
            return output
        lengths = values.offsets().diff()
        mask = torch.arange(int(lengths.max()), device=output.device) < lengths[:, None]
        found = zip(rings.unpack(output, mask), lengths.tolist(), strict=True)
        return torch.nested.as_nested_tensor([row[:length] for row, length in found], layout=torch.jagged)

    module.preprocess_thd_engine = preprocess_thd_engine
    module.postprocess_thd_engine = postprocess_thd_engine


@hooks.after("megatron.core.models.common.embeddings.rope_utils")
def rotate_by_ring(module: ModuleType) -> None:
    rotate = module._apply_rotary_pos_emb_thd

    def _apply_rotary_pos_emb_thd(t, cu_seqlens, *args, **kwargs):
        if (ring := hdp_training.ring_of(cu_seqlens)) is not None:
            kwargs["cp_group"] = SimpleNamespace(size=lambda: ring.size, rank=lambda: ring.rank)
        return rotate(t, cu_seqlens, *args, **kwargs)

    module._apply_rotary_pos_emb_thd = _apply_rotary_pos_emb_thd


@hooks.after("mindspeed.core.context_parallel.ring_context_parallel.ring_context_parallel")
def attend_by_ring(module: ModuleType) -> None:
    attend = module.ringattn_context_parallel

    def ringattn_context_parallel(
        q, k, v, n, cp_para, softmax_scale=None, attn_mask=None, dropout_p=0.0, packed_seq_params=None,
        shapes=None,
    ):  # fmt: skip
        if packed_seq_params is not None:
            cp_para |= hdp_training.ring_parameters(packed_seq_params.cu_seqlens_q_padded)
        return attend(q, k, v, n, cp_para, softmax_scale, attn_mask, dropout_p, packed_seq_params, shapes)

    module.ringattn_context_parallel = ringattn_context_parallel
