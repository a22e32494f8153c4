"""The metrics of a run that code reads by name, and how terminals, tables and curves show each.

verl writes them to metrics.jsonl, one record per step.
"""

from __future__ import annotations

from typing import NamedTuple


class Shown(NamedTuple):
    """How a metric is shown.

    Attributes:
        title: of its curve, and of its line in a report.
        number: a format for its value in a report.
        brief: a format for the terminal of a run; "" where it is not there.
    """

    title: str
    number: str = "{:.1f}"
    brief: str = ""


REWARD = "critic/rewards/mean"  # only training steps have it
# With dynamic sampling (ascend_rl/rollout/dapo.py) every trained group has right and wrong responses.
UNFILTERED = "dapo/reward_before_filter/mean"
LENGTH, CLIPPED = "response_length/mean", "actor/pg_clipfrac"
SPEED = "perf/throughput"  # prompt and response tokens of a step by its time and the number of dies
# Between rollout and trainer; LOG_GAP where the trainer computes no log-probs before the update.
GAP_MEAN, LOG_GAP, GAP_MAX = (
    "training/rollout_probs_diff_mean",
    "rollout_corr/log_ppl_abs_diff",
    "training/rollout_probs_diff_max",
)
# Of responses that the newest weights of the rollout have generated (docs/async.md).
FRESH = "training/off_policy/fresh_probs_diff_max"
ENTROPY, KL = "actor/entropy", "actor/ppo_kl"
# Of the engines (ascend_rl/rollout/engine_stats.py).
USAGE, PREEMPTED = "rollout/kv_cache_usage/max", "rollout/num_preempted"
ACCEPTANCE, GRAPH_SHARE = "rollout/spec_acceptance", "rollout/graph_share"
REQUESTS = "rollout/requests/"  # and the engine
# The largest time of a rank, or engine, in units of the median (ascend_rl/rollout/slow_ranks.py).
SLOWEST_RANK, SLOWEST_ENGINE = "perf/slowest_rank", "rollout/slowest_engine"
MFU_UPDATE, MFU_LOG_PROBS, MFU_ROLLOUT = (
    f"perf/mfu/{phase}" for phase in ("actor", "actor_infer", "rollout")
)

SHOWN = {
    REWARD: Shown("reward", brief="reward {:.2f}"),
    LENGTH: Shown("response length", brief="length {:.0f}"),
    CLIPPED: Shown("clipped share (GSPO: of sequences, GRPO: of tokens)"),
    GAP_MEAN: Shown("mean rollout/trainer probability gap", brief="gap {:.0e}"),
    GAP_MAX: Shown("largest rollout/trainer probability gap", "{:.1e}"),
    SPEED: Shown("prompt and response tokens/s and die", brief="{:.0f} tok/s/die"),
    ENTROPY: Shown("entropy (nats per token)"),
    KL: Shown("KL, old to new policy (nats per token)"),
    USAGE: Shown("KV cache use, highest of a step", "{:.0%}", "KV {:.0%}"),
    PREEMPTED: Shown("preemptions per step", "{:.0f}", "{:.0f} preempted"),
    ACCEPTANCE: Shown("drafted tokens that were accepted", "{:.0%}"),
    GRAPH_SHARE: Shown("engine steps that replay a graph", "{:.0%}"),
    SLOWEST_RANK: Shown("slowest rank (in units of the median)", "{:.2f}"),
    SLOWEST_ENGINE: Shown("slowest engine (in units of the median)", "{:.2f}"),
    MFU_UPDATE: Shown("MFU of the update", "{:.1%}"),
    MFU_LOG_PROBS: Shown("MFU of old log-probs", "{:.1%}"),
    MFU_ROLLOUT: Shown("MFU of the rollout", "{:.1%}"),
}
