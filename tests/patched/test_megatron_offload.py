"""verl's offload of Megatron weights: one pinned buffer for all times, and nothing stays on the device.

MindSpeed's modules on software NPUs; what is allocated on the host is counted where PyTorch does it.
"""

from __future__ import annotations

import torch
from megatron_tiny import Layout, make_batch, make_checkpoint
from mindspeed_tree import MINDSPEED, needs_mindspeed
from ranks import run_ranks
from test_megatron_actor import OVERRIDES
from test_mindspeed import FLASH
from torch.utils._python_dispatch import TorchDispatchMode

from ascend_rl.settings import stack

FIRST = stack.NAME == stack.DEFAULT
if FIRST:
    from megatron_tiny import exported, make_worker
    from test_megatron_actor import update
else:
    from test_megatron import exported, make_worker, update

pytestmark = needs_mindspeed
LAYOUT = Layout("moe", ep=2, options=FLASH)
OFFLOAD = ("actor_rollout_ref.actor.megatron.param_offload=True",)
CYCLES = 3


class HostMemory(TorchDispatchMode):
    """Bytes of host memory that calls have allocated, and how many of them did not wait for a copy to it."""

    def __init__(self):
        super().__init__()
        self.bytes = self.unawaited = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor) and t.is_cpu}
        made = func(*args, **kwargs or {})
        if isinstance(made, torch.Tensor) and made.is_cpu:
            if made.untyped_storage().data_ptr() not in given:
                self.bytes += made.untyped_storage().nbytes()
            self.unawaited += bool((kwargs or {}).get("non_blocking"))
        return made


def trained(path, *overrides: str):
    worker = make_worker(LAYOUT, path, *(OVERRIDES if FIRST else ()), *overrides)
    for _ in range(2):
        update(worker, make_batch())
    return worker


def actor(rank: int, path) -> dict:
    """Updates of a worker that offloads its weights; then what each further offload allocates."""
    from verl.utils.megatron_utils import load_megatron_model_to_gpu, offload_megatron_model_to_cpu

    expected = exported(trained(path))
    worker = trained(path, *OFFLOAD)
    module, allocated, pinned, empty = (
        worker.actor_module if FIRST else worker.actor.engine.module,
        [],
        [],
        [],
    )
    buffers = [b for chunk in module for b in chunk.buffers + chunk.expert_parallel_buffers]
    for _ in range(CYCLES):
        load_megatron_model_to_gpu(module)
        with HostMemory() as host:
            offload_megatron_model_to_cpu(module)
        allocated.append(host.bytes)
        pinned.append(all(buffer.param_data.cpu_data.is_pinned() for buffer in buffers))
        empty.append(sum(buffer.param_data.untyped_storage().nbytes() for buffer in buffers))
    load_megatron_model_to_gpu(module)
    got = exported(worker)
    return {
        "allocated": allocated,
        "pinned": all(pinned),
        "on the device": empty,
        "different": [name for name in expected if not torch.equal(expected[name], got[name])],
    }


def reference(rank: int, path) -> dict:
    """Offloads of a model without gradients, while somebody still has the tensors on the device."""
    from verl.utils.megatron_utils import load_megatron_model_to_gpu, offload_megatron_model_to_cpu

    worker = make_worker(LAYOUT, path)
    worker._is_actor, worker._is_rollout, worker._is_ref = False, False, True  # as for role "ref"
    before = torch.npu.memory_allocated()
    model, _ = worker._build_model_optimizer(
        model_path=worker.config.model.path,
        optim_config=None,
        override_model_config={},
        override_transformer_config={"use_flash_attn": True},
    )
    expected = {name: weight.detach().cpu().clone() for name, weight in model[0].named_parameters()}
    allocated, unawaited, left = [], 0, []
    for _ in range(CYCLES):
        held = [weight.data for weight in model[0].parameters()]
        with HostMemory() as host:
            offload_megatron_model_to_cpu(model)
        allocated.append(host.bytes)
        unawaited += host.unawaited
        left.append(torch.npu.memory_allocated() - before)
        assert all(weight.is_cpu and weight.is_pinned() for weight in model[0].parameters())
        load_megatron_model_to_gpu(model)
        del held
    weights = sum(weight.nbytes for weight in expected.values())
    return {
        "first": allocated[0] == weights,
        "later": allocated[1:],
        "unawaited": unawaited,
        "left": max(left) / weights,
        "different": [n for n, w in model[0].named_parameters() if not torch.equal(w.cpu(), expected[n])],
    }


def both(rank: int, path) -> tuple[dict, dict]:
    return actor(rank, path), reference(rank, path) if FIRST else {}


def test_buffers_are_kept_and_nothing_stays_on_the_device(tmp_path, monkeypatch):
    """verl 0.9.1's reference model gets new memory at each offload, so there only the actor is counted."""
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    path = make_checkpoint("moe", tmp_path / "moe", layers=2)
    for first, second in run_ranks(2, both, path, stubs=(MINDSPEED,), npu=True):
        assert first["allocated"] == [0] * CYCLES
        assert first["pinned"] and first["on the device"] == [0] * CYCLES
        assert first["different"] == []
        if not FIRST:
            continue
        assert second.pop("left") < 0.01
        assert second == {"first": True, "later": [0] * (CYCLES - 1), "unawaited": 0, "different": []}
