"""What megatron-core takes for granted of torch.cuda and NCCL, and a CPU with gloo does not have.

megatron-core asks for ``device="cuda"`` and ``torch.cuda.current_device()``; both become the CPU here, and so
does MindSpeed's ``device="npu"``.
Streams and events do nothing, because a CPU computes in program order. The generator is torch's own, memory
figures are 0. ``torch.cuda.is_available()`` stays False: verl and vLLM must still see a CPU. Numbers are
torch's; nothing here computes, except that all_to_all is made of sends and receives, which gloo does have.

torch_2_8.py and one_gloo_device.py are installed too.
"""

from __future__ import annotations

import contextlib
import functools
import logging

import one_gloo_device
import torch
import torch.distributed as dist
import torch.utils._device
import torch_2_8

CPU = torch.device("cpu")
FACTORIES = (
    "tensor",
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
)
TYPES = {
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ByteTensor": torch.uint8,
}


class Stream:
    """torch.cuda.Stream and torch.cuda.Event: everything has already happened."""

    def __init__(self, *args, **kwargs):
        pass

    def _nothing(self, *args, **kwargs):
        pass

    record = synchronize = wait = wait_event = wait_stream = _nothing

    def record_event(self, event=None):
        return event or self

    def query(self) -> bool:
        return True

    def elapsed_time(self, end) -> float:
        return 0.0


class Generators:
    """torch.cuda.default_generators: one, whatever the device."""

    def __getitem__(self, device):
        return torch.default_generator


@functools.cache
def install() -> None:
    """Put the stand-ins into torch; once per process, before megatron-core is imported."""
    _device_functions()
    torch.utils._device._device_constructors()  # remembers the originals, for `with torch.device(...)`
    _factories()
    _tensor_methods()
    # Its generator is the CPU's here, so that drawing from the one changes the other, which megatron-core
    # warns of.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    torch_2_8.install()
    one_gloo_device.install()
    dist.all_to_all = all_to_all
    dist.all_to_all_single = _lists_for_splits(dist.all_to_all_single)


def _device_functions() -> None:
    def nothing():  # a new function for each name: torch._dynamo refuses one under two names
        return lambda *args, **kwargs: None

    cuda, stream = torch.cuda, Stream()
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = lambda *args: stream
    cuda.default_stream = lambda *args: stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.device = lambda device: contextlib.nullcontext()
    cuda.current_device = lambda: CPU
    cuda.device_count = lambda: 1
    cuda.is_available = lambda: False  # torch may ask device_count() instead, once vLLM was imported
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "ipc_collect",
        "reset_peak_memory_stats",
        "_lazy_init",
    ):
        setattr(cuda, name, nothing())
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *args: 0)
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda.default_generators = Generators()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = cuda.manual_seed_all = torch.default_generator.manual_seed


def _factories() -> None:
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name, dtype in TYPES.items():
        setattr(torch.cuda, name, functools.partial(torch.tensor, dtype=dtype))


def _on_cpu(factory):
    @functools.wraps(factory)
    def call(*args, **kwargs):
        if kwargs.get("device") is not None:
            kwargs["device"] = _cpu_for_cuda(kwargs["device"])
        return factory(*args, **kwargs)

    return call


def _cpu_for_cuda(device):
    return CPU if str(device).startswith(("cuda", "npu")) else device


def _tensor_methods() -> None:
    stay = lambda self, *args, **kwargs: self  # noqa: E731
    torch.Tensor.cuda = torch.nn.Module.cuda = torch.Tensor.pin_memory = stay
    torch.Tensor.record_stream = lambda self, stream: None

    move, kind = torch.Tensor.to, torch.Tensor.type
    torch.Tensor.to = lambda self, *args, **kwargs: move(
        self, *map(_cpu_for_cuda, args), **{k: _cpu_for_cuda(v) for k, v in kwargs.items()}
    )

    def type_on_cuda(self, dtype=None, **kwargs):
        # megatron-core sorts parameters by the names "torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor",
        # ...
        return (
            kind(self, dtype, **kwargs) if dtype is not None else kind(self).replace("torch.", "torch.cuda.")
        )

    torch.Tensor.type = type_on_cuda


def _lists_for_splits(all_to_all_single):
    """gloo takes the split sizes as lists only; megatron-core gives tensors and arrays as well."""

    @functools.wraps(all_to_all_single)
    def call(output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        splits = [s.tolist() if hasattr(s, "tolist") else s for s in (output_split_sizes, input_split_sizes)]
        return all_to_all_single(output, input, *splits, group=group, async_op=async_op)

    return call


def all_to_all(output_tensor_list, input_tensor_list, group=None, async_op=False):
    """torch.distributed.all_to_all, which gloo lacks."""
    assert not async_op
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    output_tensor_list[rank].copy_(input_tensor_list[rank])
    pending = []
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        pending.append(dist.isend(input_tensor_list[to].contiguous(), group=group, group_dst=to))
        pending.append(dist.irecv(output_tensor_list[source], group=group, group_src=source))
    for work in pending:
        work.wait()
