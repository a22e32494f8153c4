"""ALL_TO_ALL_RESHARD=1 in verl's Megatron engine and its vLLM workers (weights/moe_alltoallv.py)."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from ascend_rl.glue.cann9_1.hooks import Hooks
from ascend_rl.weights import moe_alltoallv

hooks = Hooks()


@hooks.after("verl.workers.engine_workers")
def send_each_worker_its_experts(module: ModuleType) -> None:
    worker = module.ActorRolloutRefWorker
    original = worker.init_model

    @functools.wraps(original)
    def init_model(self) -> Any:
        if not moe_alltoallv.enabled():
            return original(self)
        moe_alltoallv.check(self.config)
        result = original(self)
        if self.actor is not None:
            engine = self.actor.engine
            engine.get_per_tensor_param = functools.partial(own_share, engine, self.config.rollout)
        return result

    worker.init_model = init_model


def own_share(engine: Any, rollout: Any, **_: Any) -> tuple:
    """In place of MegatronEngine.get_per_tensor_param, without LoRA and with mbridge."""
    from megatron.core import parallel_state
    from verl.utils.megatron_utils import load_megatron_model_to_gpu

    load_megatron_model_to_gpu(engine.module, load_grad=False)
    export, hf_config = engine.bridge.export_weights, engine.model_config.hf_config
    return moe_alltoallv.stream(engine.module, export, hf_config, rollout, parallel_state), None


@hooks.after("verl.workers.rollout.vllm_rollout.utils")
def insist_on_own_experts(module: ModuleType) -> None:
    worker = module.vLLMColocateWorkerExtension
    receive, load = worker.update_weights_from_ipc, worker._update_weights

    def update_weights_from_ipc(self, *args, **kwargs) -> None:
        self.arrived = set()
        receive(self, *args, **kwargs)
        if moe_alltoallv.enabled():
            moe_alltoallv.insist(self.model_runner.model, self.arrived)

    def _update_weights(self, weights: list, *args, **kwargs) -> None:
        self.arrived.update(name for name, _ in weights)
        load(self, weights, *args, **kwargs)

    worker.update_weights_from_ipc = update_weights_from_ipc
    worker._update_weights = _update_weights
