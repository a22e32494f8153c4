"""The alltoall-overlap layout against brute force: GroupedMLP's product, every EP and ETP, and the errors."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from ascend_rl.weights import alltoall_overlap

PREFIX = "decoder.layers.7.mlp.experts"


class Group:
    """A process group whose ranks are threads; ``member(rank)`` is the group as that rank sees it."""

    def __init__(self, size: int):
        self.tensors, self.barrier = [torch.empty(0)] * size, threading.Barrier(size, timeout=20)

    def member(self, rank: int) -> SimpleNamespace:
        def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
            self.tensors[rank] = tensor
            self.barrier.wait()
            tensors = list(self.tensors)
            self.barrier.wait()
            assert tensor.is_contiguous() and all(t.shape == tensor.shape for t in tensors)
            return tensors

        return SimpleNamespace(size=lambda: len(self.tensors), gathered=gathered)


@pytest.fixture(autouse=True, scope="module")
def threads_are_ranks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alltoall_overlap, "_gathered", lambda tensor, group: group.gathered(tensor))
        yield


class Converter:
    """Names experts as verl's converter of Qwen3-MoE does."""

    def __init__(self, **config):
        self.mcore_config = SimpleNamespace(**config)

    def convert_param(self, name: str, parts: list[torch.Tensor]):
        prefix, expert = name.split(".weight")
        assert prefix in (f"{PREFIX}.linear_fc1", f"{PREFIX}.linear_fc2")
        units = ("gate", "up") if prefix.endswith("1") else ("down",)
        return [f"model.layers.7.mlp.experts.{expert}.{unit}_proj.weight" for unit in units], parts


def held(experts: dict[str, torch.Tensor], rank: int, ep: int, shard: int, etp: int) -> list[torch.Tensor]:
    """weight1 and weight2 of a rank, from Hugging Face's tensors, expert by expert and value by value."""
    count, (size, hidden) = len(experts) // 3, experts["0.gate"].shape
    local, part = count // ep, size // etp
    rows = range(shard * part, shard * part + part)
    one, two = [], []
    for expert in range(rank * local, rank * local + local):
        gate, up, down = (experts[f"{expert}.{unit}"].tolist() for unit in ("gate", "up", "down"))
        one += [[gate[r][h] for r in rows] + [up[r][h] for r in rows] for h in range(hidden)]
        two += [[down[h][r] for h in range(hidden)] for r in rows]
    return [torch.tensor(one).view(hidden, local * 2 * part), torch.tensor(two).view(local * part, hidden)]


@settings(max_examples=40)
@given(*[st.integers(1, 3)] * 4, st.integers(1, 4), st.integers(0, 99))
def test_every_rank_exports_all_experts(ep, etp, local, part, hidden, seed):
    generator = torch.Generator().manual_seed(seed)
    size, count = part * etp, local * ep
    experts = {
        f"{expert}.{unit}": torch.randn(shape, generator=generator)
        for expert in range(count)
        for unit, shape in (("gate", (size, hidden)), ("up", (size, hidden)), ("down", (hidden, size)))
    }
    converter = Converter(num_moe_experts=count, hidden_size=hidden, moe_ffn_hidden_size=size)
    ep_groups, etp_groups = [Group(ep) for _ in range(etp)], [Group(etp) for _ in range(ep)]
    exported: dict[tuple[int, int], list] = {}

    def export(rank: int, shard: int) -> None:
        groups = ep_groups[shard].member(rank), etp_groups[rank].member(shard)
        exported[rank, shard] = [
            item
            for number, weight in enumerate(held(experts, rank, ep, shard, etp), 1)
            for item in alltoall_overlap.hf_experts(f"{PREFIX}.weight{number}", weight, converter, *groups)
        ]

    threads = [threading.Thread(target=export, args=(r, s)) for r in range(ep) for s in range(etp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(exported) == ep * etp
    for items in exported.values():
        assert len(items) == len(dict(items)) == len(experts)
        for name, tensor in items:
            unit = name.removeprefix("model.layers.7.mlp.experts.").removesuffix("_proj.weight")
            assert tensor.is_contiguous() and torch.equal(tensor, experts[unit]), name


@pytest.mark.parametrize("number", [1, 2])
def test_split_experts_multiply_as_grouped_matmul_does(number):
    """GroupedMLP computes tokens @ weight.view(experts, in, out), Hugging Face tokens @ weight.T."""
    hidden, size, experts = 6, 5, 3
    shape = (hidden, experts * 2 * size) if number == 1 else (experts * size, hidden)
    weight, tokens = torch.randn(shape), torch.randn(4, hidden if number == 1 else size)
    blocks = weight.view(experts, tokens.shape[1], -1)
    got = list(alltoall_overlap.split_experts(f"x.weight{number}", weight, experts, hidden))
    assert len(got) == experts
    for block, matrix in zip(blocks, got, strict=True):
        torch.testing.assert_close(tokens @ block, tokens @ matrix.T)


def test_experts_spread_over_tp_are_refused():
    converter = Converter(num_moe_experts=8, hidden_size=4, moe_ffn_hidden_size=6)
    exporting = alltoall_overlap.hf_experts(
        f"{PREFIX}.weight1", torch.zeros(4, 2 * 12), converter, Group(2).member(0), Group(1).member(0)
    )
    with pytest.raises(ValueError, match=r"\[4, 24\].*leave 4 experts with 192 values.*moe_tp_extend_ep"):
        next(exporting)


@pytest.fixture
def model() -> torch.nn.ModuleDict:
    """A router and two layers of grouped experts, zeros, with Megatron's names."""
    layers = {}
    for number in "01":
        experts = torch.nn.ParameterDict({f"weight{n}": torch.zeros(2, 3) for n in (1, 2)})
        layers[number] = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": experts})})
    return torch.nn.ModuleDict({"router": torch.nn.Linear(2, 2), "layers": torch.nn.ModuleDict(layers)})


def test_grouped_weights_are_found_and_restored(model, monkeypatch):
    monkeypatch.setenv("USE_ALLTOALL_OVERLAP", "1")
    weights = alltoall_overlap.grouped_weights(model)
    assert sorted(weights) == [f"layers.{i}.mlp.experts.weight{n}" for i in (0, 1) for n in (1, 2)]
    loaded = {f"actor.{name}": torch.randn(2, 3) for name in weights}
    alltoall_overlap.restore(weights, loaded | {"actor.router.weight": torch.randn(2, 2)}, "actor.")
    assert all(torch.equal(parameter, loaded[f"actor.{name}"]) for name, parameter in weights.items())


def test_without_the_switch_a_grouped_model_is_refused(model, monkeypatch):
    monkeypatch.delenv("USE_ALLTOALL_OVERLAP", raising=False)
    with pytest.raises(ValueError, match=r"4 tensors, such as layers.0.mlp.experts.weight1.*OVERLAP=1"):
        alltoall_overlap.grouped_weights(model)
    assert alltoall_overlap.grouped_weights(model["router"]) == {}


def gather_in(rank: int) -> list[list[float]]:
    group = torch.distributed.group.WORLD
    return [tensor.tolist() for tensor in alltoall_overlap._gathered(torch.full((2,), float(rank)), group)]


def test_ranks_gather_in_their_order():
    """Above, ranks are threads; here they are processes, and nothing is replaced."""
    assert run_ranks(2, gather_in) == [[[0.0, 0.0], [1.0, 1.0]]] * 2


def test_mbridge_is_refused_under_the_switch_only(monkeypatch):
    monkeypatch.setenv("USE_ALLTOALL_OVERLAP", "1")
    alltoall_overlap.refuse_mbridge(False)
    with pytest.raises(ValueError, match="USE_ALLTOALL_OVERLAP=1 .*\n.*set megatron.use_mbridge=False"):
        alltoall_overlap.refuse_mbridge(True)
    monkeypatch.setenv("USE_ALLTOALL_OVERLAP", "0")
    alltoall_overlap.refuse_mbridge(True)
