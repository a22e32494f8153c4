"""What decode graphs need on Ascend: aligned sequence ends, sizes with and without drafts, static kernels.

Problem: a graph is captured for a number of tokens and replayed for fewer. The fused attention operator
(layout TND) wants the end of the last sequence to be the number of query tokens, padding included. Static
kernels, compiled for one number of tokens each, take minutes each, so they pay for the sizes of graphs only;
in a process group without LOCAL_WORLD_SIZE torchair silently leaves them out.
Idea: padding becomes one more sequence, without keys; the sizes and the ranks of a node are taken from vLLM's
configuration. Invariants: what is aligned already is returned as it is; real sequences keep their ends and
lengths. Cost: O(1) if aligned, else O(sequences).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, MutableMapping
from typing import Any

from ascend_rl.settings.static_kernels import build_dir


def align_ends(ends: list[int], lengths: list[int], tokens: int) -> tuple[list[int], list[int]]:
    """Ends of the query sequences and lengths of their keys, for a graph of `tokens` query tokens.

    Args:
        ends: [sequences], ascending: where the query tokens of each sequence end (actual_seq_lengths).
        lengths: [sequences], tokens in the KV cache (actual_seq_lengths_kv).
        tokens: query tokens of the graph, padding included.

    Raises:
        ValueError: the sequences have more tokens than the graph.

    >>> align_ends([4, 5], [40, 7], 8)
    ([4, 5, 8], [40, 7, 0])
    """
    if ends[-1] == tokens:
        return ends, lengths
    if ends[-1] > tokens:
        raise ValueError(f"{ends[-1]} query tokens do not fit into the graph of {tokens} that is replayed")
    return [*ends, tokens], [*lengths, 0]


def static_sizes(capture_sizes: Iterable[int], max_num_seqs: int, drafts: int) -> list[int]:
    """Tokens of the decode graphs, ascending, by vLLM's rule for FULL_DECODE_ONLY.

    Applied here too because vLLM applies it only after it has compiled the model: sizes become multiples of
    the tokens of a sequence, none above the largest given, and a batch has at most max_num_seqs sequences.

    >>> static_sizes([1, 4, 10, 14, 64], max_num_seqs=8, drafts=3)
    [4, 12, 16]
    """
    each, top = 1 + drafts, max(capture_sizes, default=0)
    sizes = {-(-size // each) * each for size in capture_sizes}
    kept = {size for size in sizes if size <= top} or {each}
    return sorted(size for size in kept if size <= min(top, max_num_seqs * each))


def graphs_without_drafts(speculative: Any) -> bool:
    """Whether steps without drafts have graphs of their own, given vLLM's SpeculativeConfig or None.

    Only the drafter of method sam, a custom class for vLLM 0.23, pads its drafts so that others find a graph.
    """
    if speculative is None:
        return False
    return speculative.method == "sam" or str(getattr(speculative, "model", "")).endswith(".SamDrafter")


def plain_sizes(capture_sizes: Iterable[int], max_num_seqs: int, drafts: int, shared: bool) -> list[int]:
    """Tokens of the graphs for steps without drafts, ascending, where other steps have ``drafts`` a row.

    Args:
        capture_sizes: the sizes asked for, before vLLM rounds them up for drafts.
        max_num_seqs: most rows of a batch.
        drafts: drafted tokens of a row in the other graphs.
        shared: data-parallel ranks compute each step with equal sizes, with drafts on some only; so these
            sizes are those of `static_sizes` for drafts that a batch without drafts can have.

    >>> plain_sizes([1, 2, 4, 8, 16], max_num_seqs=8, drafts=3, shared=False)
    [1, 2, 4, 8]
    >>> plain_sizes([1, 2, 4, 8, 16], max_num_seqs=8, drafts=3, shared=True)
    [4, 8]
    """
    sizes = static_sizes(capture_sizes, max_num_seqs, drafts) if shared else sorted(set(capture_sizes))
    return [size for size in sizes if size <= max_num_seqs]


def static_kernels(aclgraph: Any, vllm_config: Any, environ: MutableMapping[str, str] | None = None) -> None:
    """Let torchair compile kernels for the sizes of decode graphs, if additional_config.enable_static_kernel.

    Args:
        aclgraph: experimental_config.aclgraph of torchair's CompilerConfig, changed.
        vllm_config: vLLM's VllmConfig.
        environ: default os.environ; gets LOCAL_WORLD_SIZE, the ranks of this node, unless it is set.
    """
    if not vllm_config.additional_config.get("enable_static_kernel", False):
        return
    parallel = vllm_config.parallel_config
    aclgraph._aclnn_static_shape_kernel = True
    if built := build_dir(environ):
        aclgraph._aclnn_static_shape_kernel_build_dir = built
    # Without sizes, each new number of prompt tokens is compiled for minutes in the middle of serving.
    aclgraph._aclnn_static_shape_kernel_sym_value_range = kernel_sizes(vllm_config)
    environ = os.environ if environ is None else environ  # looked up now: datasets.map replaces it
    environ.setdefault("LOCAL_WORLD_SIZE", str(parallel.local_world_size * parallel.data_parallel_size_local))


def kernel_sizes(vllm_config: Any) -> list[int]:
    """Tokens of all decode graphs, ascending."""
    speculative = vllm_config.speculative_config
    batches = (
        vllm_config.compilation_config.cudagraph_capture_sizes,
        vllm_config.scheduler_config.max_num_seqs,
        speculative.num_speculative_tokens if speculative else 0,
    )
    shared = vllm_config.parallel_config.data_parallel_size > 1
    plain = plain_sizes(*batches, shared) if graphs_without_drafts(speculative) else []
    return sorted({*static_sizes(*batches), *plain})
