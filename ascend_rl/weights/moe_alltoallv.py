"""verl's weight sync with the experts resharded (reshard.py) instead of gathered.

In verl 0.7.1 training rank r streams (name, tensor) pairs to the vLLM worker on its own device, through a
socket and a buffer the two share. So the stream of rank r must hold what that worker holds: everything that
is not an expert, as before, and the experts of the worker's EP rank. vLLM maps an expert's global number to
its place, or silently drops it if it belongs to another rank; an expert that does not arrive silently keeps
its old weights. So the receiving end counts.

Invariants (tests/patched/test_moe_alltoallv.py): the other weights are those of verl's own export, by mbridge
or by its converter; a worker accepts exactly the experts it holds, and raises otherwise; what is unsupported
is refused before the model is built. Off unless ALL_TO_ALL_RESHARD=1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import torch

from ascend_rl.settings.switch import refuse, switched_on
from ascend_rl.weights.reshard import PARTS, Rollout, Slice, Train, make_plan, reshard

EXPERTS = ".mlp.experts."
EXPERT_NAME = re.compile(rf"(.+{re.escape(EXPERTS[:-1])})\.(\d+)\.({'|'.join(PARTS)})\.weight")


def enabled() -> bool:
    return switched_on("ALL_TO_ALL_RESHARD")


def check(config) -> None:
    """Refuse what the reshard cannot do.

    Args:
        config: verl's actor_rollout_ref.

    Raises:
        CannotWork: with all reasons.
    """
    megatron, rollout = config.actor.megatron, config.rollout
    etp = megatron.expert_tensor_parallel_size or megatron.tensor_model_parallel_size  # as megatron-core does
    problems = [
        (etp != 1, f"ETP {etp} cuts experts: set actor.megatron.expert_tensor_parallel_size=1"),
        (
            megatron.use_mbridge and not megatron.get("vanilla_mbridge", True),
            "Megatron-Bridge exports experts itself: set actor.megatron.vanilla_mbridge=True",
        ),
        (
            config.model.get("lora", {}).get("rank", 0) > 0,
            "LoRA has a weight sync of its own: set model.lora.rank=0",
        ),
        (rollout.name != "vllm", f"{rollout.name} places experts in its own way: set rollout.name=vllm"),
        (
            rollout.pipeline_model_parallel_size != 1,
            "a rollout worker must hold all layers: set rollout.pipeline_model_parallel_size=1",
        ),
        (
            rollout.checkpoint_engine.backend != "naive",
            "the rollout must share the devices of training: set rollout.checkpoint_engine.backend=naive",
        ),
    ]
    refuse("ALL_TO_ALL_RESHARD=1", [reason for holds, reason in problems if holds])


def weights(worker, per_tensor_generator, parallel_state) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream for the vLLM worker on this rank's device, in place of the one verl makes in rollout_mode.

    A tensor is valid until the next one is asked for. All ranks must take the stream to its end.

    Args:
        worker: verl's Megatron ActorRolloutRefWorker, parameters on the device.
        per_tensor_generator: verl.utils.megatron_utils.per_tensor_generator, the export without mbridge.
        parallel_state: megatron.core.parallel_state.

    Raises:
        ValueError: not a Qwen3-MoE, or ``make_plan`` refuses the layouts.
        RuntimeError: megatron-core has placed the ranks in another order than planned.
    """

    def convert(models: list) -> Iterator[tuple[str, torch.Tensor]]:
        return per_tensor_generator(
            models, worker.actor_model_config, worker.weight_converter, worker.tf_config,
            worker.layer_name_mapping,
        )  # fmt: skip

    export = convert if worker.bridge is None else worker.bridge.export_weights
    models, rollout = worker.actor.actor_module, worker.config.rollout
    return stream(models, export, worker.hf_config, rollout, parallel_state)


def stream(
    models: list[torch.nn.Module], export: Callable, hf_config, rollout, parallel_state
) -> Iterator[tuple[str, torch.Tensor]]:
    """What ``export`` yields of the models, but of experts only those of the worker on this rank's device.

    Args:
        models: the model chunks of this rank.
        export: called with models, yields (name, tensor) of all their parameters.
        hf_config, rollout, parallel_state: see ``expert_weights``.
    """
    others = [WithoutExperts(model) for model in models]
    yield from export(others)
    yield from expert_weights([model.model for model in others], hf_config, rollout, parallel_state)


def expert_weights(
    models: list[torch.nn.Module], hf_config, rollout, parallel_state
) -> Iterator[tuple[str, torch.Tensor]]:
    """The experts of the rollout worker on this rank's device; see ``weights``.

    Args:
        models: the model chunks of this rank, unwrapped.
        hf_config: Hugging Face's config of the model.
        rollout: verl's rollout config.
        parallel_state: megatron.core.parallel_state.
    """
    layers = {
        layer.layer_number - 1: layer.mlp.experts
        for model in models
        for layer in model.decoder.layers
        if hasattr(layer.mlp, "experts")
    }
    dtypes = {next(experts.parameters()).dtype for experts in layers.values()}
    gathered = [None] * parallel_state.get_pipeline_model_parallel_world_size()
    torch.distributed.all_gather_object(
        gathered, (tuple(layers), dtypes), group=parallel_state.get_pipeline_model_parallel_group()
    )
    stages, found = zip(*gathered, strict=True)
    if not any(stages):
        return
    if hf_config.model_type != "qwen3_moe":
        raise ValueError(
            f"ALL_TO_ALL_RESHARD=1 supports the experts of qwen3_moe, not of {hf_config.model_type}: unset it"
        )
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    train = Train(world, parallel_state.get_expert_model_parallel_world_size(), stages)
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    if train.place(rank) != place:
        raise RuntimeError(
            f"rank {rank} is (stage, EP rank) {place}, not {train.place(rank)}: "
            "ALL_TO_ALL_RESHARD=1 needs megatron-core's default order of ranks"
        )
    sizes = (rollout.tensor_model_parallel_size, rollout.data_parallel_size, rollout.expert_parallel_size)
    plan = make_plan(train, Rollout(*sizes), hf_config.num_experts)
    first = hf_config.num_experts // train.ep * place[1]

    def read(wanted: Slice) -> torch.Tensor:
        return hf_slice(layers[wanted.layer], wanted.expert - first, wanted.part)

    (dtype,) = set().union(*found)  # of experts: norms and embeddings may have another
    device = next(models[0].parameters()).device
    yield from reshard(
        plan, rank, read, hf_config.hidden_size, hf_config.moe_intermediate_size, dtype, device
    )


def hf_slice(experts: torch.nn.Module, index: int, part: str) -> torch.Tensor:
    """One Hugging Face tensor of the rank's ``index``-th expert, as a view; [I, H], down_proj [H, I].

    Args:
        experts: megatron-core's TEGroupedMLP (linear_fc1.weight0 [2 * I, H], ...), SequentialMLP, or
            GroupedMLP (weight1 holds [experts, H, 2 * I], weight2 [experts, I, H]).
    """
    if hasattr(experts, "weight1"):
        count, hidden = experts.num_local_experts, experts.weight2.shape[1]
        if part == "down_proj":
            weight = experts.weight2.detach().view(count, -1, hidden)[index].t()
        else:
            weight = experts.weight1.detach().view(count, hidden, -1)[index].t()
    else:
        linear = "linear_fc2" if part == "down_proj" else "linear_fc1"
        if hasattr(experts, "local_experts"):
            weight = getattr(experts.local_experts[index], linear).weight.detach()
        else:
            weight = getattr(getattr(experts, linear), f"weight{index}").detach()
    return weight if part == "down_proj" else weight.chunk(2)[PARTS.index(part)]


class WithoutExperts:
    """A megatron-core model that hides its experts, for verl's and mbridge's export."""

    def __init__(self, model: torch.nn.Module):
        while hasattr(model, "module"):  # DistributedDataParallel, Float16Module
            model = model.module
        self.model = model

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, value) for name, value in self.model.named_parameters() if EXPERTS not in name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.model.state_dict().items() if EXPERTS not in name}


class CheckedReceiver:
    """verl's BucketedWeightReceiver that insists on exactly the experts ``model`` (vLLM's) holds."""

    def __init__(self, receiver, model: torch.nn.Module):
        self.receiver, self.model = receiver, model

    def receive_weights(self, on_bucket_received: Callable[[list[tuple[str, torch.Tensor]]], None]) -> None:
        """
        Raises:
            RuntimeError: after the last bucket, an expert is missing or belongs to another worker.
        """
        arrived = set()

        def note(bucket: list[tuple[str, torch.Tensor]]) -> None:
            arrived.update(name for name, _ in bucket)
            on_bucket_received(bucket)

        self.receiver.receive_weights(note)
        insist(self.model, arrived)


def insist(model: torch.nn.Module, arrived: Iterable[str]) -> None:
    """
    Args:
        model: vLLM's, which holds some experts.
        arrived: Hugging Face names of the weights of one sync.

    Raises:
        RuntimeError: an expert is missing or belongs to another worker.
    """
    held, experts = held_experts(model), set(filter(EXPERT_NAME.fullmatch, arrived))
    missing, strange = sorted(held - experts), sorted(experts - held)
    if missing or strange:
        raise RuntimeError(
            f"{len(missing)} tensors of this vLLM worker's experts are missing {missing[:3]}, and "
            f"{len(strange)} of other workers arrived {strange[:3]}: ALL_TO_ALL_RESHARD=1 needs verl's "
            "Megatron actor (with verl 0.7.1 not its engine workers) and vLLM's linear placement of experts "
            "(no EPLB); check them, or unset it"
        )


def held_experts(model: torch.nn.Module) -> set[str]:
    """Hugging Face names of the expert weights that vLLM's ``model`` has a place for."""
    names = set()
    for layer in model.modules():
        if hasattr(layer, "w13_weight") and hasattr(layer, "global_num_experts"):
            held = range(layer.global_num_experts)
            if layer._expert_map is not None:
                held = (layer._expert_map >= 0).nonzero().flatten().tolist()
            names.update(f"{layer.layer_name}.{e}.{part}.weight" for e in held for part in PARTS)
    return names
