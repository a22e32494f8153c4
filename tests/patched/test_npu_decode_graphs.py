"""Decode graphs of vllm-ascend (FULL_DECODE_ONLY, its ACLGraphWrapper) on the software NPU.

A replay repeats what was captured and nothing of Python, so right tokens say that the graph holds the whole
forward pass and that its attention is updated at every step; that they come from replays is counted.
"""

from __future__ import annotations

import random

import pytest
import torch
from npu_ground import make_llm, on_ranks, save_random_model
from test_npu_runner import LAYERS, greedy

pytestmark = pytest.mark.long

SIZES = [1, 2, 4, 8]
NEW_TOKENS = [6, 9, 12, 15, 18]  # steps with 5, 4, 3, 2 and 1 requests: 5 and 3 are padded


class Engine:
    """vLLM with decode graphs; ``counts``: what was captured while it started."""

    def __init__(self, path: str, **options):
        graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES}
        torch.npu.graphs.reset_counts()
        self.llm = make_llm(path, enforce_eager=False, compilation_config=graphs, **options)
        self.counts = torch.npu.graphs.counts()
        core = self.llm.llm_engine.engine_core.engine_core
        self.worker = core.model_executor.driver_worker.worker

    def generate(self, prompts: list[list[int]]) -> dict:
        """Token ids by prompt, what the device counted meanwhile, and calls of operators by name."""
        from software_npu.kernels.training import calls
        from vllm import SamplingParams

        torch.npu.graphs.reset_counts()
        calls.clear()
        sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in NEW_TOKENS]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(requests, sampling, use_tqdm=False)
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        return {"ids": ids, "counts": torch.npu.graphs.counts(), "calls": dict(calls)}


def decode(path: str, prompts: list[list[int]], options: dict, broken: str = "") -> dict:
    engine = Engine(path, **options)
    if broken == "replay":
        torch.npu.NPUGraph.replay = lambda self: None
    if broken == "update":
        import vllm_ascend.worker.model_runner_v1 as runner

        runner.update_attn_params = lambda *args: None
    model = engine.worker.model_runner.model
    return engine.generate(prompts) | {
        "captured": engine.counts["captures"],
        "wrapper": f"{type(model).__module__}.{type(model).__name__}",
    }


def decode_on_ranks(series: str, world: int, *args) -> dict:
    return on_ranks(series, world, decode, *args)


def expected(path, prompts: list[list[int]]) -> list[list[int]]:
    whole = greedy(path, prompts, max(NEW_TOKENS))
    return [ids[:count] for ids, count in zip(whole, NEW_TOKENS, strict=True)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("graphs")
    return {kind: save_random_model(directory / kind, moe=kind == "moe") for kind in ("dense", "moe")}


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(0)
    return [[rng.randrange(13) for _ in range(length)] for length in (1, 5, 17, 130, 9)]


def assert_replayed(run: dict) -> None:
    """One step computed the prompts; the others replayed a graph, and updated the attention of each layer."""
    steps = max(NEW_TOKENS) - 1
    assert run["captured"] == len(SIZES)
    assert run["wrapper"] == "vllm_ascend.compilation.acl_graph.ACLGraphWrapper"
    counts = run["counts"]
    assert (counts["captures"], counts["replays"], counts["updates"]) == (0, steps, steps * LAYERS)
    assert run["calls"]["npu_fused_infer_attention_score"] == (steps + 1) * LAYERS


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_tokens_of_replays_equal_hugging_face(npu_ground, models, prompts, kind):
    run = npu_ground.run(decode, str(models[kind]), prompts, {})
    assert run["ids"] == expected(models[kind], prompts)
    assert_replayed(run)


def test_without_replays_the_tokens_are_others(npu_ground, models, prompts):
    run = npu_ground.run(decode, str(models["dense"]), prompts, {}, "replay")
    assert run["counts"]["replays"] == 0
    right = expected(models["dense"], prompts)
    assert [ids[0] for ids in run["ids"]] == [ids[0] for ids in right] and run["ids"] != right


def test_a_replay_whose_attention_is_not_updated_does_not_end(npu_ground, models, prompts):
    with pytest.raises(AssertionError, match="waits for an ExternalEvent that nobody has recorded"):
        npu_ground.run(decode, str(models["dense"]), prompts, {}, "update")


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "data_parallel_size"])
def test_experts_of_two_ranks_in_graphs(npu_ground, models, prompts, parallel):
    """On an Atlas A3, that is a tree compiled for it: dispatch and combine (MC2) are captured too."""
    options = {
        "distributed_executor_backend": "external_launcher",
        "enable_expert_parallel": True,
        parallel: 2,
    }
    run = npu_ground.run(decode_on_ranks, "A3", 2, str(models["moe"]), prompts, options)
    assert run["ids"] == expected(models["moe"], prompts)
    assert_replayed(run)
    replayed = LAYERS * run["counts"]["replays"]
    assert run["calls"]["npu_moe_distribute_dispatch_v2"] == replayed
    assert run["calls"]["npu_moe_distribute_combine_v2"] == replayed


def sleep_and_decode(path: str, other: str, prompts: list[list[int]], level: int) -> list[dict]:
    """A run; the next ones after sleep, of which level 2 comes back with the weights of ``other``."""
    from safetensors.torch import load_file

    engine = Engine(path, enable_sleep_mode=True)
    runs = [engine.generate(prompts)]
    for weights in (path, other):
        free = torch.npu.mem_get_info()[0]
        engine.llm.sleep(level)
        freed = torch.npu.mem_get_info()[0] - free
        engine.llm.wake_up()
        if level == 2:
            tensors = load_file(f"{weights}/model.safetensors")
            engine.worker.model_runner.model.load_weights(tensors.items())
        size = sum(p.numel() * p.element_size() for p in engine.worker.model_runner.model.parameters())
        runs.append(engine.generate(prompts) | {"freed": freed, "weights": size})
    return runs


@pytest.mark.parametrize("level", [1, 2])
def test_graphs_outlive_sleep(npu_ground, models, prompts, tmp_path, level):
    """Replayed graphs read the weights and the cache at the same addresses, without a new capture."""
    other = save_random_model(tmp_path, seed=1)
    runs = npu_ground.run(sleep_and_decode, str(models["dense"]), str(other), prompts, level)
    paths = [models["dense"], models["dense"], other if level == 2 else models["dense"]]
    assert [run["ids"] for run in runs] == [expected(path, prompts) for path in paths]
    assert all(run["freed"] > run["weights"] for run in runs[1:])  # and the cache
    for run in runs:
        assert (run["counts"]["captures"], run["counts"]["replays"]) == (0, max(NEW_TOKENS) - 1)
