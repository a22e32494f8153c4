"""What fits, worked out from the shapes of a model."""
