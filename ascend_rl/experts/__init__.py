"""MoE layers of the rollout: where copies of experts live, and how much memory a prefill needs."""
