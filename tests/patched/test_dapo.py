"""verl's own training loop with dynamic sampling; servers and actor are stubs that record what they get."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

N, WIDTH, PROMPTS = 4, 6, 24
OVERRIDES = f"""
algorithm.adv_estimator=grpo trainer.device=cpu trainer.balance_batch=False trainer.logger=[file] data.seed=5
data.train_batch_size=4 data.dataloader_num_workers=0 actor_rollout_ref.rollout.n={N}
actor_rollout_ref.rollout.agent.num_workers=1 actor_rollout_ref.rollout.name=vllm
trainer.val_before_train=True trainer.test_freq=2 trainer.total_training_steps=5
actor_rollout_ref.actor.optim.lr=1e-3
""".split()
FILTER = ["algorithm.filter_groups.enable=True"]


def rewards(prompt: int, call: int) -> list[float]:
    """A third of the prompts is hopeless, a third solved, the rest varies, differently in each call."""
    return [[0.0] * N, [1.0] * N, [float((call + sample) % N == 0) for sample in range(N)]][prompt % 3]


class Prompts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return PROMPTS

    def __getitem__(self, i: int) -> dict:
        return {
            "dummy": torch.zeros(1),
            "index": i,
            "data_source": "t",
            "reward_model": {"ground_truth": str(i)},
            "raw_prompt": [{"role": "user", "content": str(i)}],
            "extra_info": {},
        }


class Tokenizer:
    eos_token_id, pad_token_id = 1, 0

    def decode(self, ids, **kwargs) -> str:
        return str(ids.tolist())

    batch_decode = decode


class Stage:
    """All that `fit` talks to, with a list of what was asked of it."""

    rollout_replicas = ()

    def __init__(self):
        self.events: list[tuple] = []
        self.calls = 0

    def generate_sequences(self, batch):
        from tensordict import TensorDict

        from verl import DataProto

        indices = batch.non_tensor_batch["index"].astype(int)
        validate = batch.meta_info.get("validate", False)
        self.events.append(("validate" if validate else "generate", indices.tolist()))
        rows = np.arange(len(indices))
        if validate:
            scores = torch.ones(len(indices))
        else:
            assert (indices.reshape(-1, N) == indices.reshape(-1, N)[:, :1]).all()
            scores = torch.tensor(
                [rewards(int(p), self.calls)[row % N] for row, p in zip(rows, indices, strict=True)]
            )
            self.calls += 1
        ones = torch.ones(len(rows), WIDTH, dtype=torch.long)
        prompts = torch.tensor(indices)[:, None].expand(-1, 2).clone()
        rm_scores = torch.zeros(len(rows), WIDTH)
        rm_scores[:, -1] = scores
        attention = torch.cat([ones[:, :2], ones], dim=1)
        tensors = {
            "prompts": prompts,
            "responses": ones * (7 * prompts[:, :1] + torch.tensor(rows % N)[:, None]),
            "response_mask": ones,
            "input_ids": attention,
            "attention_mask": attention,
            "position_ids": attention,
            "rm_scores": rm_scores,
        }
        info = {
            "timing": {
                f"agent_loop/slowest/{key}": float(self.calls) for key in ("generate_sequences", "tool_calls")
            },
            "reward_extra_keys": ["acc"],
        }
        extra = {"acc": scores.numpy(), "multi_modal_inputs": np.array([{} for _ in rows], dtype=object)}
        return DataProto(
            batch=TensorDict(tensors, batch_size=len(rows)), non_tensor_batch=extra, meta_info=info
        )

    def sleep_replicas(self):
        self.events.append(("sleep",))

    def update_weights(self, step):
        self.events.append(("weights", step))

    def compute_log_prob(self, batch):
        from verl import DataProto

        zeros = torch.zeros(len(batch), WIDTH)
        return DataProto.from_dict({"old_log_probs": zeros, "entropys": zeros.clone()})

    def update_actor(self, batch):
        from verl import DataProto

        prompts = batch.batch["prompts"][:, 0].tolist()
        truths = [int(truth["ground_truth"]) for truth in batch.non_tensor_batch["reward_model"]]
        assert truths == prompts  # each response with its own prompt
        assert len(set(batch.non_tensor_batch["uid"])) == len(prompts) // N
        assert batch.batch["responses"][:, 0].tolist() == [7 * p + i % N for i, p in enumerate(prompts)]
        self.events.append(("train", prompts[::N], batch.batch["advantages"][:, 0].abs().min().item()))
        return DataProto(meta_info={"metrics": {}})

    def save_checkpoint(self, path, *args, **kwargs):
        Path(path).mkdir(parents=True)

    def load_checkpoint(self, path, **kwargs):
        assert Path(path).is_dir()


def train(folder: Path, *overrides: str, monkeypatch) -> tuple[list[tuple], list[dict]]:
    """A whole `fit`: what happened, and what was logged."""
    import hydra

    from verl.experimental.reward_loop import migrate_legacy_reward_impl
    from verl.trainer.main_ppo import create_rl_sampler
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.utils import Role
    from verl.utils.dataset.rl_dataset import collate_fn

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        given = [*OVERRIDES, f"trainer.default_local_dir={folder}/checkpoints", *overrides]
        config = migrate_legacy_reward_impl(hydra.compose("ppo_trainer", overrides=given))
    OmegaConf.resolve(config)
    if OmegaConf.select(config, "algorithm.filter_groups.enable"):
        from verl.trainer.ppo.dapo_trainer import RayDAPOTrainer as RayPPOTrainer  # noqa: N814
    stage = Stage()
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(folder / "metrics.jsonl"))
    data = Prompts()
    trainer = RayPPOTrainer(
        config,
        Tokenizer(),
        {Role.ActorRollout: object},
        type("Pool", (), {"get_n_gpus": lambda self: 1})(),
        train_dataset=data,
        val_dataset=data,
        collate_fn=collate_fn,
        train_sampler=create_rl_sampler(config.data, data),
    )
    trainer.actor_rollout_wg = trainer.async_rollout_manager = trainer.checkpoint_manager = stage
    trainer.fit()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return stage.events, [json.loads(line)["data"] for line in lines]


def brute_force(drawn: list[list[int]], want: int) -> list[tuple[list[int], int]]:
    """For each step the prompts to train on and the batches it takes, from those of all batches drawn."""
    steps, batches, call = [], iter(drawn), 0
    while True:
        kept, used = [], 0
        while len(kept) < want:
            if (batch := next(batches, None)) is None:
                return steps
            kept += [p for p in batch if len(set(rewards(p, call))) > 1]
            used, call = used + 1, call + 1
        steps.append((kept[:want], used))


def picked(events: list[tuple], name: str) -> list[list[int]]:
    return [event[1] for event in events if event[0] == name]


def drawn(events: list[tuple]) -> list[list[int]]:
    return [indices[::N] for indices in picked(events, "generate")]


def test_trained_groups_vary_and_fill_the_batch(tmp_path, monkeypatch):
    events, rows = train(tmp_path, *FILTER, monkeypatch=monkeypatch)
    expected = brute_force(drawn(events), want=4)
    assert picked(events, "train") == [kept for kept, _ in expected] and len(expected) == 5
    assert all(event[2] > 0 for event in events if event[0] == "train")  # no advantage is zero
    assert {used for _, used in expected} - {1}, "no step needed a second batch"
    batches = drawn(events)
    for start in range(0, len(batches) - 5, 6):  # each prompt once in a pass
        assert sorted(sum(batches[start : start + 6], [])) == list(range(PROMPTS))

    # The servers keep weights and caches between the batches of a step: asleep and synced once a step.
    steps = "".join(
        {"generate": "g", "sleep": "s", "train": "t", "weights": "w"}.get(event[0], "") for event in events
    )
    assert steps == "w" + "".join("g" * used + "stw" for _, used in expected)

    logged = [row for row in rows if "critic/score/mean" in row]
    assert [row["dapo/num_gen_batches"] for row in logged] == [used for _, used in expected]
    assert all(row["dapo/kept_share"] < 1 and row["critic/score/mean"] == 1 / N for row in logged)
    assert all(row["dapo/reward_before_filter/mean"] != 1 / N for row in logged)
    assert logged[-1]["dapo/data_passes"] == (len(batches) - 1) // 6 >= 1
    # The slowest generation batch of a step is its last; timings of a step come from all its batches.
    assert [row["timing_s/agent_loop/slowest/tool_calls"] for row in logged] == np.cumsum(
        [used for _, used in expected]
    ).tolist()


def test_validation_sees_all_prompts_as_before(tmp_path, monkeypatch):
    off, _ = train(tmp_path / "off", monkeypatch=monkeypatch)
    on, rows = train(tmp_path / "on", *FILTER, monkeypatch=monkeypatch)
    assert sorted(picked(on, "validate")[0]) == list(range(PROMPTS))
    assert [sorted(v) for v in picked(on, "validate")] == [sorted(v) for v in picked(off, "validate")]
    assert len(picked(on, "validate")) == 4  # before, at steps 2 and 4, and at the last
    assert sum(any(key.startswith("val-core") for key in row) for row in rows) == 4


def test_switched_off_every_batch_is_trained(tmp_path, monkeypatch):
    events, rows = train(tmp_path, monkeypatch=monkeypatch)
    assert picked(events, "train") == drawn(events) and len(drawn(events)) == 5
    assert not any(key.startswith("dapo/") for row in rows for key in row)


@pytest.mark.parametrize("overrides", [[], ["data.shuffle=False", "+data.gen_batch_size=8"]])
def test_a_resumed_run_trains_what_the_whole_run_trained(tmp_path, monkeypatch, overrides):
    """Beyond the configured epochs too: steps count, and the data goes round."""
    options = [*FILTER, *overrides, "trainer.total_epochs=1", "trainer.test_freq=-1"]
    whole, _ = train(tmp_path / "whole", *options, "trainer.total_training_steps=9", monkeypatch=monkeypatch)
    for stop in (1, 7):
        folder = tmp_path / f"cut{stop}"
        first, _ = train(
            folder,
            *options,
            f"trainer.total_training_steps={stop}",
            f"trainer.save_freq={stop}",
            monkeypatch=monkeypatch,
        )
        second, _ = train(folder, *options, "trainer.total_training_steps=9", monkeypatch=monkeypatch)
        assert drawn(first) + drawn(second) == drawn(whole)
        assert len(picked(first, "train")) == stop and len(picked(second, "train")) == 9 - stop


def test_too_few_varying_groups_end_the_run_with_advice(tmp_path, monkeypatch):
    from ascend_rl.loss.dapo import DynamicSamplingError

    with pytest.raises(DynamicSamplingError, match="after 1 generation batches . of 4 groups vary"):
        train(tmp_path, *FILTER, "algorithm.filter_groups.max_num_gen_batches=1", monkeypatch=monkeypatch)
    with pytest.raises(KeyError, match="metric=nonesuch is not reported by the reward function"):
        train(tmp_path, *FILTER, "algorithm.filter_groups.metric=nonesuch", monkeypatch=monkeypatch)
    with pytest.raises(ValueError, match="rollout.n: a group of one"):
        train(tmp_path, *FILTER, "actor_rollout_ref.rollout.n=1", monkeypatch=monkeypatch)


@pytest.mark.parametrize("config", ["ppo_trainer", "ppo_megatron_trainer"])
def test_main_dapo_is_main_ppo_with_its_configurations(config, monkeypatch, capsys):
    arguments = [f"--config-name={config}", "--cfg", "job", "algorithm.filter_groups.enable=True"]
    monkeypatch.setattr(sys, "argv", ["main_dapo", *arguments])
    runpy.run_module("verl.trainer.main_dapo", run_name="__main__")
    assert OmegaConf.create(capsys.readouterr().out).algorithm.filter_groups == {
        "_target_": "verl.trainer.config.FilterGroupsConfig", "enable": True, "metric": "acc",
        "max_num_gen_batches": 10,
    }  # fmt: skip
