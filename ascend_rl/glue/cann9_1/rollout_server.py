"""verl's vLLM server with what the rollout manager asks of it, and the replica that launches it.

It counts what it generates (rollout_progress, engine_stats), gives up requests for other servers
(request_mover), and takes the DP engine and the KV that a request comes with.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from typing import Any

import ray

from ascend_rl.experts import support_eplb
from ascend_rl.glue.cann9_1.options import options
from ascend_rl.rollout import npu_options
from ascend_rl.rollout.engine_stats import counting
from ascend_rl.rollout.front_end import result_only
from ascend_rl.rollout.request_mover import SAME_KV, MovableRequests, RolloutRebalanceConfig, settings
from ascend_rl.rollout.rollout_progress import Requests
from verl.utils import device
from verl.workers.rollout.vllm_rollout import vllm_async_server
from vllm.sampling_params import RequestOutputKind

# The DP engine of the request in this task of asyncio; None: vLLM chooses.
dp_engine: ContextVar[int | None] = ContextVar("dp_engine", default=None)


class Server(MovableRequests, vllm_async_server.vLLMHttpServer):
    """See the module's docstring."""

    def __init__(self, *args: Any, **kwargs: Any):
        # A request's id must be the engine's, too: the mover asks engines for the requests they hold.
        os.environ["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"
        super().__init__(*args, **kwargs)
        self.requests = Requests()
        self.admitting: set[str] = set()  # requests on their way to the engine

    @property
    def rollout_rebalance(self) -> RolloutRebalanceConfig | None:
        return settings(options(self.config)["rollout_rebalance"], self.config.name)

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        known = {"dtype": self.config.dtype, "tensor_parallel_size": self.config.tensor_model_parallel_size}
        sent = self.with_kv_transfer({key: known.get(key) for key in SAME_KV} | engine_kwargs)
        engine_kwargs |= {key: sent[key] for key in ("kv_transfer_config",) if key in sent}
        engine_kwargs |= {"disable_log_stats": False, "cudagraph_metrics": True}  # the engines count
        self.check_options(engine_kwargs)

    def check_options(self, engine_kwargs: dict[str, Any]) -> None:
        """Graphs, npugraph_ex and EPLB (VLLM_ENABLE_EPLB=1), under the names that vllm-ascend 0.23 reads."""
        name, model = device.get_device_name(), self.model_config.hf_config
        engine_kwargs |= npu_options.engine_options(engine_kwargs, self.config, name, later=True)
        known = {
            "tensor_parallel_size": self.config.tensor_model_parallel_size,
            "data_parallel_size": self.config.data_parallel_size,
            "enable_expert_parallel": self.config.expert_parallel_size > 1,
            "quantization": self.config.quantization,
        }
        extra = support_eplb.engine_args(known | engine_kwargs, model, name).get("additional_config")
        if extra:
            engine_kwargs["additional_config"] = npu_options.later_names(support_eplb.grouped(extra))

    def counting_llm(self) -> type:
        """vLLM's AsyncLLM that counts what it generates, and says when a request is with the engine."""
        draw, requests, admitting = options(self.config)["use_tqdm"], self.requests, self.admitting

        class CountingLLM(counting(vllm_async_server.AsyncLLM, self.config.disable_log_stats)):
            def generate(self, *args: Any, **kwargs: Any):
                outputs = super().generate(*args, data_parallel_rank=dp_engine.get(), **kwargs)
                return requests.watch(outputs) if draw else outputs

            async def add_request(self, request_id: str, *args: Any, **kwargs: Any) -> Any:
                added = await super().add_request(request_id, *args, **kwargs)
                admitting.discard(request_id)
                return added

        return CountingLLM

    async def run_server(self, args: Any) -> None:
        vllm_async_server.AsyncLLM = self.counting_llm()  # in this process, which is one server
        await super().run_server(args)

    async def generate(
        self, prompt_ids, sampling_params, request_id, *, engine=None, kv=None, **others
    ) -> Any:
        dp_engine.set(engine)
        sampling_params = await self.with_moved_kv(sampling_params, kv)
        sampling_params = result_only(sampling_params, RequestOutputKind.FINAL_ONLY)
        try:
            return await super().generate(prompt_ids, sampling_params, request_id, **others)
        finally:
            self.admitting.discard(request_id)

    async def _park_until_admitted(self, request_id: str) -> Any:
        rejected = await super()._park_until_admitted(request_id)
        if rejected is None:
            self.admitting.add(request_id)
        return rejected

    @property
    def _admitting(self) -> int:
        """How many requests verl's gate waits for. verl itself counts until a request's first output."""
        return len(self.admitting)

    @_admitting.setter
    def _admitting(self, count: int) -> None:
        pass

    async def rollout_progress(self, reset: bool = False) -> dict[str, float]:
        if reset:
            self.requests.reset(self.engine)
        return self.requests.counts(self.engine)

    async def engine_stats(self) -> dict[str, Any]:
        return self.engine.stats.take()


class Replica(vllm_async_server.vLLMReplica):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(Server)
