"""Training and rollout on different dies, at the same time: verl's mode separate_async, docs/async.md.

The trainer is `num_warmup_batches` batches behind the rollout. A response has staleness k if the trainer has
made k versions of the weights since it began. verl bounds it: `max_off_policy_threshold` is the number of
versions from when a prompt is sent to when its responses are trained, both counted, so staleness is one less.

Invariant (tests/cann9_1/test_separate_async.py): settings under which verl would ignore the bound or a
switch, or compute something else than it says, are refused before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_rl.settings.switch import refuse


def check(config: Any, options: Mapping[str, Any]) -> None:
    """Refuse settings that do not work with this mode.

    Args:
        config: verl's whole configuration, an OmegaConf node.
        options: this project's settings of the rollout.

    Raises:
        CannotWork: which, and what to set instead.
    """
    actor, v1 = config.actor_rollout_ref.actor, config.trainer.v1
    ahead, bound = v1.separate_async.num_warmup_batches, v1.sampler.max_off_policy_threshold
    offload = actor.strategy != "megatron" and actor.fsdp_config.param_offload
    rules = [
        (bound is not None and bound < ahead + 1,
         f"trainer.v1.sampler.max_off_policy_threshold={bound}, and the rollout is "
         f"num_warmup_batches={ahead} batches ahead: use at least {ahead} + 1"),
        (ahead > 1 and v1.sampler.max_off_policy_strategy == "wait",
         f"trainer.v1.separate_async.num_warmup_batches={ahead}: max_off_policy_strategy=wait waits for "
         "unfinished responses, and finished ones would become too old: use 1, or the strategy drop"),
        (options["data_rebalance"],
         "data_rebalance=True places the samples of whole rollouts, and here prompts come as others end: "
         "use False"),
        (options["rollout_rebalance"]["enable"],
         "rollout_rebalance.enable=True moves requests at the end of a rollout, and here it has none: set "
         "ROLLOUT_REBALANCE_ENABLE=0"),
        (not options["compute_old_log_prob"],
         "compute_old_log_prob=False takes all responses for those of the trained weights: use True"),
        (offload and v1.separate_async.parameter_sync_step > 1,
         "actor.fsdp_config.param_offload=True: verl's copy of the weights for the old log-probs of later "
         "updates would be those weights themselves: use False"),
    ]  # fmt: skip
    refuse("trainer.v1.trainer_mode=separate_async", [message for applies, message in rules if applies])
