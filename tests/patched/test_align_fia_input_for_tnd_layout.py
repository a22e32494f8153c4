"""Replayed graphs: the sequences passed to attention end where the graph's query ends.

Graphs cannot be captured on a CPU. Here the model runs outside of them, while vllm-ascend's runner pads
batches and updates the attention of a graph as it would on a device; that attention is really computed, from
the keys that the model has written, by an operator that refuses what the device refuses.
"""

from __future__ import annotations

import random

import pytest


def decode(path: str, mode: str, sizes: list[int], prompts: list[list[int]], drafts: int) -> list:
    """Greedy decoding with graphs of these sizes; (rows, ends, lengths of keys) of each update."""
    import torch
    import torch_npu
    from npu_ground import make_llm

    from vllm import SamplingParams
    from vllm.config import CUDAGraphMode
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer
    from vllm_ascend.compilation import acl_graph

    # Drafts of full length for all: else batches are not equal, and there is no graph. Accepted or not.
    NgramProposer.batch_propose = lambda self, count, *args: [[1] * drafts for _ in range(count)]
    speculative = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
    llm = make_llm(path, speculative_config=speculative if drafts else None, max_num_seqs=6)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    compilation = runner.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode[mode]
    compilation.cudagraph_capture_sizes = runner.cudagraph_batch_sizes = sizes
    compilation.max_cudagraph_capture_size = sizes[-1]
    compilation.compute_bs_to_padded_graph_size()
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode[mode], 1 + drafts)
    runner.update_stream = torch.npu.Stream()
    torch.npu.graph_task_update_begin = torch.npu.graph_task_update_end = lambda *args: None

    updates, attention = [], torch_npu.npu_fused_infer_attention_score

    def out(*, query, out, workspace, **options):
        updates.append([len(query), options["actual_seq_lengths"], options["actual_seq_lengths_kv"]])
        out[0].copy_(attention(query, **options)[0])

    attention.out = out
    acl_graph.set_graph_params(sizes)
    graphs = acl_graph.get_graph_params()
    (layer, *_) = compilation.static_forward_context.values()
    key, value = (part.flatten(2) for part in layer.kv_cache[0])
    blocks = runner.input_batch.block_table[0].get_device_tensor()
    for size in sizes:  # what capturing leaves behind, for one layer
        query = torch.randn(size, layer.num_heads, layer.head_size)
        graphs.attn_params[size] = [
            (query, key, value, blocks, torch.ones(1), key.shape[1], [], [], layer.num_kv_heads,
             layer.num_heads, 1.0, torch.empty_like(query), torch.empty(1)),
        ]  # fmt: skip
        graphs.handles[size], graphs.events[size] = [None], [torch.npu.Event()]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    llm.generate(requests, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    return updates


@pytest.mark.parametrize(("mode", "sizes", "drafts"), [
    ("FULL_DECODE_ONLY", [16, 24], 3),  # batches of equal decodes: vllm-ascend 0.13.0 pads them by itself
    ("FULL", [8, 64], 0),  # prompts and decodes of different lengths share a graph
])  # fmt: skip
def test_sequences_end_with_the_graph(npu_ground, tiny, mode, sizes, drafts):
    rng = random.Random(0)
    prompts = [[rng.randrange(13) for _ in range(length)] for length in (3, 9, 30, 5, 7)]
    updates = npu_ground.run(decode, str(tiny / "model"), mode, sizes, prompts, drafts)
    assert updates
    for rows, ends, lengths in updates:
        assert ends[-1] == rows and len(ends) == len(lengths)
    assert any(lengths[-1] == 0 for _, _, lengths in updates)  # some are padded
