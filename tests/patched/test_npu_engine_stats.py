"""What vllm-ascend's engines say of their decode graphs is what the device replays."""

from __future__ import annotations

import torch
from npu_ground import make_llm, save_random_model


def decode(path: str, metrics: bool) -> dict:
    """A job: what EngineStats saw of an engine with decode graphs, and replays that the device counted."""
    from ascend_rl.rollout.engine_stats import EngineStats
    from vllm import SamplingParams

    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
    llm = make_llm(path, enforce_eager=False, compilation_config=graphs, cudagraph_metrics=metrics)
    core, stats = llm.llm_engine.engine_core, EngineStats(graphs=True)
    get = core.get_output

    def get_and_record():
        outputs = get()
        stats.record(outputs)
        return outputs

    core.get_output = get_and_record
    torch.npu.graphs.reset_counts()
    sampling = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [5, 6, 7 + i]} for i in range(3)], sampling, use_tqdm=False)
    return stats.take() | {"replays": torch.npu.graphs.counts()["replays"]}


def test_steps_that_replay_a_graph_are_counted(npu_ground, tmp_path):
    model = str(save_random_model(tmp_path))
    found = npu_ground.run(decode, model, True)
    assert found["replays"] == 8  # one step computes the prompts
    assert (found["rollout/graph_steps"], found["rollout/steps"]) == (8, 9)
    assert "rollout/steps" not in npu_ground.run(decode, model, False)
