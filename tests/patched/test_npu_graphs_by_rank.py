"""Data-parallel ranks with experts: who replays a decode graph while another rank computes a prefill."""

from __future__ import annotations

import os
import random

import pytest
import torch
from npu_ground import make_llm, on_ranks, save_random_model
from test_npu_runner import greedy

SIZES = [1, 2, 4, 8]
SHORT, LONG = 3, 20  # prompt tokens of those that come later: with the requests that run, below and above 8
# Tokens to sample by prompt. The second rank has more prompts than places: one enters as another ends.
PLACES = 4
TOKENS = [[24, 24, 24], [3, 6, 9, 12, 5, 5, 5]]


def prompts_of(rank: int, late: int) -> list[list[int]]:
    rng = random.Random(rank)
    return [[rng.randrange(13) for _ in range(5 if k < PLACES else late)] for k in range(len(TOKENS[rank]))]


def follow(path: str, late: int, options: dict) -> list[dict]:
    """A job of each rank. Of both: ids by prompt; of each step prefill, replays, tokens (0: a dummy)."""
    import torch.distributed as dist

    from vllm import SamplingParams
    from vllm.distributed import get_dp_group

    rank = int(os.environ["RANK"])
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES}
    llm = make_llm(
        path, enforce_eager=False, compilation_config=graphs, max_num_seqs=PLACES,
        enable_prefix_caching=False, enable_expert_parallel=True, data_parallel_size=2,
        distributed_executor_backend="external_launcher", **options,
    )  # fmt: skip
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    execute, dummy, steps = runner.execute_model, runner._dummy_run, []

    def counted(function, tokens, prefill, launcher=False):
        before = torch.npu.graphs.counts()["replays"]
        result = function()
        replays = torch.npu.graphs.counts()["replays"] - before
        step = {"tokens": tokens, "prefill": bool(prefill), "replays": replays, "launcher": launcher}
        steps.append(step)
        return result

    def execute_model(scheduled, *args):
        if not scheduled.total_num_scheduled_tokens:
            return execute(scheduled, *args)
        prefill = scheduled.scheduled_new_reqs or max(scheduled.num_scheduled_tokens.values()) > 1
        return counted(lambda: execute(scheduled, *args), scheduled.total_num_scheduled_tokens, prefill)

    runner.execute_model = execute_model

    def _dummy_run(*args, **kwargs):
        launcher = "uniform_decode" not in kwargs  # of 0.23 with external_launcher: never a graph
        return counted(lambda: dummy(*args, **kwargs), 0, False, launcher)

    runner._dummy_run = _dummy_run
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts_of(rank, late)],
        [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in TOKENS[rank]],
        use_tqdm=False,
    )
    found, group = [None, None], get_dp_group().cpu_group
    own = {"ids": [list(output.outputs[0].token_ids) for output in outputs], "steps": steps}
    dist.all_gather_object(found, own, group=group)
    return found


def both(series: str, *args) -> list[dict]:
    return on_ranks(series, 2, follow, *args)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("moe"), moe=True)


def expected(model, late: int) -> list[list[list[int]]]:
    """Ids by rank and prompt, by Hugging Face."""
    whole = [greedy(model, prompts_of(rank, late), max(TOKENS[rank])) for rank in range(2)]
    return [[ids[:n] for ids, n in zip(*pair, strict=True)] for pair in zip(whole, TOKENS, strict=True)]


def replays(runs: list[dict]) -> tuple[int, int]:
    """Decode steps of the first rank beside a prefill of the other; how many of them were replays."""
    pairs = [pair for pair in zip(*(run["steps"] for run in runs), strict=True) if not pair[0]["prefill"]]
    pairs = [pair for pair in pairs if not any(step["launcher"] for step in pair)]
    assert {mine["replays"] for mine, other in pairs if not other["prefill"]} == {1}
    beside = [mine["replays"] for mine, other in pairs if other["prefill"]]
    assert not any(other["replays"] for _, other in pairs if other["prefill"])
    return len(beside), sum(beside)


ON = {"additional_config": {"graphs_by_rank": True}}
# Series, prompt tokens of late requests, options; decode steps beside a prefill, replays among them.
CASES = {
    "a rank that decodes replays its graph": ("A3", SHORT, ON, (3, 3)),
    "all ranks go without a graph": ("A3", SHORT, {}, (3, 0)),
    "not beside more tokens than MC2 takes": ("A3", LONG, ON, (3, 0)),
    "chunks of a prefill are as few": ("A3", LONG, ON | {"max_num_batched_tokens": max(SIZES)}, None),
    "not where ranks gather all tokens": ("A2", SHORT, ON, (3, 0)),
}


@pytest.mark.parametrize("case", [
    pytest.param(name, marks=() if "replays" in name else pytest.mark.long) for name in CASES
])  # fmt: skip
def test_graphs_beside_a_prefill(npu_ground, model, case):
    series, late, options, counts = CASES[case]
    runs = npu_ground.run(both, series, str(model), late, options)
    assert [run["ids"] for run in runs] == expected(model, late)
    beside, replayed = replays(runs)
    if counts:
        assert (beside, replayed) == counts
    else:
        assert beside == replayed >= 3 * LONG // max(SIZES)
