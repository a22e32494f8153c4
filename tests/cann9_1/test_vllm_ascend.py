"""Engines of vllm-ascend 0.23.0 on the software NPU against Hugging Face: tokens, log-probs, counts.

A replay repeats what was captured and nothing of Python, so right tokens of replays say that the graphs hold
the whole forward pass and that their attention is updated in each step.
"""

from __future__ import annotations

import random

import pytest
import torch
from npu_ground import make_llm, on_ranks, save_random_model

LAYERS = 2
SIZES = [1, 2, 4, 8]
NEW_TOKENS = [6, 9, 12, 15, 18]  # steps with 5, 4, 3, 2 and 1 requests: 5 and 3 are padded
STEPS = max(NEW_TOKENS)
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES},
}
DRAFT_TOKENS = 3
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFT_TOKENS, "prompt_lookup_max": 3}
CLOSE = 1e-5


class Engine:
    """vLLM in this process; ``counts``: graphs that were captured while it started."""

    def __init__(self, path: str, **options):
        torch.npu.graphs.reset_counts()
        self.llm = make_llm(path, additional_config={"enable_cpu_binding": False}, **options)
        self.counts = torch.npu.graphs.counts()
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.worker = self.core.model_executor.driver_worker.worker

    def generate(self, prompts: list[list[int]]) -> dict:
        """Token ids and their log-probs by prompt, and what was counted meanwhile."""
        from software_npu.kernels.training import calls
        from vllm import SamplingParams

        torch.npu.graphs.reset_counts()
        calls.clear()
        sampling = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=0) for n in NEW_TOKENS
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = [output.outputs[0] for output in self.llm.generate(requests, sampling, use_tqdm=False)]
        return {
            "ids": [list(output.token_ids) for output in outputs],
            "log_probs": [
                [step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)]
                for output in outputs
            ],
            "captured": self.counts["captures"],
            "graphs": torch.npu.graphs.counts(),
            "calls": dict(calls),
            "runner": f"{type(self.worker.model_runner).__module__}",
        }


def decode(path: str, prompts: list[list[int]], options: dict) -> dict:
    """A job. Also drafted and accepted tokens, of an engine that drafts."""
    engine = Engine(path, **options)
    drafts = {"drafted": 0, "accepted": 0}
    original = engine.core.scheduler.make_spec_decoding_stats

    def counted(*args, **kwargs):
        drafts["drafted"] += kwargs["num_draft_tokens"]
        drafts["accepted"] += kwargs["num_accepted_tokens"]
        return original(*args, **kwargs)

    engine.core.scheduler.make_spec_decoding_stats = counted
    return engine.generate(prompts) | drafts


def decode_on_two(*args) -> dict:
    return on_ranks("A3", 2, decode, *args)


def sleep_and_decode(path: str, other: str, prompts: list[list[int]]) -> list[dict]:
    """A job: a run, one after sleep of level 1, one after sleep of level 2 with the weights of ``other``."""
    from safetensors.torch import load_file

    engine = Engine(path, enable_sleep_mode=True, **GRAPHS)
    model = engine.worker.model_runner.model
    runs = [engine.generate(prompts)]
    for level in (1, 2):
        free = torch.npu.mem_get_info()[0]
        engine.llm.sleep(level)
        freed = torch.npu.mem_get_info()[0] - free
        engine.llm.wake_up()
        if level == 2:
            model.load_weights(load_file(f"{other}/model.safetensors").items())
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        runs.append(engine.generate(prompts) | {"freed": freed, "weights": weights})
    return runs


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {
        "dense": save_random_model(directory / "dense"),
        "other": save_random_model(directory / "other", seed=1),
        "moe": save_random_model(directory / "moe", moe=True),
    }


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(0)
    return [[rng.randrange(13) for _ in range(length)] for length in (1, 5, 17, 130, 9)]


def assert_equal_to_hugging_face(run: dict, path, prompts: list[list[int]]) -> None:
    """Each token is the most likely one after those before it, with the same log-prob."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for prompt, ids, found, count in zip(prompts, run["ids"], run["log_probs"], NEW_TOKENS, strict=True):
        assert len(ids) == count
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        right = logits.log_softmax(-1).max(-1)
        assert ids == right.indices.tolist()
        assert (torch.tensor(found) - right.values).abs().max() < CLOSE


def assert_replayed(run: dict) -> None:
    """One step computed the prompts; the others replayed a graph, and updated the attention of each layer."""
    assert run["captured"] == len(SIZES)
    counts = run["graphs"]
    assert counts["captures"] == 0 and counts["replays"] == STEPS - 1
    assert counts["updates"] == (STEPS - 1) * LAYERS


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_eager_steps(npu_ground, models, prompts, kind):
    run = npu_ground.run(decode, str(models[kind]), prompts, {})
    assert_equal_to_hugging_face(run, models[kind], prompts)
    assert run["runner"] == "vllm_ascend.worker.model_runner_v1"
    assert run["captured"] == run["graphs"]["replays"] == 0
    assert run["calls"]["npu_fused_infer_attention_score"] == STEPS * LAYERS
    assert run["calls"]["_compute_slot_mapping_kernel"] == STEPS
    assert run["calls"].get("npu_grouped_matmul", 0) == (kind == "moe") * 2 * STEPS * LAYERS


def test_sleep_and_decode_graphs(npu_ground, models, prompts):
    """Replayed graphs read the weights and the cache at the same addresses, without a new capture."""
    runs = npu_ground.run(sleep_and_decode, str(models["dense"]), str(models["other"]), prompts)
    for run, name in zip(runs, ("dense", "dense", "other"), strict=True):
        assert_equal_to_hugging_face(run, models[name], prompts)
        assert_replayed(run)
    assert all(run["freed"] > run["weights"] for run in runs[1:])  # and the cache


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_two_ranks_in_graphs(npu_ground, models, prompts, kind):
    """Tensor parallel; on an Atlas A3 dispatch and combine of experts (MC2) are captured too."""
    options = {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2}
    options |= GRAPHS | {"enable_expert_parallel": kind == "moe"}
    run = npu_ground.run(decode_on_two, str(models[kind]), prompts, options)
    assert_equal_to_hugging_face(run, models[kind], prompts)
    assert_replayed(run)
    replayed = (kind == "moe") * LAYERS * run["graphs"]["replays"]
    assert run["calls"].get("npu_moe_distribute_dispatch_v2", 0) == replayed


def test_ngram_drafts_in_graphs(npu_ground, models, prompts):
    """In fewer steps than tokens: drafts were accepted. Their graphs have a row for each drafted token."""
    run = npu_ground.run(decode, str(models["dense"]), prompts, GRAPHS | {"speculative_config": NGRAM})
    assert_equal_to_hugging_face(run, models["dense"], prompts)
    assert run["drafted"] > run["accepted"] > 0
    assert run["captured"] > 0 and 0 < run["graphs"]["replays"] < STEPS - 1


def test_sam_drafts_in_graphs(npu_ground, models, prompts):
    """Method custom_class with the suffix automaton."""
    method = {"method": "custom_class", "model": "ascend_rl.glue.cann9_1.sam.SamDrafter"}
    options = GRAPHS | {"speculative_config": method | {"num_speculative_tokens": DRAFT_TOKENS}}
    run = npu_ground.run(decode, str(models["dense"]), prompts, options)
    assert_equal_to_hugging_face(run, models["dense"], prompts)
    assert run["drafted"] > run["accepted"] > 0
    assert run["captured"] > 0 and 0 < run["graphs"]["replays"]


def sample(path: str, prompts: list[list[int]], mode: str) -> dict:
    """A job: one token each at temperature 0.5, and its log-prob."""
    from vllm import SamplingParams

    engine = Engine(path, logprobs_mode=mode)
    sampling = SamplingParams(temperature=0.5, max_tokens=1, seed=7, logprobs=0)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = [output.outputs[0] for output in engine.llm.generate(requests, sampling, use_tqdm=False)]
    return [[o.token_ids[0], o.logprobs[0][o.token_ids[0]].logprob] for o in outputs]


@pytest.mark.parametrize("mode,temperature", [("processed_logprobs", 0.5), ("raw_logprobs", 1)])
def test_log_probs_are_those_that_were_asked_for(npu_ground, models, prompts, mode, temperature):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models["dense"], dtype=torch.float32)
    for prompt, (token, found) in zip(
        prompts, npu_ground.run(sample, str(models["dense"]), prompts, mode), strict=True
    ):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, -1] / temperature
        assert abs(logits.log_softmax(-1)[token].item() - found) < CLOSE


def rotary_beside(name: str) -> str:
    """A job: the layer that is made beside an empty stand-in, such as a training framework leaves behind."""
    import sys
    import types

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

    sys.modules[name] = types.ModuleType(name)  # without __spec__
    with set_current_vllm_config(VllmConfig()):
        return type(ApplyRotaryEmb()).__name__


def test_rotary_embeddings_import_no_flash_attn(npu_ground):
    assert npu_ground.run(rotary_beside, "flash_attn").endswith("ApplyRotaryEmb")
