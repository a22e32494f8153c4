"""The weights of experts on their way from verl's Megatron engine to its vLLM workers.

ALL_TO_ALL_RESHARD=1 (weights/moe_alltoallv.py), and syncs without sleep mode (weights/moe_update_weights.py).
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from ascend_rl.glue.cann9_1.hooks import Hooks, first, then
from ascend_rl.weights import moe_alltoallv
from ascend_rl.weights.moe_update_weights import to_loading_layout

hooks = Hooks()


@hooks.after("verl.workers.engine_workers")
def send_each_worker_its_experts(module: ModuleType) -> None:
    def check(self) -> None:
        if moe_alltoallv.enabled():
            moe_alltoallv.check(self.config)

    def send(self) -> None:
        if moe_alltoallv.enabled() and self.actor is not None:
            engine = self.actor.engine
            engine.get_per_tensor_param = functools.partial(own_share, engine, self.config.rollout)

    first(module.ActorRolloutRefWorker, "init_model", check)
    then(module.ActorRolloutRefWorker, "init_model", send)


def own_share(engine: Any, rollout: Any, **_: Any) -> tuple:
    """In place of MegatronEngine.get_per_tensor_param, without LoRA and with mbridge."""
    from megatron.core import parallel_state
    from verl.utils.megatron_utils import load_megatron_model_to_gpu

    load_megatron_model_to_gpu(engine.module, load_grad=False)
    export, hf_config = engine.bridge.export_weights, engine.model_config.hf_config
    return moe_alltoallv.stream(engine.module, export, hf_config, rollout, parallel_state), None


@hooks.after("verl.workers.rollout.vllm_rollout.utils")
def load_experts_again(module: ModuleType) -> None:
    """vllm-ascend transposes expert weights once they are loaded, and undoes it only at a wake-up."""

    def prepare(self, peft_config: Any = None, base_sync_done: bool = False, **_: Any) -> None:
        adapter, quantized = peft_config and base_sync_done, self._is_qat_model or self._is_modelopt_qat
        if adapter or quantized or module.is_quantized_model(self.model_runner.vllm_config):
            return
        for layer in self.model_runner.model.modules():
            to_loading_layout(layer)

    first(module.vLLMColocateWorkerExtension, "update_weights_from_ipc", prepare)


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
