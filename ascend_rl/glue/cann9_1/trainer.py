"""verl's V1 trainers with this project's rollout manager, and with checkpoints that survive a kill and are
there before a time limit."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import OmegaConf, open_dict

from ascend_rl.glue.cann9_1.options import options, ours
from ascend_rl.loss import old_log_prob
from ascend_rl.process.save_by import SaveBy
from ascend_rl.rollout import generations, server_restart, slow_ranks
from ascend_rl.rollout.engine_stats import step_metrics
from ascend_rl.weights import checkpoints
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.debug import marked_timer


class Checkpoints:
    """Of a trainer of verl's."""

    resumed: str | None = None  # the checkpoint that this run continues from
    passes: checkpoints.Passes | None = None  # over the data

    def _init_dataloader(self) -> None:
        """Count prompts, not steps: the batch size may change at a resume. verl's loader has no end."""
        super()._init_dataloader()
        batch = self.config.data.train_batch_size
        self.passes = checkpoints.passes(self.config, self.train_dataloader, batch)
        wanted = self.config.trainer.total_training_steps
        self.total_training_steps = self.passes.last(self.passes.steps if wanted is None else wanted)
        self.steps_per_epoch = sys.maxsize  # in `fit`; the last step is known
        if wanted is None:
            with open_dict(self.config):
                for optimizer in ("actor_rollout_ref.actor.optim", "critic.optim"):
                    if (found := OmegaConf.select(self.config, optimizer)) is not None:
                        found.total_training_steps = self.passes.steps * self.parameter_sync_step

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, **step: Any) -> None:
        step["epoch"] = self.passes.after(step["global_steps"]).epoch
        super()._compute_metrics(batch, metrics, timing_raw, **step)
        self.record_generations(batch)

    def record_generations(self, batch: Any) -> None:
        real = [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding")]

        def columns(rows: list[int], *names: str) -> list[list[torch.Tensor]]:
            keys = [batch.keys[real[row]] for row in rows]
            data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=list(names))
            return [data[name].unbind() for name in names]

        def texts(rows: list[int]) -> list[tuple[str, str]]:
            prompts, responses = columns(rows, "prompts", "responses")
            decode = self.tokenizer.decode
            return [(decode(a), decode(b)) for a, b in zip(prompts, responses, strict=True)]

        [scores] = columns(list(range(len(real))), "rm_scores")
        generations.record(
            self.global_steps,
            [batch.tags[row]["response_len"] for row in real],
            [score.sum().item() for score in scores],
            self.config.data.max_response_length,
            texts,
        )

    def save_more(self, directory: Path) -> None:
        """Save what else belongs to a checkpoint."""

    def fit(self, agent_loop_manager: Any) -> None:
        super().fit(agent_loop_manager)
        if self.config.actor_rollout_ref.actor.checkpoint.get("async_save"):
            self.actor_rollout_wg.finish_saves()

    def on_train_begin(self) -> None:
        super().on_train_begin()
        directory = self.config.trainer.default_local_dir
        self.save_by = SaveBy(functools.partial(checkpoints.written_s, directory))

    def step(self, metrics: dict, timing_raw: dict) -> Any:
        """verl saves after it, where that is due."""
        batch, every = super().step(metrics, timing_raw), self.config.trainer.save_freq
        if every > 0 and self.global_steps < self.total_training_steps:
            due = self.global_steps % every == 0
            if self.save_by.ends(self.global_steps, due) and not due:
                with marked_timer("save_checkpoint", timing_raw, color="green"):
                    self._save_checkpoint()
            if self.save_by.over:
                self.total_training_steps = self.global_steps
        return batch

    def _save_checkpoint(self) -> None:
        with self.save_by.saving():
            self._save_aside()

    def _save_aside(self) -> None:
        """verl writes in place, and its workers delete earlier checkpoints: here it writes aside, and all.

        With async_save a worker commits what was written (megatron_training.py).
        """
        trainer, callback = self.config.trainer, self.checkpoint_callback
        later = bool(self.config.actor_rollout_ref.actor.checkpoint.get("async_save"))
        root, keep = trainer.default_local_dir, trainer.get("max_actor_ckpt_to_keep")
        partial = checkpoints.begin(root, self.global_steps, self.passes)
        self.save_more(Path(partial))
        other = {"default_local_dir": partial, "max_critic_ckpt_to_keep": None}
        other["max_actor_ckpt_to_keep"] = keep if later else None
        before = {key: trainer.get(key) for key in other}
        self.checkpoint_callback = SimpleNamespace(on_save=lambda **_: None)
        try:
            trainer.update(other)
            super()._save_checkpoint()
        finally:
            trainer.update(before)
            self.checkpoint_callback = callback
        if not later:
            checkpoints.unpack(partial)
            checkpoints.commit(partial, keep)
        callback.on_save(
            trainer=self,
            global_step=self.global_steps,
            checkpoint_dir=os.path.join(root, f"global_step_{self.global_steps}"),
            async_save=later,
        )

    def _load_checkpoint(self) -> None:
        trainer = self.config.trainer
        if trainer.resume_mode == "auto":
            self.resumed = checkpoints.latest(trainer.default_local_dir)
            with open_dict(trainer):
                trainer.resume_mode = "resume_path" if self.resumed else "disable"
                trainer.resume_from_path = self.resumed
        elif trainer.resume_mode == "resume_path":
            self.resumed = trainer.resume_from_path
        if self.resumed:
            ranks = trainer.nnodes * trainer.n_gpus_per_node
            checkpoints.check_engine(self.resumed, self.config.actor_rollout_ref.actor.strategy, ranks)
        super()._load_checkpoint()


class Managed(Checkpoints):
    """With what the rollout manager remembers, and says of its servers."""

    rollout_phase: str | None = None  # what takes as long as a rollout

    def servers(self) -> Any:
        """Those that roll out."""
        return self.llm_server_manager

    def let_servers_restart(self, manager: Any) -> None:
        """Do so, if that is switched on."""
        raise NotImplementedError

    def fit(self, agent_loop_manager: Any) -> None:
        agent_loop_manager.take(self.servers())
        self.let_servers_restart(agent_loop_manager)
        if agent_loop_manager.memory and self.resumed:
            agent_loop_manager.memory.load(self.resumed)
        super().fit(agent_loop_manager)

    def begin_step(self) -> None:
        samples = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        self.agent_loop_manager.begin(samples, f"rollout {self.global_steps}")

    def on_validate_begin(self) -> None:
        super().on_validate_begin()
        samples = len(self.val_dataset) * self.config.actor_rollout_ref.rollout.val_kwargs.n
        self.agent_loop_manager.begin(samples, f"validation {self.global_steps}")

    def on_validate_end(self) -> None:
        self.agent_loop_manager.end()
        super().on_validate_end()

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        sample = buffer.sample

        def sample_and_learn(*args: Any, **kwargs: Any) -> tuple[Any, dict]:
            batch, metrics = sample(*args, **kwargs)
            self.agent_loop_manager.learn(batch)
            return batch, metrics

        buffer.sample = sample_and_learn
        return buffer

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, **step: Any) -> None:
        epochs = self.config.actor_rollout_ref.actor.ppo_epochs
        metrics.update(slow_ranks.step_times(self.global_steps, self.actor_rollout_wg, timing_raw))
        metrics.update(step_metrics(timing_raw, metrics, epochs, self.rollout_phase))
        super()._compute_metrics(batch, metrics, timing_raw, **step)

    def save_more(self, directory: Path) -> None:
        if self.agent_loop_manager.memory:
            self.agent_loop_manager.memory.save(directory)


class Trainer(Managed, PPOTrainerSync):
    rollout_phase = "gen"

    def __init__(self, config: Any):
        self.old_log_probs = options(config.actor_rollout_ref.rollout)["compute_old_log_prob"]
        if not self.old_log_probs:
            old_log_prob.check(config)
            config.algorithm.rollout_correction = None  # whose metrics the update reports
        super().__init__(config)

    def let_servers_restart(self, manager: Any) -> None:
        update = functools.partial(self.actor_rollout_wg.update_weights, mode="naive")
        server_restart.attach(manager, self.checkpoint_manager, update)

    # Around a rollout.

    def prepare_step(self) -> dict:
        self.begin_step()
        self.drawn = self.config.data.train_batch_size
        return super().prepare_step()

    def on_sample_end(self) -> None:
        self.timing_raw |= self.agent_loop_manager.end()
        super().on_sample_end()

    # Dynamic sampling.

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()
        groups = self.config.algorithm.get("filter_groups") or {}
        if groups.get("enable") and groups.get("max_num_gen_batches", 0) > 0:  # verl's buffer has no limit
            buffer.refill_fn = self._within(groups.max_num_gen_batches, buffer.refill_fn)
        return buffer

    def _within(self, batches: int, draw: Any) -> Any:
        """`draw`, which ends the run where a step takes more prompts than these whole batches."""
        most = batches * self.config.data.train_batch_size

        def draw_some(count: int) -> None:
            self.drawn += count
            if self.drawn > most:
                raise RuntimeError(
                    f"the responses of too few groups differ in {most} prompts. Change the data, lower "
                    "data.train_batch_size, or raise algorithm.filter_groups.max_num_gen_batches; the run "
                    "can be resumed from its last checkpoint"
                )
            draw(count)

        return draw_some

    # Without the pass for old log-probs.

    def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
        return super()._compute_old_log_prob(batch, metrics) if self.old_log_probs else batch

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        batch = super()._update_actor(batch, metrics)
        for name in [name for name in metrics if name.startswith(("actor/rollout_corr/", "actor/hdp/"))]:
            metrics[name.removeprefix("actor/")] = metrics.pop(name)
        return batch


def choose(config: Any) -> PPOTrainerSync:
    """The trainer of a run: verl's own, unless the run has this project's rollout manager."""
    return (Trainer if ours(config.actor_rollout_ref.rollout) else PPOTrainerSync)(config)
