"""With ALL_TO_ALL_RESHARD=1 each vLLM worker receives its own experts, bit for bit, and no others.

Training is verl's Megatron worker in gloo processes; what its rollout_mode hands to the rollout is compared
with the Hugging Face checkpoint. Then vLLM's model, as each EP rank builds it, loads such a stream through
verl's own buckets. vLLM's CPU backend does not compute with expert parallelism, so the EP rank is written
into the configuration of its FusedMoE layers; expert map and weight loaders are vLLM's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import os
from itertools import product

import pytest
import torch
from megatron_tiny import Layout, make_checkpoint
from ranks import run_ranks
from safetensors.torch import load_file
from vllm_sync import make_llm, sync

from ascend_rl.settings import stack

if stack.NAME == stack.DEFAULT:
    from megatron_tiny import make_worker
else:
    from test_megatron import make_worker

EXPERTS, LAYERS, HIDDEN, EXPERT_SIZE = 8, 4, 64, 40
EXPERT_BYTES = 3 * 4 * HIDDEN * EXPERT_SIZE
CASES = [  # training, and the rollout's (TP, DP, EP)
    (Layout("moe", pp=2), (2, 1, 2)),
    (Layout("moe", ep=2), (1, 1, 1)),
    (Layout("moe", tp=2), (1, 2, 2)),
]


class Rollout:
    """In place of verl's ServerAdapter: keeps what it is sent."""

    async def resume(self, tags):
        pass

    async def update_weights(self, weights, **kwargs):
        self.weights = {}
        for name, tensor in weights:
            assert name not in self.weights, f"{name} came twice"
            self.weights[name] = tensor.detach().clone()


def needed(rank: int, sizes: tuple[int, int, int]) -> list[int]:
    """The experts of the vLLM worker on the device of ``rank``, by vLLM's own rule."""
    place = "layer" if stack.NAME == stack.DEFAULT else "expert_map_manager"
    rule = importlib.import_module(f"vllm.model_executor.layers.fused_moe.{place}").determine_expert_map

    tp, dp, ep = sizes
    _, places, _ = rule(ep, rank % (tp * dp) if ep > 1 else 0, EXPERTS)
    return list(range(EXPERTS)) if places is None else (places >= 0).nonzero().flatten().tolist()


def own_weights(state: dict[str, torch.Tensor], experts: list[int]) -> dict[str, torch.Tensor]:
    """The weights of a worker that holds ``experts``."""
    return {
        name: tensor
        for name, tensor in state.items()
        if ".experts." not in name or int(name.split(".experts.")[1].split(".")[0]) in experts
    }


def sync_in(rank: int, path) -> list[dict]:
    """For each case what the worker sends to the rollout, the experts it owns, and what was exchanged."""
    os.environ["ALL_TO_ALL_RESHARD"] = "1"
    with pytest.raises(ValueError, match="vanilla_mbridge=True"):
        make_worker(Layout("moe"), path, "actor_rollout_ref.actor.megatron.vanilla_mbridge=False")
    results = []
    for layout, sizes in CASES:
        rollout = zip(("tensor_model", "data", "expert"), sizes, strict=True)
        worker = make_worker(
            layout, path, *(f"actor_rollout_ref.rollout.{k}_parallel_size={size}" for k, size in rollout)
        )
        worker.rollout, worker.peft_merge = Rollout(), False
        ways, modules, traffic = WAYS[stack.NAME](worker, layout)
        results.append(
            {
                "ways": ways,
                "owned": owned(modules, layout),
                "received_bytes": traffic.received_bytes,
                "experts_gathered": traffic.experts_gathered,
            }
        )
    return results


def owned(modules: list, layout: Layout) -> set[tuple[int, int]]:
    """(layer, expert) that this rank has in training."""
    from megatron.core import parallel_state
    from verl.utils.megatron_utils import unwrap_model

    block = EXPERTS // layout.ep
    first = parallel_state.get_expert_model_parallel_rank() * block
    layers = unwrap_model(modules[0]).decoder.layers
    return set(product((layer.layer_number - 1 for layer in layers), range(first, first + block)))


def ways_of_rollout_mode(worker, layout: Layout) -> tuple:
    """What the rollout is sent, with and without the switch and by all exports of verl 0.7.1."""
    from verl.models.mcore import get_mcore_weight_converter
    from verl.utils.megatron_utils import unwrap_model

    def sent(switch: str) -> dict:
        os.environ["ALL_TO_ALL_RESHARD"] = switch
        asyncio.run(worker.rollout_mode())
        return {name: tensor.numpy() for name, tensor in worker.rollout.weights.items()}

    ways = {"off": sent("0")} if layout.tp == 1 else {}  # mbridge cannot export TP without EP
    with Traffic() as traffic:
        ways["mbridge"] = sent("1")
    worker.bridge = None
    worker.weight_converter = get_mcore_weight_converter(worker.hf_config, torch.float32)
    ways["converter"] = sent("1")
    model = unwrap_model(worker.actor_module[0])
    for layer in model.decoder.layers:
        layer.mlp.experts = grouped(layer.mlp.experts)
    ways["grouped"] = sent("1")
    first = next(model.parameters())
    first.data = first.data.half()  # such as norms that are kept in float32
    experts = {name: tensor for name, tensor in sent("1").items() if ".experts." in name}
    ways["first parameter of another dtype"] = ways["grouped"] | experts
    return ways, worker.actor_module, traffic


def ways_of_update_weights(worker, layout: Layout) -> tuple:
    """What the rollout is sent by verl 0.9.1's engine worker, and by its engine without the switch."""
    worker.layered_summon, engine = False, worker.actor.engine

    def sent() -> dict:
        asyncio.run(worker.update_weights(mode="naive"))
        return {name: tensor.numpy() for name, tensor in worker.rollout.weights.items()}

    with Traffic() as traffic:
        ways = {"mbridge": sent()}
    del engine.get_per_tensor_param  # the plug-in's
    return ways | ({"off": sent()} if layout.tp == 1 else {}), engine.module, traffic


WAYS = {stack.DEFAULT: ways_of_rollout_mode, "cann9.1": ways_of_update_weights}


def grouped(experts):
    """TEGroupedMLP as GroupedMLP: weights and results are the same."""
    from megatron.core.transformer.moe.experts import GroupedMLP

    count = experts.num_local_experts
    result = GroupedMLP(count, experts.config)
    for linear, weight in (("linear_fc1", result.weight1), ("linear_fc2", result.weight2)):
        stacked = [getattr(getattr(experts, linear), f"weight{i}").detach().t() for i in range(count)]
        weight.data = torch.stack(stacked).view(weight.shape)
    tokens, share = torch.randn(2 * count, HIDDEN), torch.full((count,), 2)
    with torch.no_grad():
        outputs = [mlp(tokens, share, torch.ones(2 * count))[0] for mlp in (experts, result)]
    torch.testing.assert_close(*outputs)
    return result


class Traffic:
    """Counts bytes that all_to_all_single brings to this rank, and experts that go another way."""

    def __enter__(self):
        self.received_bytes, self.experts_gathered = 0, 0
        names = ("all_to_all_single", "all_gather", "broadcast")
        self.found = {name: getattr(torch.distributed, name) for name in names}

        def counted(output, *args, **kwargs):
            self.received_bytes += output.nbytes
            return self.found["all_to_all_single"](output, *args, **kwargs)

        def watched(name, place):
            def call(*args, **kwargs):
                shape = tuple((kwargs.get("tensor") if len(args) <= place else args[place]).shape)
                self.experts_gathered += shape in {(2 * EXPERT_SIZE, HIDDEN), (HIDDEN, EXPERT_SIZE)}
                return self.found[name](*args, **kwargs)

            return call

        torch.distributed.all_to_all_single = counted
        torch.distributed.all_gather = watched("all_gather", 1)
        torch.distributed.broadcast = watched("broadcast", 0)
        return self

    def __exit__(self, *error):
        for name, function in self.found.items():
            setattr(torch.distributed, name, function)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("moe", tmp_path_factory.mktemp("moe") / "model", LAYERS, EXPERT_SIZE)


def test_incompatible_settings_are_refused():
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    from ascend_rl.weights.moe_alltoallv import check

    with initialize_config_module("verl.trainer.config", version_base=None):
        given = ["rollout.name=vllm", "actor.megatron.vanilla_mbridge=True"]
        config = compose("ppo_megatron_trainer", [f"actor_rollout_ref.{one}" for one in given])
    config = config.actor_rollout_ref
    check(config)
    refused = {
        "actor.megatron.expert_tensor_parallel_size": (2, "expert_tensor_parallel_size=1"),
        "actor.megatron.tensor_model_parallel_size": (2, "expert_tensor_parallel_size=1"),
        "actor.megatron.vanilla_mbridge": (False, "vanilla_mbridge=True"),
        "rollout.pipeline_model_parallel_size": (2, "pipeline_model_parallel_size=1"),
        "rollout.name": ("sglang", "rollout.name=vllm"),
        "rollout.checkpoint_engine.backend": ("nccl", "backend=naive"),
        "model.lora.rank": (8, "lora.rank=0"),
    }
    for key, (value, reason) in refused.items():
        changed = OmegaConf.create(OmegaConf.to_container(config, resolve=False))
        OmegaConf.update(changed, key, value)
        with pytest.raises(ValueError, match=reason):
            check(changed)


def become(worker, ep_rank: int, ep_size: int) -> None:
    """Give the vLLM worker the model it would have with this EP rank, full of NaN."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.model_executor.model_loader.utils import initialize_model

    runner = worker.worker.model_runner
    make, context = FusedMoEParallelConfig.make, runner.vllm_config.compilation_config.static_forward_context
    context.clear()
    getattr(runner.vllm_config.compilation_config, "static_all_moe_layers", []).clear()
    FusedMoEParallelConfig.make = staticmethod(
        lambda **sizes: dataclasses.replace(make(**sizes), ep_size=ep_size, ep_rank=ep_rank, use_ep=True)
    )
    try:
        with set_current_vllm_config(runner.vllm_config):
            runner.model = initialize_model(runner.vllm_config)
    finally:
        FusedMoEParallelConfig.make = make
    for parameter in runner.model.parameters():
        parameter.data.fill_(float("nan"))


def loaded(worker) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in worker.worker.model_runner.model.named_parameters()}


def test_vllm_loads_its_experts_and_insists_on_them(path, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("ALL_TO_ALL_RESHARD", "1")
    llm = make_llm(path)
    state, sizes = load_file(path / "model.safetensors"), (2, 2, 4)
    for rank in (0, 3):
        llm.collective_rpc(become, args=(rank, sizes[2]))
        experts = needed(rank, sizes)
        sync(llm, own_weights(state, experts))
        (weights,) = llm.collective_rpc(loaded)
        assert not any(weight.isnan().any() for weight in weights.values())
        for layer in range(LAYERS):
            name = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([state[f"{name}.{expert}.{part}_proj.weight"] for expert in experts])
                for part in ("gate", "up", "down")
            )
            assert torch.equal(weights[f"{name}.w13_weight"], torch.cat([gate, up], 1))
            assert torch.equal(weights[f"{name}.w2_weight"], down)
        with pytest.raises(
            AssertionError, match="24 tensors of .* are missing .* 24 of other workers arrived"
        ):
            sync(llm, own_weights(state, needed(rank - 1, sizes)))
    short = own_weights(state, experts)
    del short[f"model.layers.2.mlp.experts.{experts[1]}.up_proj.weight"]
    with pytest.raises(AssertionError, match="1 tensors of .* are missing"):
        sync(llm, short)


def test_a_worker_is_sent_exactly_its_experts(path):
    ranks, state = run_ranks(2, sync_in, path), load_file(path / "model.safetensors")
    for rank, results in enumerate(ranks):
        for (layout, sizes), result in zip(CASES, results, strict=True):
            case = f"{layout} -> TP{sizes[0]} DP{sizes[1]} EP{sizes[2]}, rank {rank}"
            for way, weights in result["ways"].items():
                experts = range(EXPERTS) if way == "off" else needed(rank, sizes)
                expected = own_weights(state, experts)
                assert weights.keys() == expected.keys(), f"{case}, {way}"
                wrong = [n for n, w in weights.items() if not torch.equal(expected[n], torch.from_numpy(w))]
                assert not wrong, f"{case}, {way}: {wrong[:3]}"
            remote = set(product(range(LAYERS), needed(rank, sizes))) - result["owned"]
            assert result["received_bytes"] == len(remote) * EXPERT_BYTES, case
            assert result["experts_gathered"] == 0, case
