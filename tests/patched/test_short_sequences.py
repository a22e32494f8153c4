"""Sequences of fewer tokens than TP x CP train with context parallelism: log-probs equal Hugging Face's."""

from __future__ import annotations

import torch
from megatron_tiny import (
    RESPONSE,
    Layout,
    hugging_face,
    make_batch,
    make_checkpoint,
    response_log_probs,
)
from ranks import run_ranks

from ascend_rl.settings import stack

if stack.NAME == stack.DEFAULT:
    from megatron_tiny import make_worker, own_share
else:
    from test_megatron import log_probs, make_worker

LAYOUT = Layout(tp=2, cp=2)
TOKENS = (3, 2, 9, 4)  # of prompt and response; the prompt is one


def short_batch() -> dict[str, torch.Tensor]:
    batch = {key: value[: len(TOKENS)] for key, value in make_batch().items()}
    width = batch["input_ids"].shape[1]
    place = torch.arange(width) - (width - RESPONSE - 1)
    mask = (place >= 0) & (place < torch.tensor(TOKENS)[:, None])
    return batch | {
        "input_ids": batch["input_ids"].clamp(min=2).masked_fill(~mask, 0),
        "prompts": batch["prompts"].clamp(min=2).masked_fill(~mask[:, :-RESPONSE], 0),
        "responses": batch["responses"].masked_fill(~mask[:, -RESPONSE:], 0),
        "attention_mask": mask.long(),
        "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0),
        "response_mask": mask[:, -RESPONSE:].float(),
    }


def log_probs_of(rank: int, path) -> torch.Tensor:
    worker = make_worker(LAYOUT, path)
    if stack.NAME == stack.DEFAULT:
        return worker.compute_log_prob(own_share(short_batch())).batch["old_log_probs"]
    return log_probs(worker, short_batch())


def test_log_probs_of_short_sequences(tmp_path):
    path, batch = make_checkpoint("dense", tmp_path / "dense", layers=2), short_batch()
    with torch.no_grad():
        expected = response_log_probs(hugging_face(path), batch)
    kept = batch["response_mask"].bool()
    assert kept.sum(-1).tolist() == [n - 1 for n in TOKENS]
    for got in run_ranks(4, log_probs_of, path):
        assert (got - expected)[kept].abs().max() <= 1e-5
