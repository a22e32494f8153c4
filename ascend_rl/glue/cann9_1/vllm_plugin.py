"""What vLLM calls in each process of an engine (entry point group `vllm.general_plugins`)."""

from __future__ import annotations

from ascend_rl.glue.cann9_1.hooks import or_stop, version_is


@or_stop
def register() -> None:
    if version_is("vllm", "0.23"):
        from vllm.platforms import current_platform

        if current_platform.device_type == "cpu":
            from ascend_rl.glue.cann9_1 import cpu_rollout

            cpu_rollout.hooks.install()
