"""A run of verl's V1 trainer goes on with another batch size: `fit`, checkpoints and dataloader are real."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_module
from training_stage import OTHER_BATCH, PROMPTS

from ascend_rl.process.save_by import SaveBy
from ascend_rl.weights import checkpoints

pytestmark = pytest.mark.long


class Killed(BaseException):
    pass


class Prompts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return PROMPTS

    def __getitem__(self, index: int) -> dict:
        return {"raw_prompt": [{"role": "user", "content": str(index)}], "index": index}


def run(root: Path, monkeypatch, batch: int, epochs: int, *options: str, die_at: int = 0, mode: str = "sync"):
    """Train: the prompts of each step, the epochs it reports, and the trainer; killed while saving a step."""
    from ascend_rl.glue.cann9_1.async_trainer import AsyncTrainer
    from ascend_rl.glue.cann9_1.trainer import Trainer
    from verl.trainer.ppo.v1 import trainer_base

    trained, epochs_said = [], []

    class Stage({"sync": Trainer, "separate_async": AsyncTrainer}[mode]):
        """As a step, it draws its prompts; beside it is nothing to train, to roll out or to log."""

        def step(self, metrics, timing_raw):
            index = self._next_train_batch()["index"]
            trained.append([int(one) for one in index])
            return SimpleNamespace(keys=[], partition_id="train")

        def on_step_begin(self):
            self.actor_rollout_wg = SimpleNamespace(save_checkpoint=self.save, load_checkpoint=None)

        def save(self, path, *_, **__):
            if self.global_steps == die_at:
                raise Killed
            Path(path).mkdir(parents=True)

        def on_train_begin(self):
            self.save_by = SaveBy(lambda step: 0.0)

        def nothing(self, *_):
            pass

        on_step_end = _start_profiling = _stop_profiling = _shutdown_dump_executor = nothing
        record_generations = nothing

        def let_servers_restart(self, manager):
            pass

        def servers(self):
            return None

    for name in ("kv_clear", "kv_list", "save_checkpoint", "load_checkpoint"):
        monkeypatch.setattr(trainer_base.tq, name, lambda *_, **__: None)
    for name in ("Tracking", "ValidationGenerationsLogger", "DapoFilteredRewardTableLogger"):
        monkeypatch.setattr(trainer_base, name, lambda **_: SimpleNamespace(log=lambda **_: None))
    monkeypatch.setattr(trainer_base, "create_rl_dataset", lambda *_, **__: Prompts())
    monkeypatch.setattr(
        trainer_base.PPOTrainer,
        "_compute_metrics",
        lambda self, batch, metrics, timing_raw, global_steps, epoch: epochs_said.append(epoch),
    )
    given = [
        f"data.train_batch_size={batch}", f"trainer.total_epochs={epochs}", "trainer.save_freq=1",
        f"trainer.default_local_dir={root}", "trainer.val_before_train=False",
        "data.dataloader_num_workers=0", "critic.enable=False", "algorithm.adv_estimator=grpo",
        "trainer.resume_mode=auto", "data.seed=5", "trainer.logger=[]", f"trainer.v1.trainer_mode={mode}",
        *options,
    ]  # fmt: skip
    if mode != "sync":
        given += [
            f"actor_rollout_ref.actor.ppo_mini_batch_size={batch}", "actor_rollout_ref.rollout.nnodes=1",
            "trainer.v1.separate_async.parameter_sync_step=1",
            "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
            "trainer.v1.sampler.max_off_policy_threshold=3",
            "trainer.v1.sampler.max_off_policy_strategy=wait",
        ]  # fmt: skip
    with initialize_config_module("verl.trainer.config", version_base=None):
        trainer = Stage(compose("ppo_trainer", given))
    trainer.tokenizer = trainer.processor = None
    trainer._init_dataloader()
    trainer.actor_rollout_wg = SimpleNamespace(load_checkpoint=lambda **_: None)
    trainer._load_checkpoint()
    manager = SimpleNamespace(take=lambda _: None, memory=None)
    try:
        trainer.fit(manager)
    except Killed:
        trained.pop()
    return trained, epochs_said, trainer


@pytest.mark.parametrize("case", OTHER_BATCH)
def test_each_prompt_of_a_pass_that_is_left_is_trained_on_once(tmp_path, monkeypatch, case):
    """And the last step is saved; the learning-rate schedule ends there."""
    (batch, epochs, steps), (other, all_epochs, more) = OTHER_BATCH[case]
    cut = tmp_path / "cut"
    before, _, _ = run(cut, monkeypatch, batch, epochs, die_at=steps + 1)
    assert len(before) == steps
    after, said, trainer = run(cut, monkeypatch, other, all_epochs)
    assert [len(prompts) for prompts in after] == [other] * more
    assert (cut / checkpoints.TRACKER).read_text() == str(steps + more)
    assert trainer.config.actor_rollout_ref.actor.optim.total_training_steps == steps + more
    assert said[-1] == all_epochs - 1
    whole, _, _ = run(tmp_path / "whole", monkeypatch, batch, all_epochs)
    order = [prompt for prompts in whole for prompt in prompts]
    left = -steps * batch % PROMPTS // other * other
    assert [prompt for prompts in after for prompt in prompts][:left] == order[steps * batch :][:left]
    assert run(cut, monkeypatch, other, all_epochs)[0] == []  # it is done


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_data_that_is_drawn_prompt_by_prompt(tmp_path, monkeypatch, mode):
    """By DAPO, and where the rollout is ahead; a number of steps that was asked for stays the last."""
    filtering = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"]
    options = filtering if mode == "sync" else []
    assert len(run(tmp_path, monkeypatch, 4, 2, *options, die_at=4, mode=mode)[0]) == 3
    after, _, _ = run(tmp_path, monkeypatch, 2, 2, *options, mode=mode)
    assert [len(prompts) for prompts in after] == [2] * (6 + 12)
    limit = "trainer.total_training_steps=23"
    more, _, trainer = run(tmp_path, monkeypatch, 2, 3, *options, limit, mode=mode)
    assert len(more) == 2 and trainer.config.actor_rollout_ref.actor.optim.total_training_steps == 23
