"""What verl loads in each of its processes (entry point group `verl.plugins`)."""

from __future__ import annotations

import os
from types import ModuleType

from ascend_rl.glue.cann9_1.hooks import Hooks, first, or_stop, version_is

hooks = Hooks()


@hooks.after("verl.trainer.ppo.core_algos")
def register_losses(module: ModuleType) -> None:
    """GSPO's statistics and gspo_token, in verl's registry."""
    import ascend_rl.glue.policy_losses  # noqa: F401


@hooks.after("verl.single_controller.base.worker")
def bind_trainers(module: ModuleType) -> None:
    from ascend_rl.host.core_binding import bind_trainer

    first(module.Worker, "__init__", lambda *args, **kwargs: bind_trainer())


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


@or_stop
def load() -> None:
    hooks.install()
    if os.environ.get("VERL_PLATFORM") == "cpu":
        from ascend_rl.glue.cann9_1 import cpu_platform

        cpu_platform.hooks.install()


if version_is("verl", "0.9"):
    load()
