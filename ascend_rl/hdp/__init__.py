"""Hybrid data parallelism: plan which sequences share a ring, and train by such plans."""
