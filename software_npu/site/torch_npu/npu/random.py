"""Random numbers: each device has a generator of its own, apart from the CPU's."""

from __future__ import annotations

import torch

from software_npu import _C

from .utils import device_index

__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]


def _generator(device) -> torch.Generator:
    return _C.default_generator(device_index(device))


def get_rng_state(device="npu") -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device="npu") -> None:
    _generator(device).set_state(new_state.cpu())


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(_C.device_count())]


def set_rng_state_all(new_states) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(_C.device_count()):
        _generator(index).manual_seed(int(seed))


def seed() -> None:
    _generator(None).seed()


def seed_all() -> None:
    manual_seed_all(_generator(None).seed())


def initial_seed() -> int:
    return _generator(None).initial_seed()
