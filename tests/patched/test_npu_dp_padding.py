"""Beside one rank's prefill, data-parallel ranks compute their own tokens, not as many as that rank."""

from __future__ import annotations

import os
import random

import pytest
from npu_ground import make_llm, on_ranks, save_random_model
from test_npu_sam_decoding import log_probs_of

LAYERS = 2
SIZES = [1, 2, 4]  # MC2 takes 4 tokens; what is longer goes through the all-to-all dispatch
# Prompt tokens and tokens to sample, one request after the other. The first rank decodes beside the first
# long prompt of the second, and has nothing to do beside the next.
REQUESTS = [[(4, 9)], [(4, 4), (20, 6), (150, 3)]]
LONG = 20, 150


def prompts_of(rank: int) -> list[list[int]]:
    rng = random.Random(rank)
    return [[rng.randrange(13) for _ in range(length)] for length, _ in REQUESTS[rank]]


def follow(path: str, chunk: int | None, options: dict) -> list[dict]:
    """A job of each rank. Of all: ids and log-probs by prompt; rows of each call of the all-to-all."""
    import torch.distributed as dist

    from vllm import SamplingParams
    from vllm.distributed import get_dp_group
    from vllm_ascend.ops.fused_moe.token_dispatcher import TokenDispatcherWithAll2AllV as AllToAll

    if chunk:
        os.environ["VLLM_FUSED_MOE_CHUNK_SIZE"] = str(chunk)
    dispatch, rows = AllToAll.token_dispatch, []

    def counted(self, **given):
        of_later = given.get("token_dispatch_input")  # in 0.23
        rows.append(len(of_later.hidden_states if of_later else given["hidden_states"]))
        return dispatch(self, **given)

    AllToAll.token_dispatch = counted
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES}
    llm = make_llm(
        path, enforce_eager=False, compilation_config=graphs, max_num_seqs=1, enable_prefix_caching=False,
        enable_expert_parallel=True, data_parallel_size=2, distributed_executor_backend="external_launcher",
        **options,
    )  # fmt: skip
    rows.clear()
    rank = get_dp_group().rank_in_group
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts_of(rank)],
        [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=0) for _, n in REQUESTS[rank]],
        use_tqdm=False,
    )
    answers = [output.outputs[0] for output in outputs]
    own = {
        "rank": rank,
        "ids": [list(answer.token_ids) for answer in answers],
        "log_probs": [
            [at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs, strict=True)]
            for answer in answers
        ],
        "rows": rows,
    }
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def on_all_ranks(world: int, *args) -> list[dict]:
    return on_ranks("A3", world, follow, *args)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_random_model(tmp_path_factory.mktemp("moe"), moe=True)


@pytest.mark.parametrize("chunk, tp", [
    (None, 1), (64, 1), pytest.param(64, 2, marks=pytest.mark.long),
])  # fmt: skip
def test_ranks_compute_their_own_tokens_beside_a_prefill(npu_ground, model, chunk, tp):
    """A row for each chunk and TP rank is the least, so that none is empty."""
    found = npu_ground.run(on_all_ranks, 2 * tp, str(model), chunk, {"tensor_parallel_size": tp})
    print(chunk, tp, [(run["rank"], run["rows"]) for run in found])
    for run in found:
        expected = log_probs_of(model, prompts_of(run["rank"]), run["ids"])
        for own, right in zip(run["log_probs"], expected, strict=True):
            assert own == pytest.approx(right, abs=1e-5)
    calls = LAYERS * sum(-(-tokens // (chunk or tokens)) for tokens in LONG)
    own = {rank: [run["rows"] for run in found if run["rank"] == rank] for rank in range(2)}
    assert own[0] == [[1] * calls] * tp
    assert {len(rows) for rows in own[1]} == {calls} and sum(map(sum, own[1])) == LAYERS * sum(LONG)
