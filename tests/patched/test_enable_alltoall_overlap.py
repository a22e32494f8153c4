"""verl's loader of Megatron checkpoints fills all of a model that keeps its experts as weight1/weight2.

The checkpoint is the converter's. Every weight is NaN before the load; afterwards each equals what mbridge
loads from Hugging Face into a model with one weight per expert, in the same layout, transposed and joined
here.
"""

from __future__ import annotations

import math
import os

import megatron_cpu
import pytest
import torch
from megatron_tiny import make_checkpoint
from ranks import run_ranks

from ascend_rl.weights import converter

LAYOUTS = [dict(), dict(ep=2), dict(tp=2), dict(tp=2, ep=2), dict(tp=2, etp=2), dict(pp=2)]
# USE_ALLTOALL_OVERLAP, kind of experts (te: a weight each), layout
CASES = [("1", "grouped", layout) for layout in LAYOUTS]
CASES += [("1", "te", dict(ep=2)), ("0", "te", dict(ep=2)), ("0", "grouped", dict(ep=2))]


def build(experts: str, path, **layout):
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None  # destroying forgets this one
    model = megatron_cpu.build(path, experts=experts, **layout)
    for parameter in model.parameters():
        parameter.data.fill_(math.nan)
    return model


def expected(model) -> dict[str, torch.Tensor]:
    """The parameters of ``model`` (a weight an expert) under the names and in the shapes of GroupedMLP."""
    weights, experts = {}, {}
    for name, parameter in model.named_parameters():
        prefix, found, number = name.partition(".experts.linear_fc")
        if found:
            experts.setdefault(f"{prefix}.experts.weight{number[0]}", []).append(parameter.t())
        else:
            weights[name] = parameter
    for name, blocks in experts.items():
        hidden = model.config.hidden_size
        weights[name] = torch.stack(blocks).reshape((hidden, -1) if name.endswith("1") else (-1, hidden))
    return weights


def wrong(model, weights: dict[str, torch.Tensor]) -> list[str]:
    found = dict(model.named_parameters())
    assert found.keys() == weights.keys()
    return [name for name in weights if not torch.equal(found[name], weights[name])]


def load_in(rank: int, paths: dict[str, str]) -> dict:
    from torch.distributed.checkpoint.api import CheckpointException
    from transformers import AutoConfig

    from verl.models.mcore.mbridge import AutoBridge
    from verl.utils.model import load_mcore_dist_weights

    config, results = AutoConfig.from_pretrained(paths["moe"]), {}
    for switch, experts, layout in CASES:
        singles = build("te", paths["moe"], **layout)
        AutoBridge.from_config(config, dtype=torch.float32).load_weights([singles], paths["moe"])
        weights = expected(singles) if experts == "grouped" else dict(singles.named_parameters())
        model = build(experts, paths["moe"], **layout)
        os.environ["USE_ALLTOALL_OVERLAP"], error = switch, ""
        try:
            load_mcore_dist_weights([model], paths["mcore"])
        except ValueError as raised:
            error = str(raised)
        results[switch, experts, str(layout)] = error, wrong(model, weights)
    os.environ["USE_ALLTOALL_OVERLAP"] = "1"
    model = build("grouped", paths["moe"], ep=2)
    load_mcore_dist_weights([model], paths["mcore"], is_value_model=True)
    results["value model"] = [n for n, parameter in model.named_parameters() if parameter.isnan().any()]
    with pytest.raises(CheckpointException, match=r"decoder\.layers\.\S+ from model not in state dict"):
        load_mcore_dist_weights([model], paths["dense"])
    return results


def test_every_weight_is_restored_in_every_layout(tmp_path):
    for kind in ("moe", "dense"):
        make_checkpoint(kind, tmp_path / kind)
    options = converter.Options(quiet=True, layout="grouped", ep_size=2)
    converter.to_mcore(tmp_path / "moe", tmp_path / "mcore", options)
    converter.to_mcore(tmp_path / "dense", tmp_path / "mcore_dense", converter.Options(quiet=True))
    paths = {"moe": "moe", "mcore": "mcore", "dense": "mcore_dense"}
    for results in run_ranks(2, load_in, {k: str(tmp_path / v) for k, v in paths.items()}):
        assert results.pop("value model") == ["output_layer.weight"]
        error, _ = results.pop(("0", "grouped", str(dict(ep=2))))
        assert "are not loaded unless USE_ALLTOALL_OVERLAP=1" in error
        assert results == {case: ("", []) for case in results} and len(results) == len(CASES) - 1
