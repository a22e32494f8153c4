"""Small faults of verl 0.9.1, and what it does not say (docs/stacks.md)."""

from __future__ import annotations

import functools
import socket
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ascend_rl.glue.cann9_1.hooks import Hooks, first, then
from ascend_rl.process.ports import free_port
from ascend_rl.process.progress import sign

hooks = Hooks()


@hooks.after("verl.plugin.platform.platform_npu")
def leave_segments_that_are_not_free(module: ModuleType) -> None:
    """torch_npu forgets other options of PYTORCH_NPU_ALLOC_CONF where expandable segments are switched."""
    from ascend_rl.host.hot_swap_expandable_segments import left_free

    switch = module.PlatformNPU.set_allocator_settings

    def set_allocator_settings(self: Any, settings: str) -> None:
        if left_free() or "expandable_segments" not in settings:
            switch(self, settings)

    module.PlatformNPU.set_allocator_settings = set_allocator_settings


@hooks.after("verl.utils.device")
def ask_an_npu_that_is_there(module: ModuleType) -> None:
    """verl asks NPU 1 for the driver's version."""
    from ascend_rl.host.npu_tools import first_npu

    run = module.subprocess.run

    def ask(command: list[str], **kwargs: Any) -> Any:
        if command[:-1] == ["npu-smi", "info", "-t", "board", "-i"]:
            command = [*command[:-1], str(first_npu())]
        return run(command, **kwargs)

    module.subprocess = SimpleNamespace(run=ask, CalledProcessError=module.subprocess.CalledProcessError)


@hooks.after("verl.utils.tracking")
def survive_writers(module: ModuleType) -> None:
    """An error of a writer of metrics, such as a full disk, ends the run."""
    from ascend_rl.process.logs import LogFile, survive

    def log(self: Any, data: dict, step: int, backend: Any = None) -> None:
        for name, writer in self.logger.items():
            if backend is None or name in backend:
                survive(name, writer, data, step)

    def write_lines(self: Any, *args: Any, **kwargs: Any) -> None:
        self.fp.close()
        self.fp = LogFile(Path(self.filepath), whole=True)

    module.Tracking.log = log
    then(module.FileLogger, "__init__", write_lines)


@hooks.after("verl.utils.flops_counter")
def know_the_a3(module: ModuleType) -> None:
    """perf/mfu: a die of Atlas A3 has 376 Tflop/s of bfloat16; verl takes 354 for each Ascend910."""
    module._DEVICE_FLOPS["Ascend910_93"] = 376e12


@hooks.after("verl.trainer.ppo.metric_utils")
def say_quantiles(module: ModuleType) -> None:
    """response_length/p10 to p99."""
    import torch

    compute = module.compute_data_metrics

    @functools.wraps(compute)
    def compute_data_metrics(batch: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        lengths = module._compute_response_info(batch)["response_length"].float()
        quantiles = {
            f"response_length/p{p}": torch.quantile(lengths, p / 100).item() for p in (10, 25, 50, 75, 90, 99)
        }
        return compute(batch, *args, **kwargs) | quantiles

    module.compute_data_metrics = compute_data_metrics


@hooks.after("verl.single_controller.ray.base")
def keep_master_ports_free(module: ModuleType) -> None:
    """verl lets go of the port that the system chose, and listens there once the workers have started."""
    import ray

    choose = module.get_master_addr_port._function

    @ray.remote
    def get_master_addr_port(master_port_range: list[int] | None = None) -> tuple[str, str]:
        if master_port_range is None:
            port = free_port("")
            master_port_range = [port, port + 1]
        return choose(master_port_range)

    module.get_master_addr_port = get_master_addr_port


@hooks.after("verl.utils.net_utils")
def keep_ports_of_servers_free(module: ModuleType) -> None:
    """The same, of servers and weight syncs: where verl holds a port, it lets go before the server starts."""

    def get_free_port(address: str, with_alive_sock: bool = False) -> tuple[int, socket.socket | None]:
        port = free_port(address)
        if not with_alive_sock:
            return port, None
        held = socket.socket(socket.AF_INET6 if module.is_valid_ipv6_address(address) else socket.AF_INET)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, port))
        return port, held

    module.get_free_port = get_free_port


@hooks.after("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer")
def sockets_in_tmpdir(module: ModuleType) -> None:
    """Of the weight sync; the launcher's TMPDIR is the run's own and is cleaned up."""

    def move(self: Any, *args: Any, **kwargs: Any) -> None:
        self.zmq_handle = self.zmq_handle.replace("ipc:///tmp/rl-", f"ipc://{tempfile.gettempdir()}/rl-")

    for side in (module.BucketedWeightSender, module.BucketedWeightReceiver):
        then(side, "__init__", move)


@hooks.after("verl.utils.transferqueue_utils")
def fetch_what_workers_read(module: ModuleType) -> None:
    """Of a row's Python objects that is multi_modal_inputs; verl fetches, moves and splits all of them."""
    fetch = module._async_meta_to_realdata

    async def _async_meta_to_realdata(meta: Any) -> Any:
        if isinstance(meta, module.KVBatchMeta):
            meta = await module.async_kv_batch_meta2batch_meta(meta)
        if meta.size:
            fields = meta.field_schema.items()
            meta = meta.select_fields(
                [name for name, of in fields if not of["is_non_tensor"] or name == "multi_modal_inputs"]
            )
        return await fetch(meta)

    module._async_meta_to_realdata = _async_meta_to_realdata


@hooks.after("verl.workers.engine.fsdp.transformer_impl")
@hooks.after("verl.workers.engine.megatron.transformer_impl")
def sign_each_micro_batch(module: ModuleType) -> None:
    """For the launcher, which otherwise sees whole steps only: process/progress.py."""
    for name in ("FSDPEngineWithLMHead", "MegatronEngineWithLMHead"):
        if engine := getattr(module, name, None):
            first(engine, "forward_step", lambda *args, **kwargs: sign())
