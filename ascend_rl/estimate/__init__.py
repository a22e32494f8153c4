"""What fits in memory and how long a rollout and an update take, from the shapes of a model."""
