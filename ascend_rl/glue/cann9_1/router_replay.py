"""Routes of an MoE's log-probs or rollout that the update replays (ROUTER_REPLAY, docs/recipes.md)."""

from __future__ import annotations

import functools
import os
import types

from ascend_rl.glue.cann9_1.hooks import Hooks, first
from ascend_rl.process.counts import VARIABLE, count

hooks = Hooks()


@hooks.after("verl.workers.engine.megatron.transformer_impl")
def refuse_empty_routes(module: types.ModuleType) -> None:
    """In the first pass. An engine that records no routes returns zeros: every token would go to expert 0."""

    def check(engine, data, *args, **kwargs) -> None:
        routes = data.get("routed_experts", None)
        if engine.engine_config.router_replay.mode != "R3" or routes is None:  # without any, verl stops
            return
        mask = data["response_mask"]
        only_padding = not (mask.values() if mask.is_nested else mask).any()
        if not routes.values().any() and not only_padding:
            raise ValueError(
                "ROUTER_REPLAY=R3: all routes of the rollout are expert 0: this version of vLLM or "
                "vllm-ascend does not record them; use ROUTER_REPLAY=R2"
            )

    first(module.MegatronEngine, "forward_backward_batch", check)


@hooks.after("verl.workers.engine.megatron.transformer_impl")
def count_routes(module: types.ModuleType) -> None:
    """Where counts are recorded: what was replayed, and where the router itself chooses other experts."""
    replay, forward = module.RouterReplay.get_replay_topk, module.RouterReplayAction.REPLAY_FORWARD

    def remember(engine, data, loss_function=None, forward_only=False) -> None:
        module.RouterReplay.updates = not forward_only  # recomputed layers have no gradient at first either

    @functools.wraps(replay)
    def get_replay_topk(self, scores, topk, default_compute_topk, **groups):
        taken = replay(self, scores, topk, default_compute_topk=default_compute_topk, **groups)
        if self.router_replay_action == forward and VARIABLE in os.environ:
            chosen = default_compute_topk(scores, topk, **groups)
            own, sent = (experts.sort(-1).values for _, experts in (chosen, taken))
            mask = self.target_replay_mask  # of R3: all tokens but the last of each response
            count("router_replay", len(sent) if mask is None else int(mask.sum()))
            others = int((own != sent).any(-1).sum())
            if self.updates:
                count("other_routes_in_updates", others)
            else:
                count("other_routes", others)
        return taken

    module.RouterReplay.get_replay_topk = get_replay_topk
    first(module.MegatronEngine, "forward_backward_batch", remember)
