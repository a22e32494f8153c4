"""What would fail later, said before the start: nodes and configurations."""
