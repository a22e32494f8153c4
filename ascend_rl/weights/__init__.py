"""Weights between layouts: checkpoints, and experts on their way from training to the rollout."""
