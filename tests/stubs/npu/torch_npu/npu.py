"""torch.npu: the namespace of torch.cuda, once that is the CPU's (``mirror_cuda``)."""

from __future__ import annotations

import types

import torch

allocator_settings: list[str] = []  # every setting of the caching allocator, in order
memory = types.SimpleNamespace(_set_allocator_settings=allocator_settings.append)


def is_available() -> bool:
    return True


def mirror_cuda() -> None:
    for name, value in vars(torch.cuda).items():
        if not name.startswith("__"):
            globals()[name] = value
