"""verl's rollout servers as the trainer knows them: which replica, which load balancer, which client."""

from __future__ import annotations

from typing import Any

import ray

from ascend_rl.glue.cann9_1.options import options, ours
from ascend_rl.rollout import request_mover
from ascend_rl.rollout.servers import placed, split
from verl.workers.rollout import llm_server
from verl.workers.rollout.router import GlobalRequestLoadBalancer


class LoadBalancer(request_mover.MovableRouting, GlobalRequestLoadBalancer):
    """verl's, for placed samples, requests that move, and servers that restart."""

    def require_acquire_fields(self) -> list[str]:
        return ["placed"]

    def take_servers(self, servers: dict[str, Any]) -> None:
        self._servers |= servers
        super().take_servers(servers)


class Client(llm_server.LLMServerClient):
    """Asks the load balancer for the sample's server, and continues requests that move."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        rollout = config.actor_rollout_ref.rollout
        moves = request_mover.settings(options(rollout)["rollout_rebalance"], rollout.name)
        self.moves = moves is not None  # or servers restart (server_restart)

    async def _acquire_server(self, request_id: str, **fields: Any) -> tuple[str, Any]:
        return await super()._acquire_server(request_id, placed=placed.get(), **fields)

    async def moved(self, request_id: str, target: str | None) -> tuple[str, Any]:
        return await self._load_balancer.move_request.remote(request_id, target)

    def take_servers(self, servers: dict[str, Any]) -> None:
        """The load balancer has them."""

    async def generate(self, request_id, *, prompt_ids, sampling_params, **others):
        media = {key: others.get(key) for key in ("image_data", "video_data")}
        if not self.moves or any(value for key, value in others.items() if key not in media):
            request = {"prompt_ids": prompt_ids, "sampling_params": sampling_params}
            return await super().generate(request_id, **request, **others)
        output = await request_mover.generate(
            self, request_id, prompt_ids, sampling_params, ray.exceptions.RayActorError, **media
        )
        for key in ("min_global_steps", "max_global_steps"):
            output.extra_fields.setdefault(key, output.extra_fields.get("global_steps"))
        return output


class AsyncClient(llm_server.FullyAsyncLLMServerClient, Client):
    """verl's, which goes on with what a weight sync has interrupted, and asks as `Client` does."""


class Servers(llm_server.LLMServerManager):
    """verl's, with `Replica` and `LoadBalancer` where a run has this project's manager."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        rollout = config.actor_rollout_ref.rollout
        self.ours = ours(rollout) and rollout.name == "vllm" and not rollout.disaggregation.enabled
        if self.ours:
            from ascend_rl.glue.cann9_1.rollout_server import Replica  # needs vLLM

            self.rollout_replica_class = Replica
            kwargs["load_balancer_cls"] = LoadBalancer
        super().__init__(config, *args, **kwargs)

    async def _init_global_load_balancer(self) -> None:
        if self.ours:
            given = options(self.rollout_config)
            if given["data_rebalance"] or request_mover.settings(given["rollout_rebalance"], "vllm"):
                by_id = await split(self.server_addresses, self.server_handles)
                self.server_addresses, self.server_handles = list(by_id), list(by_id.values())
        await super()._init_global_load_balancer()

    def get_client(self, client_cls: type | None = None, **kwargs: Any) -> llm_server.LLMServerClient:
        return super().get_client(client_cls or (Client if self.ours else None), **kwargs)
