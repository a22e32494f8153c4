"""verl's own training loop; servers and actor are stubs that record what they get."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
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
# (batch, epochs, steps of that) before and after; 24 prompts a pass. The last one does not divide a pass.
OTHER_BATCH = {
    "larger": ((4, 1, 2), (8, 1, 2)),
    "smaller": ((8, 1, 2), (4, 1, 2)),
    "in the second pass": ((4, 2, 8), (8, 2, 2)),
    "at the end of a pass": ((4, 2, 6), (8, 2, 3)),
    "further passes": ((8, 1, 2), (4, 3, 2 + 6 + 6)),
    "a rest of a pass": ((4, 2, 4), (7, 2, 1 + 3)),
}
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
        from ascend_rl.glue.dapo_trainer import RayDAPOTrainer as RayPPOTrainer  # noqa: N814
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
