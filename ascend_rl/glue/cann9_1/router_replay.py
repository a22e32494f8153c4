"""Routes of an MoE's rollout that the update replays (ROUTER_REPLAY=R3, docs/recipes.md)."""

from __future__ import annotations

import functools
import types

from ascend_rl.glue.cann9_1.hooks import Hooks

hooks = Hooks()


def need_routes(routes):
    """The routes of a response: [tokens, layers, experts of a token].

    Raises:
        ValueError: there are none, or all are zero: the engine recorded none, and the update would send every
            token to expert 0.
    """
    if routes is None or not routes.any():
        raise ValueError(
            "ROUTER_REPLAY=R3: the rollout returned no routes, or expert 0 for everything: this version of "
            "vLLM or vllm-ascend does not record them; use ROUTER_REPLAY=R2"
        )
    return routes


@hooks.after("verl.workers.rollout.vllm_rollout.vllm_async_server")
def refuse_empty_routes(module: types.ModuleType) -> None:
    """In the first response already."""
    generate = module.vLLMHttpServer.generate

    @functools.wraps(generate)
    async def checked(self, *args, **kwargs):
        output = await generate(self, *args, **kwargs)
        if self.config.enable_rollout_routing_replay and len(output.token_ids):
            need_routes(output.routed_experts)
        return output

    module.vLLMHttpServer.generate = checked
