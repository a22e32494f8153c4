"""verl on a CPU: process groups, Ray resources, FSDP loading, weight transfer by shared memory."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.multiprocessing as mp

from ascend_rl.process.ports import free_port


def test_device_functions():
    from verl.utils import device

    assert device.get_device_name() == "cpu"
    assert device.get_nccl_backend() == "gloo"
    assert device.get_resource_name() == "NPU"
    assert device.get_visible_devices_keyword() == "ASCEND_RT_VISIBLE_DEVICES"
    namespace = device.get_torch_device()
    namespace.empty_cache()
    assert namespace.memory_allocated() == namespace.max_memory_reserved() == 0
    torch.manual_seed(1)
    state = namespace.get_rng_state()
    expected = torch.rand(3)
    namespace.set_rng_state(state)
    assert torch.equal(torch.rand(3), expected)


def test_ray_actors_ask_for_the_npu_resource():
    from verl.single_controller.ray.base import RayClassWithInitArgs

    class Recorder:
        def options(self, **options):
            self.asked = options
            return self

        def remote(self):
            return self.asked

    from types import SimpleNamespace

    asked = RayClassWithInitArgs(Recorder())(
        placement_group=SimpleNamespace(),
        placement_group_bundle_idx=0,
        use_gpu=True,
        num_gpus=0.5,
        device_name="cpu",
    )
    assert asked["resources"] == {"NPU": 0.5}


def _fsdp_rank(rank: int, port: int, model_path: str, results) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from transformers import AutoModelForCausalLM

    from verl.utils.device import get_device_name
    from verl.utils.distributed import initialize_global_process_group_ray
    from verl.utils.fsdp_utils import get_init_weight_context_manager, load_fsdp_model_to_gpu

    initialize_global_process_group_ray(timeout_second=300)
    with get_init_weight_context_manager(use_meta_tensor=True)():
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model = FSDP(
        model, device_id=torch.device(get_device_name()), sync_module_states=False, use_orig_params=True
    )
    load_fsdp_model_to_gpu(model)
    ids = torch.arange(10).unsqueeze(0) + rank  # another micro-batch on each rank
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    norm = model.clip_grad_norm_(1e9)
    if rank == 0:
        results.put((loss.item(), float(norm)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_fsdp_on_gloo_equals_one_process(tiny):
    from transformers import AutoModelForCausalLM

    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    processes = mp.spawn(_fsdp_rank, (free_port(), str(tiny / "model"), results), nprocs=2, join=False)
    loss, norm = results.get() if _ends_well(processes) else pytest.fail("a rank failed")

    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    losses = [
        model(input_ids=ids, labels=ids).loss for ids in (torch.arange(10).unsqueeze(0) + r for r in range(2))
    ]
    (sum(losses) / 2).backward()
    assert loss == pytest.approx(losses[0].item(), rel=1e-6)
    assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)), rel=1e-5)


def _ends_well(processes, seconds: float = 300) -> bool:
    deadline = time.monotonic() + seconds
    while not processes.join(timeout=1):
        if time.monotonic() > deadline:
            for process in processes.processes:
                process.kill()
            return False
    return True


def shared_weights() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("verl_weights_")}


def test_weights_survive_a_slow_receiver(tmp_path):
    """Many buckets, and a receiver that reads each late: the sender must not overwrite what is loaded."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import (
        BucketedWeightReceiver,
        BucketedWeightSender,
    )

    before = shared_weights()  # of other runs on this machine
    generator = torch.Generator().manual_seed(0)
    weights = {f"layer.{i}": torch.rand(100_000, generator=generator) for i in range(12)}
    handle = f"ipc://{tmp_path}/weights.sock"
    received: dict[str, torch.Tensor] = {}

    def load(bucket):
        time.sleep(0.05)
        received.update({name: tensor.clone() for name, tensor in bucket})

    receiver = BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
    thread = threading.Thread(target=receiver.receive_weights, args=(load,), daemon=True)
    thread.start()
    sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
    asyncio.run(
        asyncio.wait_for(
            sender.async_send_weights(iter(weights.items())), timedelta(seconds=30).total_seconds()
        )
    )
    thread.join(30)
    assert received.keys() == weights.keys()
    assert all(torch.equal(received[name], weights[name]) for name in weights)
    assert shared_weights() <= before
