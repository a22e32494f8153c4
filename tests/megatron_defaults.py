"""verl's configuration for Megatron, composed once by ranks.py: it takes longer than to train a layout."""

from hydra import compose, initialize_config_module

with initialize_config_module("verl.trainer.config", version_base=None):
    DEFAULTS = compose("ppo_megatron_trainer", ["actor_rollout_ref.rollout.name=vllm"])
