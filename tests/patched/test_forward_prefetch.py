"""With forward_prefetch, verl's FSDP2 actor asks for the weights of the next layer before a layer computes.

On two ranks; the collectives are counted where PyTorch runs them. The log-probs are the same.
"""

from __future__ import annotations

import torch
from megatron_tiny import Gathers, make_batch, make_checkpoint, own_share
from patched.test_compute_old_log_prob import fsdp_worker
from ranks import run_ranks

ACTOR = "actor_rollout_ref.actor"
LAYERS = 3


def passes(rank: int, path) -> dict[bool, tuple[list[int], torch.Tensor]]:
    """With and without: how often weights were gathered by the time each layer computes; log-probs."""
    found = {}
    for prefetch in (False, True):
        wanted = f"{ACTOR}.fsdp_config.forward_prefetch={prefetch}"
        worker = fsdp_worker(path, f"{ACTOR}.strategy=fsdp2", wanted)
        gathers, seen = Gathers(), []
        for layer in worker.actor_module_fsdp.model.layers:
            layer.input_layernorm.register_forward_pre_hook(lambda *_, g=gathers, s=seen: s.append(g.count))
        share = own_share({k: v[:4] for k, v in make_batch().items()}, rank, 2)
        share.meta_info |= {"micro_batch_size": 2, "use_dynamic_bsz": False}
        with gathers:
            log_probs = worker.actor.compute_log_prob(share, calculate_entropy=False)["log_probs"]
        found[prefetch] = seen, log_probs
    return found


def test_the_next_layers_weights_are_asked_for_before_a_layer_computes(tmp_path):
    for found in run_ranks(2, passes, make_checkpoint("dense", tmp_path / "dense", layers=LAYERS)):
        (late, expected), (early, log_probs) = found[False], found[True]
        assert len(late) == len(early) == LAYERS
        assert late == [late[0], late[0] + 1, late[0] + 2]
        assert early == [count + 1 for count in late]
        assert torch.equal(log_probs, expected)
