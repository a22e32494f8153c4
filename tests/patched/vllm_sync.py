"""verl's weight sync into a vLLM in this process, for the tests here: its sender and worker extension."""

from __future__ import annotations

import asyncio
import threading
from unittest import mock

import torch


def make_llm(path, **options):
    """A small LLM in this process with verl's worker extension, float32 unless ``options`` say otherwise.

    The extension ends its process with the parent: here pytest, whose parent may be a shell that is gone.
    """
    from vllm import LLM

    with mock.patch("verl.workers.rollout.vllm_rollout.utils.set_death_signal"):
        return LLM(
            str(path),
            enforce_eager=True,
            max_model_len=64,
            max_num_batched_tokens=256,
            worker_extension_cls="verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
            **{"dtype": "float32", "num_gpu_blocks_override": 64, "max_num_seqs": 8} | options,
        )


def sync(llm, weights: dict[str, torch.Tensor]) -> None:
    """What verl's trainer and rollout worker do, in two threads of one process."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    (handle,) = llm.collective_rpc(socket_of)
    errors = []

    def receive():
        try:
            llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
        except Exception as error:
            errors.append(error)

    receiver = threading.Thread(target=receive, daemon=True)
    receiver.start()
    sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)

    async def send():
        sending = asyncio.ensure_future(sender.async_send_weights(iter(weights.items())))
        while not sending.done() and not errors:
            await asyncio.sleep(0.05)
        sending.cancel() if errors else await sending

    asyncio.run(asyncio.wait_for(send(), 600))
    receiver.join(600)
    assert not errors and not receiver.is_alive(), errors
    llm.reset_prefix_cache()


def socket_of(worker) -> str:
    worker = worker.worker  # out of vLLM's wrapper
    worker.device = torch.device("cpu")  # as the first sync sets it
    return worker._get_zmq_handle()
