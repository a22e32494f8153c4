"""The gate of the first step: rollout and trainer must give the same tokens the same probabilities.

If they do not, the rollout runs another model than the one that is trained, and a week of training is lost;
rewards may still rise for a while. verl compares the two in each step; here the first step of each start is
judged by the mean over tokens of |p(rollout) - p(trainer)|:

    float32    1e-4    the tiny models of the tests reach 3e-7
    bfloat16   0.05    rehearsals reach 6e-3; 4e-3 was reported for layers of a 30B-A3B (verl-omni #637)

Sampling with top-p or top-k widens both: vLLM then reports probabilities of the truncated distribution and
the trainer those of the whole one, which are smaller by the share that was kept, at least top_p.

A trained model gives its tokens probabilities of 0.5 and more on average, other weights nearly none of it.
Where the trainer computes no log-probs of its own before the update (docs/old_log_prob.md), the mean over
sequences of their mean difference in log-prob is judged, with LOG_FACTOR times the limit: rehearsals in
bfloat16 reach 0.08, another model is off by nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from ascend_rl.settings.metrics import GAP_MEAN, LOG_GAP

FLOAT32_LIMIT, LIMIT = 1e-4, 0.05
LOG_FACTOR = 5  # a log-prob differs by more than its probability
TOP_K_MARGIN = 0.05  # nats: 50 tokens keep more than 0.95
CAUSES = """Likely causes, the most frequent first:
  - other weights in the rollout: a checkpoint converted for another layout (USE_ALLTOALL_OVERLAP), or
    model.path and dist_checkpointing_path of different models; see docs/weights.md and docs/converter.md
  - other sampling than in training: temperature, top_p, top_k, or logprobs_mode=raw_logprobs
  - other numbers: dtype, quantization, or rope scaling on one side only
  - a patch that is not applied: bash apply_all_patches.sh --check
GAP_LIMIT=<number> sets another limit, GAP_LIMIT=0 none (docs/launch.md)"""


def limit_for(config_file: Path) -> float:
    """The limit for the resolved configuration that Hydra wrote; LIMIT if it cannot be read."""
    from omegaconf import OmegaConf

    try:
        config = OmegaConf.load(config_file)
        actor = OmegaConf.select(config, "actor_rollout_ref.actor")
        side = actor.megatron if actor.strategy == "megatron" else actor.fsdp_config
        rollout = config.actor_rollout_ref.rollout
        dtypes = {rollout.dtype, side.dtype}
        truncated = -math.log(rollout.get("top_p", 1)) + TOP_K_MARGIN * (rollout.get("top_k", -1) > 0)
    except Exception:  # of any version of any trainer: the gate must not end a run by itself
        return LIMIT
    return (FLOAT32_LIMIT if dtypes == {"float32"} else LIMIT) + truncated


def judge(row: Mapping, limit: float, when: str = "at the first step") -> tuple[bool, str]:
    """Whether the run may continue, and a sentence.

    >>> judge({GAP_MEAN: 0.004}, 0.05)
    (True, 'rollout and trainer agree: probability gap 4.0e-03 (limit 0.05)')
    >>> judge({GAP_MEAN: 0.4}, 0.05)[0], judge({GAP_MEAN: None}, 0.05)[0], judge({}, 0.05)[0]
    (False, False, True)
    """
    key = next((key for key in (GAP_MEAN, LOG_GAP) if key in row), None)
    if key is None:
        return (
            True,
            "rollout and trainer were not compared: set actor_rollout_ref.rollout.calculate_log_probs=True",
        )
    gap = math.nan if row[key] is None else row[key]  # verl writes NaN as null
    what = "probability" if key == GAP_MEAN else "log-prob"
    limit *= LOG_FACTOR if key == LOG_GAP else 1
    agree = gap <= limit
    verdict = "agree" if agree else f"do not agree {when}"
    return (
        agree,
        f"rollout and trainer {verdict}: {what} gap {gap:.1e} (limit {limit:.2g})",
    )


def limit_of(text: str, output_dir: Path) -> float:
    """The limit of a run by GAP_LIMIT, or its dtype; 0: none. Arguments as for `gate`."""
    return float(text) if text else limit_for(output_dir / "hydra/.hydra/config.yaml")


def gate(text: str, output_dir: Path, say: Callable[[str], None]) -> Callable[[dict], str]:
    """The judge of a run's first training step: returns why it must end, or "".

    Args:
        text: GAP_LIMIT: a number, 0 for no gate, "" for the limit of the run's dtype.
        output_dir: of the run, with Hydra's configuration.
        say: is told the sentence if the run may continue.
    """

    def check(row: dict) -> str:
        limit = limit_of(text, output_dir)
        if not limit:
            return ""
        agree, sentence = judge(row, limit)
        if agree:
            say(sentence)
            return ""
        return f"{sentence}.\n{CAUSES}"

    return check
