"""Routes of an MoE's rollout that the update replays (ROUTER_REPLAY=R3, docs/recipes.md)."""

from __future__ import annotations

import types

from ascend_rl.glue.cann9_1.hooks import Hooks, first

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
