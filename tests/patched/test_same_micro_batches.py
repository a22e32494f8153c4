"""verl's FSDP actor on two ranks: both take as many micro-batches, else their collectives do not meet.

Only the forward pass is replaced, by one that communicates nothing, so that without the patch the numbers
differ instead of hanging.
"""

from __future__ import annotations

import torch
from megatron_tiny import RESPONSE, make_batch, make_checkpoint, own_share
from patched.test_compute_old_log_prob import fsdp_worker
from ranks import run_ranks

ACTOR = "actor_rollout_ref.actor"
TOKENS = 48  # rank 0 has 94 tokens, of which 2 micro-batches suffice; rank 1 has 103
OVERRIDES = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu={TOKENS}")


def passes(rank: int, path) -> tuple[list[int], list[int], list[int]]:
    """Rows of each micro-batch in log-probs and in the update, and the tokens of the largest."""
    actor = fsdp_worker(path, *OVERRIDES).actor
    weight = torch.nn.Parameter(torch.zeros(()))
    rows, tokens = [], []

    def forward(inputs, temperature, calculate_entropy):
        rows.append(len(inputs["input_ids"]))
        tokens.append(int(inputs["attention_mask"].sum()))
        return {"log_probs": weight.expand(rows[-1], RESPONSE) * 1.0}

    actor._forward_micro_batch = forward
    actor._optimizer_step = lambda: torch.zeros(())
    share = own_share(make_batch() | {"old_log_probs": torch.zeros(8, RESPONSE)}, rank, 2)
    share.meta_info |= {"micro_batch_size": 2, "use_dynamic_bsz": True, "max_token_len": TOKENS}
    actor.compute_log_prob(share, calculate_entropy=False)
    asked, rows = rows, []
    actor.update_policy(share)
    return asked, rows, tokens


def test_ranks_take_as_many_micro_batches(tmp_path):
    path = make_checkpoint("dense", tmp_path / "dense", layers=2)
    ranks = run_ranks(2, passes, path)
    for part in (0, 1):
        first, second = (found[part] for found in ranks)
        assert len(first) == len(second) == 3
        assert sum(first) == sum(second) == 4  # every row once
    assert max(max(found[2]) for found in ranks) <= TOKENS
