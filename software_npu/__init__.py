"""A software NPU: torch.device("npu") on a machine that has none. See README.md; site/ goes on PYTHONPATH."""
