"""Training without the pass for old log-probs on verl's engine workers (loss/old_log_prob.py).

The trainer leaves the pass out (glue.cann9_1.trainer), so the loss finds no old log-probs in its micro-batch
and takes the trained ones without gradient. What that pass would have told of the rollout's log-probs is
reported by the update.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from ascend_rl.glue.cann9_1.hooks import Hooks

hooks = Hooks()


@hooks.after("verl.workers.utils.losses")
def take_the_trained(module: types.ModuleType) -> None:
    original = module.ppo_loss

    @functools.wraps(original)
    def ppo_loss(config: Any, model_output: dict, data: Any, dp_group: Any = None):
        if "old_log_probs" in data:
            return original(config, model_output, data, dp_group)
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_corr_metrics_from_logprobs
        from verl.utils.metric import AggregationType, Metric
        from verl.workers.utils.padding import no_padding_2_padding, response_to_nested

        trained = no_padding_2_padding(model_output["log_probs"].detach(), data)
        data = data.copy()
        data["old_log_probs"] = response_to_nested(trained, data["response_mask"])
        loss, metrics = original(config, model_output, data, dp_group)
        if "rollout_log_probs" in data:
            given = data.select("response_mask", "rollout_log_probs").to_padded_tensor()
            found = compute_rollout_corr_metrics_from_logprobs(
                trained, given["rollout_log_probs"], given["response_mask"]
            )
            for name, value in found.items():
                end = name.rpartition("_")[2].upper()
                kind = end if end in ("MIN", "MAX") else "MEAN"
                metrics[name] = Metric(value=value, aggregation=AggregationType[kind])
        return loss, metrics

    module.ppo_loss = ppo_loss
