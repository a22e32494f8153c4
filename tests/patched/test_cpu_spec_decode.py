"""vLLM's CPU runner speculates, and its output stays the same."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from spec_engines import Engine, assert_distributed, processed, prompts, random_model

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def test_refuses_methods_with_a_draft_model_by_name():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    config = SimpleNamespace(speculative_config=SimpleNamespace(method="eagle"))
    with pytest.raises(ValueError, match="eagle.* needs a draft model.*use ngram"):
        CPUModelRunner(config, torch.device("cpu"))


@pytest.mark.parametrize("sampling", [
    {"temperature": 1.0}, {"temperature": 0.6, "top_k": 3}, {"temperature": 1.5, "top_k": 5, "top_p": 0.8},
], ids=str)  # fmt: skip
def test_rejection_sampler_keeps_the_distribution(sampling):
    """vLLM's RejectionSampler with its own metadata: 2 drafts and the bonus for each of 40,000 requests."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    torch.manual_seed(0)
    rows, vocabulary = 40_000, 8
    table = 1.5 * torch.randn(3, vocabulary)  # the logits at the two drafted positions and after them
    likely = [int(logits.argmax()) for logits in table]
    anything = torch.randint(vocabulary, (rows, 2))
    drafts = torch.where(torch.rand(rows, 2) < 0.5, torch.tensor(likely[:2]), anything)
    metadata = SpecDecodeMetadata.make_dummy(drafts.tolist(), torch.device("cpu"))
    metadata.logits_indices = torch.arange(3 * rows)
    metadata.target_logits_indices = metadata.logits_indices.view(rows, 3)[:, :2].flatten()
    metadata.bonus_logits_indices = metadata.logits_indices.view(rows, 3)[:, 2].contiguous()

    def every(name, kind):
        return torch.full((rows,), sampling[name], dtype=kind) if name in sampling else None

    emitted = RejectionSampler(Sampler())(metadata, None, table.repeat(rows, 1), SamplingMetadata(
        temperature=every("temperature", torch.float32), all_greedy=False, all_random=True,
        top_p=every("top_p", torch.float32), top_k=every("top_k", torch.int32), generators={},
        max_num_logprobs=None, no_penalties=True, prompt_token_ids=None,
        frequency_penalties=torch.zeros(rows), presence_penalties=torch.zeros(rows),
        repetition_penalties=torch.ones(rows),
        output_token_ids=[[] for _ in range(rows)], allowed_token_ids_mask=None, bad_words_token_ids={},
        logitsprocs=LogitsProcessors(), spec_token_ids=drafts.tolist(),
    )).sampled_token_ids.long()  # fmt: skip
    target = processed(table, **sampling).exp()
    for position in range(3):
        reached = emitted[:, position] >= 0
        assert reached.sum() > 1000
        assert_distributed(emitted[reached, position].tolist(), target[position])


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    random_model(path)
    return path


def test_greedy_is_the_same_in_fewer_steps(model_path):
    from vllm import SamplingParams

    parameters = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
    plain, ngram = Engine(model_path), Engine(model_path, speculative_config=NGRAM)
    expected = plain.tokens(prompts(32), parameters)
    assert ngram.tokens(prompts(32), parameters) == expected
    assert ngram.counts["accepted"] > 200 and ngram.counts["steps"] < 0.8 * plain.counts["steps"]
    assert not plain.counts["drafted"]
    # With another thread, whose core may be busy, each of vLLM's small kernels would wait for it in a loop.
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "gomp" in line}
    assert {ctypes.CDLL(library).omp_get_max_threads() for library in mapped} == {1}
