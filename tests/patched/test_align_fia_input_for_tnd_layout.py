"""Replayed graphs: the sequences passed to attention end where the graph's query ends.

vllm-ascend captures the graphs, pads batches to their sizes and updates the attention in them; the operator
of the software NPU refuses what the device refuses.
"""

from __future__ import annotations

import random

import pytest
import torch
from test_npu_runner import greedy

NEW_TOKENS = 24


def decode(path: str, mode: str, sizes: list[int], prompts: list[list[int]], drafts: int) -> dict:
    """Greedy decoding with graphs of these sizes; of each update (rows, ends, lengths of keys)."""
    import torch_npu
    from npu_ground import make_llm

    from vllm import SamplingParams
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    # Drafts of full length for all: else batches are not equal, and there is no graph. Accepted or not.
    NgramProposer.batch_propose = lambda self, count, *args: [[1] * drafts for _ in range(count)]
    speculative = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
    graphs = {"cudagraph_mode": mode, "cudagraph_capture_sizes": sizes}
    llm = make_llm(
        path, speculative_config=speculative if drafts else None, max_num_seqs=6, enforce_eager=False,
        compilation_config=graphs,
    )  # fmt: skip
    updates, attention = [], torch_npu.npu_fused_infer_attention_score
    original = attention.out

    def out(*, query, **options):
        updates.append([len(query), options["actual_seq_lengths"], options["actual_seq_lengths_kv"]])
        return original(query=query, **options)

    attention.out = out
    torch.npu.graphs.reset_counts()
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate(requests, sampling, use_tqdm=False)
    return {
        "ids": [list(output.outputs[0].token_ids) for output in outputs],
        "updates": updates,
        "counts": torch.npu.graphs.counts(),
    }


@pytest.mark.parametrize(("mode", "sizes", "drafts"), [
    ("FULL", [8, 64], 0),  # prompts and decodes of different lengths share a graph
    ("FULL_DECODE_ONLY", [16, 24], 3),  # batches of equal decodes: vllm-ascend 0.13.0 pads them by itself
])  # fmt: skip
def test_sequences_end_with_the_graph(npu_ground, tiny, mode, sizes, drafts):
    rng = random.Random(0)
    prompts = [[rng.randrange(13) for _ in range(length)] for length in (3, 9, 30, 5, 7)]
    run = npu_ground.run(decode, str(tiny / "model"), mode, sizes, prompts, drafts)
    assert run["ids"] == greedy(tiny / "model", prompts, NEW_TOKENS)
    assert len(run["updates"]) == run["counts"]["updates"] >= run["counts"]["replays"] > 0
    for rows, ends, lengths in run["updates"]:
        assert ends[-1] == rows and len(ends) == len(lengths)
    assert any(lengths[-1] == 0 for _, _, lengths in run["updates"])  # some are padded
