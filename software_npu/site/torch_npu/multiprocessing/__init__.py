"""Tensors that go to other processes: see reductions.py."""
