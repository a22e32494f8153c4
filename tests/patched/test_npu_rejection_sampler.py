"""What vllm-ascend's rejection sampler emits has the model's distribution; greedy rows emit the argmax."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare

DRAFT = [2, 4, 1]
REQUESTS = 12000
TEMPERATURES = [0.5, 1.0, 0.0]
# One row for each drafted token and one for the bonus. The first is a coin's toss, the next ones all but
# certain: a sampler that lets later tokens vouch for earlier ones keeps the first far too often.
LOGITS = np.log([
    [0.20, 0.10, 0.50, 0.15, 0.05],
    [0.02, 0.02, 0.02, 0.02, 0.92],
    [0.02, 0.92, 0.02, 0.02, 0.02],
    [0.40, 0.30, 0.10, 0.10, 0.10],
])  # fmt: skip


def emitted(logits: list[list[float]], top_k: int | None) -> dict[str, list]:
    """A job: by temperature, the responses of one batch with their counts, by RejectionSampler."""
    from collections import Counter

    import torch

    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm_ascend.ascend_config import init_ascend_config
    from vllm_ascend.sample.sampler import AscendSampler
    from vllm_ascend.utils import adapt_patch

    adapt_patch()
    init_ascend_config(VllmConfig())
    try:
        from vllm_ascend.sample.rejection_sampler import AscendRejectionSampler as RejectionSampler
    except ImportError:  # vllm-ascend 0.13, which replaces functions of vLLM's
        from vllm.v1.sample.rejection_sampler import RejectionSampler

    torch.manual_seed(0)
    torch.set_default_device("npu")
    drafted, rows = len(DRAFT), torch.arange(REQUESTS * (len(DRAFT) + 1)).view(REQUESTS, -1)
    metadata = SpecDecodeMetadata(
        draft_token_ids=torch.tensor(DRAFT * REQUESTS, dtype=torch.int32),
        num_draft_tokens=[drafted] * REQUESTS,
        cu_num_draft_tokens=torch.arange(1, REQUESTS + 1, dtype=torch.int32) * drafted,
        cu_num_sampled_tokens=torch.arange(1, REQUESTS + 1, dtype=torch.int32) * (drafted + 1),
        target_logits_indices=rows[:, :drafted].flatten(),
        bonus_logits_indices=rows[:, drafted],
        logits_indices=rows.flatten(),
    )
    temperatures = torch.tensor(TEMPERATURES * (REQUESTS // len(TEMPERATURES)))
    sampling = SamplingMetadata(
        temperature=temperatures, all_greedy=False, all_random=False, top_p=None,
        top_k=None if top_k is None else torch.full((REQUESTS,), top_k), generators={}, max_num_logprobs=None,
        no_penalties=True, prompt_token_ids=None, frequency_penalties=torch.zeros(0),
        presence_penalties=torch.zeros(0), repetition_penalties=torch.zeros(0),
        output_token_ids=[[] for _ in range(REQUESTS)], allowed_token_ids_mask=None, bad_words_token_ids={},
        logitsprocs=LogitsProcessors(), spec_token_ids=[DRAFT] * REQUESTS,
    )  # fmt: skip
    given = torch.tensor(logits, dtype=torch.float32).repeat(REQUESTS, 1)
    torch.set_default_device("cpu")
    ids = RejectionSampler(AscendSampler())(metadata, None, given, sampling).sampled_token_ids
    return {
        str(temperature): list(Counter(map(tuple, ids[temperatures == temperature].tolist())).items())
        for temperature in TEMPERATURES
    }


def expected(temperature: float, top_k: int | None) -> dict[tuple[int, ...], float]:
    """Probability of each response that ends at the first token that differs from the draft."""
    logits = LOGITS.copy()
    if top_k is not None:
        logits[logits < np.sort(logits, 1)[:, -top_k, None]] = -np.inf
    if temperature == 0:
        probs = np.eye(logits.shape[1])[logits.argmax(1)]
    else:
        probs = np.exp(logits / temperature)
        probs /= probs.sum(1, keepdims=True)
    responses, kept = {}, 1.0
    for position, row in enumerate(probs):
        for token, p in enumerate(row):
            if position == len(DRAFT) or token != DRAFT[position]:
                response = [*DRAFT[:position], token]
                responses[(*response, *[-1] * (len(DRAFT) + 1 - len(response)))] = kept * p
        kept *= row[DRAFT[position]] if position < len(DRAFT) else 1
    return responses


@pytest.mark.parametrize("top_k", [None, 3])
def test_distribution_is_the_models(npu_ground, top_k):
    counted = npu_ground.run(emitted, LOGITS.tolist(), top_k)
    for temperature in TEMPERATURES:
        counts = {tuple(response): count for response, count in counted[str(temperature)]}
        responses = {response: p for response, p in expected(temperature, top_k).items() if p}
        assert set(counts) <= set(responses)
        total = sum(counts.values())
        assert total == REQUESTS // len(TEMPERATURES)
        if temperature:
            test = chisquare([counts.get(response, 0) for response in responses],
                             [total * p for p in responses.values()])  # fmt: skip
            assert test.pvalue > 1e-4, f"temperature {temperature}: {test}"
        else:
            assert counts == {(2, 4, 1, 0): total}
