"""Decode steps replay graphs while SAM decoding is on: with drafts, without, and with the gate shut."""

from __future__ import annotations

import pytest
import torch
from npu_ground import make_llm, on_ranks, save_random_model
from test_npu_sam_decoding import log_probs_of, repeating

DRAFT_TOKENS = 4
NEW_TOKENS = [30, 33, 36, 39, 42, 45, 48, 51]
SIZES = [1, 2, 4, 8, 10, 20, 30, 40]
PLAIN, PADDED = [1, 2, 4, 8], [5, 10, 20, 30, 40]  # 1, 2 and 4 tokens hold no row with 4 drafts: 5
SAM = {"method": "sam", "num_speculative_tokens": DRAFT_TOKENS}


def decode(path: str, prompts: list[list[int]], options: dict, sampling: dict) -> dict:
    """A job: tokens and log-probs by prompt; of each step its query lengths and the graphs replayed in it."""
    from vllm import SamplingParams

    torch.npu.graphs.reset_counts()
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES}
    llm = make_llm(path, enforce_eager=False, compilation_config=graphs, **options)
    captured = torch.npu.graphs.counts()["captures"]
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    execute, steps = runner.execute_model, []

    def counted(scheduled, *args):
        before = torch.npu.graphs.counts()["replays"]
        result = execute(scheduled, *args)
        if lengths := sorted(set(scheduled.num_scheduled_tokens.values())):
            replays = torch.npu.graphs.counts()["replays"] - before
            prefill = bool(scheduled.scheduled_new_reqs)
            steps.append({"lengths": lengths, "replays": replays, "prefill": prefill})
        return result

    runner.execute_model = counted
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0, **sampling) for n in NEW_TOKENS],
        use_tqdm=False,
    )
    answers = [output.outputs[0] for output in outputs]
    return {
        "ids": [list(answer.token_ids) for answer in answers],
        "log_probs": [
            [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            for answer in answers
        ],
        "steps": [step for step in steps if not step["prefill"]],
        "captured": captured,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def prompts():
    return repeating(len(NEW_TOKENS))


@pytest.fixture(scope="module")
def plain(npu_ground, model, prompts):
    return npu_ground.run(decode, str(model), prompts, {}, {"temperature": 0})


def assert_replayed(run: dict, lengths: set[int]) -> None:
    """At least 95% of the decode steps are one replay each, of rows of these lengths."""
    replayed = [step["lengths"] for step in run["steps"] if step["replays"] == 1]
    assert len(replayed) >= 0.95 * len(run["steps"]), f"{len(replayed)} of {len(run['steps'])}"
    assert {tuple(seen) for seen in replayed} == {(length,) for length in lengths}


def assert_close(found: list[list[float]], right: list[list[float]]) -> None:
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-4, rtol=0)


def test_greedy_steps_with_drafts_are_replays(npu_ground, model, prompts, plain):
    run = npu_ground.run(decode, str(model), prompts, {"speculative_config": SAM}, {"temperature": 0})
    assert run["captured"] == len(PLAIN) + len(PADDED)
    assert run["ids"] == plain["ids"] and len(run["steps"]) < len(plain["steps"])
    assert_close(run["log_probs"], plain["log_probs"])
    assert_replayed(run, {1 + DRAFT_TOKENS})


def test_sampled_steps_with_and_without_drafts_are_replays(npu_ground, model, prompts):
    sampling = {"temperature": 1, "seed": 1}
    run = npu_ground.run(decode, str(model), prompts, {"speculative_config": SAM}, sampling)
    assert_replayed(run, {1, 1 + DRAFT_TOKENS})
    assert_close(run["log_probs"], log_probs_of(model, prompts, run["ids"]))


def test_with_the_gate_shut_steps_replay_the_graphs_of_one_token_a_row(npu_ground, model, prompts, plain):
    options = {"speculative_config": SAM, "additional_config": {"bs_threshold_for_spec_decode": 1}}
    run = npu_ground.run(decode, str(model), prompts, options, {"temperature": 0})
    assert run["ids"] == plain["ids"]
    assert_replayed(run, {1})


def decode_on_ranks(world: int, path: str, prompts: list[list[int]], options: dict) -> list[dict]:
    return on_ranks("A3", world, decode_on_one, path, prompts, options)


def decode_on_one(path: str, prompts: list[list[int]], options: dict) -> list[dict]:
    """Decodes, greedily; the runs of both ranks. With penalties, the second rank does not draft."""
    import os

    import torch.distributed as dist

    from vllm.distributed import get_dp_group

    drafting = os.environ["RANK"] == "0"
    run = decode(path, prompts, options, {"temperature": 0, "frequency_penalty": 0.0 if drafting else 0.1})
    runs = [None, None]
    dist.all_gather_object(runs, run, group=get_dp_group().cpu_group)
    return runs


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return str(save_random_model(tmp_path_factory.mktemp("moe"), moe=True))


TWO_RANKS = {
    "distributed_executor_backend": "external_launcher",
    "enable_expert_parallel": True,
    "data_parallel_size": 2,
    "max_num_seqs": 10,
}


@pytest.fixture(scope="module")
def plain_on_ranks(npu_ground, experts, prompts):
    return npu_ground.run(decode_on_ranks, 2, experts, prompts, TWO_RANKS)


def test_data_parallel_experts_with_drafts_on_one_rank_only(npu_ground, experts, prompts, plain_on_ranks):
    """Ranks exchange tokens in every layer of each step, so their steps have equal sizes, drafts or none."""
    runs = npu_ground.run(decode_on_ranks, 2, experts, prompts, TWO_RANKS | {"speculative_config": SAM})
    assert [run["ids"] for run in runs] == [run["ids"] for run in plain_on_ranks]
    assert [run["captured"] for run in runs] == [len(PADDED) + 2] * 2  # 5 and 10 tokens without drafts too
    drafted = [step["replays"] for step in runs[0]["steps"] if step["lengths"] == [1 + DRAFT_TOKENS]]
    assert drafted and set(drafted) == {1}
    replays = [step["replays"] for step in runs[1]["steps"]]
    print(f"\nwithout drafts: {sum(replays)} of {len(replays)} decode steps are replays")
    # A step without drafts is no replay while the other rank computes more tokens than it could have rows.
    assert {(*step["lengths"], step["replays"]) for step in runs[1]["steps"]} == {(1, 0), (1, 1)}


def test_graphs_by_rank_replay_with_and_without_drafts_in_one_step(
    npu_ground, experts, prompts, plain_on_ranks
):
    options = {"speculative_config": SAM, "additional_config": {"graphs_by_rank": True}}
    runs = npu_ground.run(decode_on_ranks, 2, experts, prompts, TWO_RANKS | options)
    assert [run["ids"] for run in runs] == [run["ids"] for run in plain_on_ranks]
    seen = [{(*step["lengths"], step["replays"]) for step in run["steps"]} for run in runs]
    assert (1 + DRAFT_TOKENS, 1) in seen[0] and seen[0] <= {(1, 1), (1 + DRAFT_TOKENS, 1)}
    assert seen[1] == {(1, 1)}
