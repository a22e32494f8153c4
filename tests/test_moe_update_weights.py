"""ascend_rl.weights.moe_update_weights: expert weights return to the shapes for loading, even square ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ascend_rl.weights.moe_update_weights import to_loading_layout


def make_layer(hidden: int, intermediate: int):
    return SimpleNamespace(
        hidden_size=hidden,
        intermediate_size_per_partition=intermediate,
        w13_weight=torch.nn.Parameter(torch.rand(3, 2 * intermediate, hidden)),
        w2_weight=torch.nn.Parameter(torch.rand(3, hidden, intermediate)),
    )


@pytest.mark.parametrize("hidden,intermediate", [(8, 3), (8, 4), (8, 8)])
def test_transposed_weights_come_back(hidden, intermediate):
    layer = make_layer(hidden, intermediate)
    loaded = {name: getattr(layer, name).data for name in ("w13_weight", "w2_weight")}
    assert not to_loading_layout(layer)  # in the layout of loading nothing is touched
    assert all(getattr(layer, name).data_ptr() == tensor.data_ptr() for name, tensor in loaded.items())
    for name, tensor in loaded.items():
        setattr(layer, name, torch.nn.Parameter(tensor.transpose(1, 2).contiguous()))
    fast = layer.w2_weight.data_ptr()
    assert to_loading_layout(layer)
    assert all(torch.equal(getattr(layer, name), tensor) for name, tensor in loaded.items())
    assert not any(parameter.requires_grad for parameter in (layer.w13_weight, layer.w2_weight))
    assert layer.w2_weight.data_ptr() == fast  # a view: loading writes into the memory that is there


def test_other_modules_are_left_alone():
    layer = torch.nn.Linear(4, 4)
    assert not to_loading_layout(layer)
    attention = SimpleNamespace(hidden_size=4, w2_weight=torch.nn.Parameter(torch.rand(3, 4, 2)))
    assert not to_loading_layout(attention)
