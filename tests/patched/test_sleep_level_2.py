"""Sleep level 2 of two ranks, with vllm-ascend's pool: with new weights the rollout is the trainer's."""

from __future__ import annotations

import ctypes
import random

import pytest
from npu_ground import WEIGHT_SYNC, make_llm, on_ranks, save_random_model, sync_weights
from test_npu_runner import greedy

RANKS, NEW_TOKENS = 2, 6
LENGTHS = 40, 8, 90  # an even sum: gloo gathers equal shares of ranks only


def contents(worker) -> dict[int, bytes]:
    """What is in the pool of the weights, by address, without the parameters."""
    from vllm_ascend.device_allocator.camem import CaMemAllocator

    own = {parameter.untyped_storage().data_ptr() for parameter in worker.model_runner.model.parameters()}
    return {
        address: ctypes.string_at(address, data.handle[1])
        for address, data in CaMemAllocator.get_instance().pointer_to_data.items()
        if data.tag == "weights" and address not in own
    }


def sleep_and_generate(path: str, other: str, prompts: list[list[int]], parallel: str) -> dict:
    """Ids before, and after level 2 with the weights of ``other``; bytes of each allocation that was lost."""
    from safetensors.torch import load_file

    from vllm import SamplingParams

    llm = make_llm(
        path, enable_sleep_mode=True, distributed_executor_backend="external_launcher",
        enable_expert_parallel=True, worker_extension_cls=WEIGHT_SYNC, **{parallel: RANKS},
    )  # fmt: skip
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    dispatched = []

    def generate() -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    from vllm_ascend.ops.fused_moe.token_dispatcher import TokenDispatcherWithAll2AllV as AllToAll

    dispatch = AllToAll.token_dispatch
    AllToAll.token_dispatch = lambda *args, **kwargs: dispatched.append(1) or dispatch(*args, **kwargs)
    before = generate()
    was = contents(worker)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    lost = [len(was[address]) for address, now in contents(worker).items() if now != was[address]]
    sync_weights(worker, load_file(f"{other}/model.safetensors"))
    llm.wake_up(tags=["kv_cache"])
    return {
        "before": before,
        "after": generate(),
        "lost": lost,
        "all_to_all": len(dispatched),
        "kept": len(was),
    }


def rollouts(series: str, path: str, *args) -> dict:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="s") as directory:  # its path is short enough for sockets
        tempfile.tempdir = directory  # of those of the weight sync
        return on_ranks(series, RANKS, sleep_and_generate, path, *args)


@pytest.mark.parametrize(
    "parallel", ["tensor_parallel_size", pytest.param("data_parallel_size", marks=pytest.mark.long)]
)
def test_only_weights_are_lost(npu_ground, tmp_path, parallel):
    """On an Atlas A3, that is a tree compiled for it, where prompts go through the all-to-all dispatch."""
    path, other = (save_random_model(tmp_path / str(seed), moe=True, seed=seed) for seed in (0, 1))
    rng = random.Random(0)
    prompts = [[rng.randrange(13) for _ in range(length)] for length in LENGTHS]
    run = npu_ground.run(rollouts, "A3", str(path), str(other), prompts, parallel)
    assert run["before"] == greedy(path, prompts, NEW_TOKENS)
    assert run["all_to_all"] and run["kept"]
    assert run["lost"] == []
    assert run["after"] == greedy(other, prompts, NEW_TOKENS)
