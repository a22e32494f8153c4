"""verl's V1 trainer saves and resumes as glue.cann9_1.trainer says, and is verl's own without the manager."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from runs import MEGATRON, PATIENCE_S, nothing_left_of, stopped_and_resumed

from ascend_rl.glue.cann9_1.options import MANAGER
from ascend_rl.rollout.prompt_memory import FILE, PromptMemory
from ascend_rl.weights.checkpoints import PARTIAL, TRACKER

ASYNC = "actor_rollout_ref.actor.checkpoint.async_save=True"
STOPPED = {  # Megatron saves while it trains on: the run ends when that is done
    "fsdp": ([], {}),
    "megatron": (["train_gspo_qwen3_moe_tiny_cpu.sh", ASYNC], MEGATRON),
}


class Killed(BaseException):
    pass


def make(root: Path, step: int = 0, dies: bool = False):
    """As much of the trainer as checkpoints take; its workers write a file, and may die before it."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    from ascend_rl.glue.cann9_1.trainer import Trainer

    def save(path, *_, max_ckpt_to_keep=None):
        assert (
            max_ckpt_to_keep is None
        )  # else verl's workers delete earlier checkpoints before this one counts
        if dies:
            raise Killed
        Path(path).mkdir(parents=True)
        Path(path, "weights").write_text(str(step))

    trainer, saved = Trainer.__new__(Trainer), []
    trainer.config = OmegaConf.create(
        {
            "trainer": {
                "default_local_dir": str(root), "default_hdfs_dir": None, "resume_mode": "auto",
                "resume_from_path": None, "del_local_ckpt_after_load": False, "nnodes": 1,
                "n_gpus_per_node": 1, "max_actor_ckpt_to_keep": 1, "max_critic_ckpt_to_keep": 1,
            },
            "actor_rollout_ref": {"actor": {"checkpoint": {}, "strategy": "fsdp2"}},
        }
    )  # fmt: skip
    trainer.loaded = []
    trainer.actor_rollout_wg = SimpleNamespace(
        save_checkpoint=save, load_checkpoint=lambda local_path, **_: trainer.loaded.append(local_path)
    )
    trainer.agent_loop_manager = SimpleNamespace(memory=PromptMemory())
    trainer.agent_loop_manager.memory.lengths = {"p": [float(step)]}
    trainer.checkpoint_callback = SimpleNamespace(on_save=lambda **given: saved.append(given))
    trainer.saved = saved
    trainer.train_dataloader, trainer.use_critic = StatefulDataLoader([0]), False
    trainer.trainer_mode, trainer.global_steps = "sync", step
    trainer.on_train_begin()
    return trainer


def test_a_kill_while_saving_leaves_the_checkpoint_before(tmp_path):
    for step in (1, 2):
        trainer = make(tmp_path, step)
        trainer._save_checkpoint()
        (told,) = trainer.saved
        assert told["checkpoint_dir"] == str(tmp_path / f"global_step_{step}")
    assert trainer.config.trainer.max_actor_ckpt_to_keep == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2", TRACKER]
    last = tmp_path / "global_step_2"
    assert sorted(path.name for path in last.iterdir()) == ["actor", "data.pt", FILE]
    with pytest.raises(Killed):
        make(tmp_path, 3, dies=True)._save_checkpoint()
    assert (tmp_path / f"global_step_3{PARTIAL}").exists()

    resumed = make(tmp_path)
    resumed._load_checkpoint()
    assert (resumed.global_steps, resumed.resumed) == (2, str(last))
    assert resumed.loaded == [str(last / "actor")]
    assert not (tmp_path / f"global_step_3{PARTIAL}").exists()


@pytest.mark.weekly
@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize("trainer", STOPPED)
def test_a_run_that_is_stopped_saves_its_step_and_continues(tmp_path, trainer):
    given, variables = STOPPED[trainer]
    with nothing_left_of(tmp_path):
        stopped_and_resumed(tmp_path, *given, **variables)


def test_without_a_checkpoint_a_run_starts_at_the_first_step(tmp_path):
    trainer = make(tmp_path)
    trainer._load_checkpoint()
    assert (trainer.global_steps, trainer.resumed, trainer.loaded) == (0, None, [])


def test_only_a_run_with_the_manager_has_the_trainer(monkeypatch):
    from ascend_rl.glue.cann9_1 import trainer
    from verl.trainer.ppo.v1 import get_trainer_cls

    made = []
    for name in ("Trainer", "PPOTrainerSync"):
        monkeypatch.setattr(trainer, name, lambda config, name=name: made.append(name))
    for given in (MANAGER, None):
        config = {"actor_rollout_ref": {"rollout": {"agent": {"agent_loop_manager_class": given}}}}
        get_trainer_cls("sync")(OmegaConf.create(config))
    assert made == ["Trainer", "PPOTrainerSync"]


def test_responses_of_training_and_validation_are_learned(monkeypatch):
    from ascend_rl.glue.cann9_1 import trainer

    sampled = SimpleNamespace(sample=lambda partition_id, **_: (partition_id, {"metric": 1}))
    monkeypatch.setattr(trainer.PPOTrainerSync, "_build_replay_buffer", lambda self: sampled)
    made, learned = trainer.Trainer.__new__(trainer.Trainer), []
    made.agent_loop_manager = SimpleNamespace(learn=learned.append)
    made.config = OmegaConf.create({"algorithm": {}})
    buffer = made._build_replay_buffer()
    assert buffer.sample(partition_id="train", batch_size=1) == ("train", {"metric": 1})
    buffer.sample(partition_id="val", batch_size=1)
    assert learned == ["train", "val"]


def test_dynamic_sampling_ends_where_too_few_groups_differ(monkeypatch):
    from ascend_rl.glue.cann9_1 import trainer

    drawn = []
    verls = SimpleNamespace(sample=None, refill_fn=drawn.append)
    monkeypatch.setattr(trainer.PPOTrainerSync, "_build_replay_buffer", lambda self: verls)
    monkeypatch.setattr(trainer.PPOTrainerSync, "prepare_step", lambda self: {})
    made = trainer.Trainer.__new__(trainer.Trainer)
    made.global_steps, made.agent_loop_manager = 1, SimpleNamespace(begin=lambda *_: None)
    groups = {"enable": True, "max_num_gen_batches": 3}
    made.config = OmegaConf.create({
        "algorithm": {"filter_groups": groups}, "data": {"train_batch_size": 4},
        "actor_rollout_ref": {"rollout": {"n": 2}},
    })  # fmt: skip
    buffer = made._build_replay_buffer()
    for _ in range(2):
        made.prepare_step()
        buffer.refill_fn(5)
        buffer.refill_fn(3)  # 12 prompts: three batches
    with pytest.raises(RuntimeError, match="too few groups differ in 12 prompts"):
        buffer.refill_fn(1)
    assert drawn == [5, 3, 5, 3]


def test_without_old_log_probs_the_update_is_the_same():
    """Loss and gradient, with old log-probs and without; and the gap to the rollout is reported."""
    import torch
    from tensordict import TensorDict

    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import response_from_nested

    torch.manual_seed(0)
    lengths = [(3, 4), (2, 6)]

    def nested(rows):
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    trained = nested([-torch.rand(sum(pair)) for pair in lengths]).requires_grad_()
    mask = nested([torch.ones(response) for _, response in lengths])
    old = response_from_nested(trained.detach(), mask)
    columns = {
        "prompts": nested([torch.zeros(prompt, dtype=torch.int64) for prompt, _ in lengths]),
        "responses": nested([torch.zeros(response, dtype=torch.int64) for _, response in lengths]),
        "response_mask": mask,
        "advantages": nested([torch.full((response,), k - 0.4) for k, (_, response) in enumerate(lengths)]),
        "rollout_log_probs": nested([row + 0.1 for row in old.unbind()]),
    }
    found = []
    for given in ({"old_log_probs": old}, {}):
        data = TensorDict(columns | given, batch_size=2)
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=10, global_batch_size=2)
        config = FSDPActorConfig(
            strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=2, ppo_micro_batch_size_per_gpu=2
        )
        loss, metrics = ppo_loss(config, {"log_probs": trained}, data)
        (gradient,) = torch.autograd.grad(loss, trained)
        found.append((loss.item(), gradient.values().tolist()))
    assert found[0] == found[1] and any(found[0][1])
    assert "old_log_probs" not in data
    assert metrics["rollout_corr/log_ppl_abs_diff"].aggregate() == pytest.approx(0.1)


@pytest.mark.parametrize("mini_batch", [8, 4])
def test_the_trainer_leaves_the_pass_out_or_refuses(monkeypatch, mini_batch):
    from hydra import compose, initialize_config_module

    from ascend_rl.glue.cann9_1.trainer import Trainer

    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            [
                "+actor_rollout_ref.rollout.custom.compute_old_log_prob=False", "data.train_batch_size=8",
                f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch}", "critic.enable=False",
                "algorithm.adv_estimator=grpo",
            ],
        )  # fmt: skip
    if mini_batch == 4:
        with pytest.raises(ValueError, match="4 of data.train_batch_size=8; use one mini-batch a step"):
            Trainer(config)
        return
    assert Trainer(config)._compute_old_log_prob("batch", {}) == "batch"
    assert config.algorithm.rollout_correction is None
