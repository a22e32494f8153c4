"""verl's PPO trainer with DAPO's dynamic sampling (rollout/dapo.py)."""

from __future__ import annotations

from typing import Any

from ascend_rl.rollout import dapo
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class RayDAPOTrainer(RayPPOTrainer):
    """Draws and generates further batches until enough groups vary; the servers stay awake meanwhile.

    Constructed by verl's TaskRunner with algorithm.filter_groups.enable=True.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        dapo.check(config)
        super().__init__(config, *args, **kwargs)

    def _create_dataloader(self, *args: Any) -> None:
        super()._create_dataloader(*args)
        self.train_dataloader = dapo.PromptStream(self.train_dataloader, dapo.unit_of(self.config))

    def _select_groups(self, batch: DataProto, gen_batch_output: DataProto, metrics: dict):
        def draw(count: int) -> tuple[DataProto, DataProto]:  # as `fit` does
            rows = self.train_dataloader.take(count)
            prompts = DataProto.from_single_dict(rows, meta_info=dict(batch.meta_info))
            prompts.non_tensor_batch["uid"] = dapo.new_ids(len(prompts))
            gen_batch = self._get_gen_batch(prompts)
            gen_batch.meta_info["global_steps"] = self.global_steps
            gen_batch = gen_batch.repeat(self.config.actor_rollout_ref.rollout.n, interleave=True)
            return prompts, self.async_rollout_manager.generate_sequences(gen_batch)

        return dapo.select_groups(
            self.config, self.train_dataloader, batch, gen_batch_output, metrics, draw, DataProto.concat
        )
