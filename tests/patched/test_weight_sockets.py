"""Weights go from the trainer to the rollout by a socket in TMPDIR, on both sides."""

from __future__ import annotations

import asyncio
import tempfile
import threading

import torch

HANDLE = "ipc:///tmp/rl-colocate-zmq-NPU-3.sock"  # what verl's trainer and rollout both derive


def test_weights_travel_by_a_socket_in_tmpdir(tmp_path, monkeypatch):
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import (
        BucketedWeightReceiver,
        BucketedWeightSender,
    )

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found, seen = {}, []
    receiver = BucketedWeightReceiver(HANDLE, device=torch.device("cpu"), use_shm=True)

    def load(weights, is_last=True):
        seen.extend(path.name for path in tmp_path.iterdir())
        found.update({name: weight.clone() for name, weight in weights})

    thread = threading.Thread(target=receiver.receive_weights, args=(load,), daemon=True)
    thread.start()
    sender = BucketedWeightSender(HANDLE, bucket_size_mb=1, use_shm=True)
    asyncio.run(asyncio.wait_for(sender.async_send_weights(iter({"w": torch.arange(4.0)}.items())), 30))
    thread.join(30)
    assert found["w"].tolist() == [0, 1, 2, 3] and "rl-colocate-zmq-NPU-3.sock" in seen
