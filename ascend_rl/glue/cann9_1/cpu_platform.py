"""verl on a machine without an accelerator: VERL_PLATFORM=cpu and trainer.device=cpu.

Collectives use gloo, and workers hold Ray's resource "NPU", as on the other stack (patch cpu_device of verl).
"""

from __future__ import annotations

import os
import types
from contextlib import contextmanager

import torch

from ascend_rl.glue.cann9_1.hooks import Hooks
from ascend_rl.host.cpu_device import complete_torch_cpu
from verl.plugin.platform import PlatformBase, PlatformRegistry

hooks = Hooks()
complete_torch_cpu()


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """What verl asks of an accelerator; memory figures are 0."""

    device_name = vendor_name = "cpu"
    device_module = torch.cpu

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return os.environ.get("VERL_PLATFORM") == "cpu"

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index) -> None:
        pass

    def synchronize(self, device_index=None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0):
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "ASCEND_RT_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "NPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"]

    def rollout_env_vars(self) -> dict[str, str]:
        return {}

    def is_ipc_supported(self) -> bool:
        return False

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def cudart(self) -> None:
        return None

    @contextmanager
    def nvtx_range(self, msg: str):
        yield


@hooks.after("torch.distributed")
def name_the_device_once(module: types.ModuleType) -> None:
    """verl asks for "cpu:gloo,DEVICE:BACKEND"; torch refuses a device that is named twice."""
    original = module.init_process_group

    def init_process_group(backend=None, *args, **kwargs):
        return original("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    module.init_process_group = init_process_group


def register(engine: str, module: types.ModuleType, backends: list[str]) -> None:
    """An engine's classes for the device, in verl's registry."""
    from verl.workers.engine.base import EngineRegistry

    for kind, head in (("language_model", "LMHead"), ("value_model", "ValueHead")):
        found = getattr(module, f"{engine}EngineWith{head}")
        EngineRegistry.register(model_type=kind, backend=backends, device="cpu")(found)


@hooks.after("verl.workers.engine.fsdp.transformer_impl")
def register_fsdp(module: types.ModuleType) -> None:
    register("FSDP", module, ["fsdp", "fsdp2"])


@hooks.after("verl.workers.engine.megatron.transformer_impl")
def register_megatron(module: types.ModuleType) -> None:
    register("Megatron", module, ["megatron"])
