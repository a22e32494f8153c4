"""Sleep level 2 of vllm-ascend gives away the memory of the weights, and more than the weights is in it.

Problem: all that is made while a model is loaded goes into the pool of its weights. Level 2 keeps none of it:
NPUWorker saves the model's buffers, and the weight sync brings the parameters. Nobody brings the rest: the
expert ids of the all-to-all dispatch (expert_ids_per_ep_rank), expert maps, rotary tables, a draft model.
Idea: once the model is loaded, find the tensors in the pool that are neither its parameters nor its buffers,
whoever holds them; save their memory before level 2 and bring it back at the wake-up.
Invariant (tests/patched/test_sleep_level_2.py): of the pool, only parameters differ after a wake-up.
Cost: one walk over Python's objects when the model is loaded, and copies of what is found.
Limits: a tensor that no Python object refers to is not seen.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Iterable

import torch
from torch._subclasses import FakeTensor

WEIGHTS = "weights"  # the pool, as vllm-ascend calls it


class Unregistered:
    """Tensors in the pool of the weights that are neither parameters nor buffers of ``model``.

    Args:
        model: as loaded.
        spans: (address, bytes, name of the pool) of what is allocated.
    """

    def __init__(self, model: torch.nn.Module, spans: Iterable[tuple[int, int, str]]):
        gc.collect()
        spans = sorted((begin, begin + size) for begin, size, pool in spans if pool == WEIGHTS)
        begins = [begin for begin, _ in spans]

        def in_pool(address: int) -> bool:
            at = bisect_right(begins, address) - 1
            return at >= 0 and address < spans[at][1]

        device = next(model.parameters()).device
        seen = {place_of(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self.tensors, self.saved = [], []
        for tensor in gc.get_objects():
            if is_real(tensor) and tensor.device == device:
                place = place_of(tensor)
                if place not in seen and in_pool(place):
                    seen.add(place)
                    self.tensors.append(whole(tensor))

    def save(self) -> None:
        """Copy them to the host."""
        self.saved = [tensor.cpu() for tensor in self.tensors]

    def restore(self, tags: list[str] | None) -> None:
        """Bring them back, if ``tags`` wake the pool and they were saved."""
        if self.saved and (tags is None or WEIGHTS in tags):
            for tensor, saved in zip(self.tensors, self.saved, strict=True):
                tensor.copy_(saved)
            self.saved = []


def is_real(value) -> bool:
    """Whether it is a tensor with memory of its own: no proxy, no sparse or fake one."""
    kind = type(value)
    return issubclass(kind, torch.Tensor) and kind is not FakeTensor and value.layout == torch.strided


def place_of(tensor: torch.Tensor) -> int:
    """Address of the memory that a tensor and its views share."""
    return tensor.untyped_storage().data_ptr()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All memory of which a tensor may be a part, as its type: views of it come back with it."""
    tensor = tensor.detach()
    return tensor.as_strided([tensor.untyped_storage().nbytes() // tensor.element_size()], [1], 0)


def unregistered(model: torch.nn.Module, allocator) -> Unregistered:
    """Of what is in the pools of vllm-ascend's CaMemAllocator."""
    return Unregistered(
        model, [(address, data.handle[1], data.tag) for address, data in allocator.pointer_to_data.items()]
    )
