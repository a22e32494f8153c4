"""What verl loads in each of its processes (entry point group `verl.plugins`)."""

from __future__ import annotations

import functools
import logging
import os
import time
from types import ModuleType
from typing import Any

from ascend_rl.glue.cann9_1.hooks import Hooks, first, or_stop, version_is
from ascend_rl.glue.cann9_1.options import ours

hooks = Hooks()


@hooks.after("verl.trainer.ppo.core_algos")
def register_losses(module: ModuleType) -> None:
    """GSPO's statistics and gspo_token, in verl's registry; its engine workers want numbers, not lists."""
    from ascend_rl.glue.policy_losses import compute_policy_loss_gspo
    from ascend_rl.loss import gspo

    @functools.wraps(compute_policy_loss_gspo)
    def policy_loss(*args, **kwargs):
        loss, metrics = compute_policy_loss_gspo(*args, **kwargs)
        return loss, gspo.summarise(metrics)

    for name in ("gspo", "gspo_token"):
        module.register_policy_loss(name)(policy_loss)


@hooks.after("verl.single_controller.base.worker")
def bind_trainers(module: ModuleType) -> None:
    from ascend_rl.host.core_binding import bind_trainer

    first(module.Worker, "__init__", lambda *args, **kwargs: bind_trainer())


@hooks.after("verl.single_controller.base.worker")
def keep_trainers_on_loopback(module: ModuleType) -> None:
    from ascend_rl.host.loopback import listen_on_loopback

    listen_on_loopback()


@hooks.after("verl.workers.rollout.vllm_rollout.utils")
def bind_workers(module: ModuleType) -> None:
    from ascend_rl.host import core_binding

    def bind(cls, local_rank: int = 0, **kwargs) -> None:
        core_binding.bind("worker", local_rank=local_rank)

    first(module.vLLMColocateWorkerExtension, "__new__", bind)


@hooks.after("verl.workers.rollout.vllm_rollout.vllm_async_server")
def bind_servers(module: ModuleType) -> None:
    from ascend_rl.host import core_binding

    first(module.vLLMHttpServer, "__init__", lambda *args, **kwargs: core_binding.bind("others"))


@hooks.after("verl.trainer.ppo.v1.replay_buffer")
def poll_soon(module: ModuleType) -> None:
    """A rollout's end is looked for every 2 s. Poll after a twentieth of the time waited, 2 s at most."""
    wait = module.ReplayBuffer._wait_for_next_poll

    def _wait_for_next_poll(self, partition_id: str, waits_since: float) -> float:
        longest = self.poll_interval
        self.poll_interval = min(longest, max(0.02, (time.time() - waits_since) / 20))
        try:
            return wait(self, partition_id, waits_since)
        finally:
            self.poll_interval = longest

    module.ReplayBuffer._wait_for_next_poll = _wait_for_next_poll


@hooks.after("verl.trainer.ppo.v1.agent_loop_tq")
def put_together(module: ModuleType) -> None:
    from ascend_rl.glue.cann9_1 import puts

    module.tq, module.list_of_dict_to_tensordict = puts, list


@hooks.after("verl.trainer.ppo.v1.trainer_base")
@hooks.after("verl.trainer.ppo.v1.trainer_separate_async")
def launch_servers(module: ModuleType) -> None:
    from ascend_rl.glue.cann9_1.servers import Servers

    module.LLMServerManager = Servers


@hooks.after("verl.trainer.ppo.v1.trainer_sync")
def choose_the_trainer(module: ModuleType) -> None:
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    def choose(config: Any) -> Any:
        from ascend_rl.glue.cann9_1 import trainer

        return trainer.choose(config)

    TRAINER_REGISTRY["sync"] = choose


@hooks.after("verl.trainer.ppo.v1.trainer_separate_async")
def choose_the_async_trainer(module: ModuleType) -> None:
    """And have its logger take `flush`, which verl gives it and only print() knows."""
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    class Logger(logging.LoggerAdapter):
        def process(self, message, given):
            given.pop("flush", None)
            return message, given

    def choose(config: Any) -> Any:
        if not ours(config.actor_rollout_ref.rollout):
            return module.PPOTrainerSeparateAsync(config)
        from ascend_rl.glue.cann9_1.async_trainer import AsyncTrainer

        return AsyncTrainer(config)

    module.logger = Logger(module.logger, {})
    TRAINER_REGISTRY["separate_async"] = choose


@hooks.after("verl.checkpoint_engine.hccl_checkpoint_engine")
def refuse_without_hccl(module: ModuleType) -> None:
    """Where libhccl.so is not found, vllm-ascend's communicator does nothing: all weights would be zeros."""
    connect = module.stateless_init_process_group

    def stateless_init_process_group(*args: Any) -> Any:
        group = connect(*args)
        if group.disabled:
            raise RuntimeError(
                "libhccl.so cannot be loaded, so no weights would reach the rollout: set HCCL_SO_PATH to it, "
                "or source CANN's set_env.sh"
            )
        return group

    module.stateless_init_process_group = stateless_init_process_group


@hooks.after("verl.workers.rollout.vllm_rollout.vllm_rollout")
def find_the_server(module: ModuleType) -> None:
    """Look a server up each time: it may have restarted."""

    def forget(self) -> None:
        self.server_handle = None

    first(module.ServerAdapter, "_ensure_server_handle", forget)


@or_stop
def load() -> None:
    from ascend_rl.glue.cann9_1 import (
        alltoall_overlap,
        hdp,
        megatron_training,
        mindspeed,
        moe_alltoallv,
        old_log_prob,
        router_replay,
        verl_fixes,
    )

    hooks.install()
    for part in (
        megatron_training,
        mindspeed,
        router_replay,
        old_log_prob,
        moe_alltoallv,
        hdp,
        alltoall_overlap,
        verl_fixes,
    ):
        part.hooks.install()
    if os.environ.get("VERL_PLATFORM") == "cpu":
        from ascend_rl.glue.cann9_1 import cpu_platform

        cpu_platform.hooks.install()


if version_is("verl", "0.9"):
    load()
