"""verl's trainer of mode separate_async: some dies train while the others roll out (docs/async.md).

verl sends a batch of prompts to the rollout at the beginning of each step, and `num_warmup_batches` before
the first. A step trains the oldest ones that are answered, in `parameter_sync_step` updates, and then sends
its weights over. Responses that are unfinished by then go on with the new weights (partial rollout). Here are

    what the rollout manager does around a rollout, around each step, since a rollout has no end here; servers
        that die restart before weights are sent
    checkpoints that a kill cannot spoil
    FRESH: the largest gap of responses that the newest weights of the rollout have generated; that of all is
        large by design, since the trainer has newer weights than stale ones had
    partial_rollout=False: each step but the last ends when nothing is unfinished: one version generates a
        response
    a count of the responses that ended while the trainer computed

and what would be ignored, or wrong without a word, is refused.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import transfer_queue as tq

from ascend_rl.glue.cann9_1.options import options
from ascend_rl.glue.cann9_1.servers import AsyncClient
from ascend_rl.glue.cann9_1.trainer import Managed
from ascend_rl.process.counts import count
from ascend_rl.rollout import server_restart
from ascend_rl.rollout.separate_async import check
from ascend_rl.settings.metrics import FRESH, GAP_MAX
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.utils.debug import marked_timer


class AsyncTrainer(Managed, PPOTrainerSeparateAsync):
    answered = 0  # responses that were there when the trainer began to compute

    def __init__(self, config: Any):
        check(config, options(config.actor_rollout_ref.rollout))
        super().__init__(config)

    def servers(self) -> Any:
        return self.standalone_server_manager

    def get_llm_client(self) -> Any:
        return self.servers().get_client(client_cls=AsyncClient)

    def let_servers_restart(self, manager: Any) -> None:
        if server_restart.on(manager.rollout_config):
            manager.restarts = server_restart.Restarts(manager)

    def on_step_begin(self) -> None:
        self.begin_step()
        super().on_step_begin()

    def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
        newest, tags = self.global_steps - 1, [tag for tag in batch.tags if not tag.get("is_padding")]
        batch = super()._compute_old_log_prob(batch, metrics)
        if GAP_MAX in metrics and all(tag["min_global_steps"] == newest for tag in tags):
            metrics[FRESH] = metrics[GAP_MAX]
        return batch

    def on_sample_begin(self) -> None:
        self.count_answered()
        super().on_sample_begin()

    def on_sample_end(self) -> None:
        super().on_sample_end()
        self.answered = answered()

    def on_step_end(self) -> None:
        self.count_answered()
        last = self.global_steps == self.total_training_steps  # also of a run that is stopped
        if not last and not options(self.config.actor_rollout_ref.rollout)["partial_rollout"]:
            with marked_timer("drain", self.timing_raw):
                self.drain()
        self.timing_raw |= self.agent_loop_manager.end()
        with contextlib.ExitStack() as around:
            if restarts := self.agent_loop_manager.restarts:
                restarts.restart_dead()
                around.enter_context(restarts.watching())  # one that hangs now would hold up the others
            super().on_step_end()

    def drain(self) -> None:
        """Wait until no prompt is unanswered."""
        buffer, begun = self.replay_buffer, time.time()
        while True:
            buffer._sync_metadata_from_transfer_queue()
            if not buffer.pending_keys["train"] and not buffer.running_keys["train"]:
                return
            begun = buffer._wait_for_next_poll("train", begun)

    def count_answered(self) -> None:
        if self.answered:
            count("async", answered() - self.answered)
        self.answered = 0


def answered() -> int:
    """Responses in the queue; those of a step stay until its end."""
    tags = (tq.kv_list("train") or {}).get("train", {})
    return sum(not tag.get("is_prompt") for tag in tags.values())
