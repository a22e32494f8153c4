"""What the rules of the config linter see of a run, and the table they are entered in.

A `Setup` holds the resolved configuration, the environment and the scripts, and derives the sizes that
several rules need: dies, partitions, the longest sequence, the sizes of graphs. Values that are no numbers
count as the default there; that they are none is the finding of another rule. The geometry of a model comes
from its config.json, or, so that a recipe can be checked where the weights are not, from the name of a
published checkpoint.

A rule is one small function that yields (where, detail) or (where, detail, fix); `rule` enters it into RULES
with its id, its severity, what it checks, the failure that is known to follow, and the fix.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from . import npu_options
from .dry_run import Run
from .findings import Finding
from .verl_config import Resolved, select

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MEGATRON = f"{ACTOR}.megatron"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"


@dataclass(frozen=True)
class Geometry:
    """What the divisibility rules need of a model; experts is 0 for a dense one."""

    layers: int
    heads: int
    kv_heads: int
    experts: int = 0
    positions: int = 0  # longest sequence, tokens; 0 if not known

    @classmethod
    def of(cls, path: str) -> Geometry | None:
        """From config.json at `path`, else by the name of a published model in it; None for other models."""
        file = Path(path).expanduser() / "config.json"
        if file.is_file():
            config = json.loads(file.read_text())
            layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
            if not layers or not heads:
                return None
            return cls(
                layers,
                heads,
                config.get("num_key_value_heads") or heads,
                config.get("num_experts") or config.get("n_routed_experts") or 0,
                config.get("max_position_embeddings", 0),
            )
        return MODELS.get(published(path))


def published(path: str) -> str | None:
    """The name in MODELS of the checkpoint at `path`, by the name of its directory.

    >>> published("/data/Qwen3-235B-A22B-hf"), published("weights/Qwen25-3B-Instruct"), published("my_model")
    ('qwen3-235b-a22b', 'qwen2.5-3b', None)
    """
    name = Path(path).name.lower().replace("_", "-").replace("qwen25", "qwen2.5")
    known = [model for model in MODELS if re.search(rf"{re.escape(model)}(?![\d.])", name)]
    return max(known, key=len, default=None)


MODELS = {  # config.json of the published checkpoints
    "qwen3-235b-a22b": Geometry(94, 64, 4, 128),
    "qwen3-30b-a3b": Geometry(48, 32, 4, 128),
    "qwen3-32b": Geometry(64, 64, 8),
    "qwen3-14b": Geometry(40, 40, 8),
    "qwen3-8b": Geometry(36, 32, 8),
    "qwen3-4b": Geometry(36, 32, 8),
    "qwen3-1.7b": Geometry(28, 16, 8),
    "qwen3-0.6b": Geometry(28, 16, 8),
    "qwen2.5-32b": Geometry(64, 40, 8),
    "qwen2.5-7b": Geometry(28, 28, 4),
    "qwen2.5-3b": Geometry(36, 16, 2),
    "qwen2.5-1.5b": Geometry(28, 12, 2),
    "qwen2.5-0.5b": Geometry(24, 14, 2),
}


def as_mapping(value: Any) -> dict[str, Any]:
    """A dict, given as such or as JSON; empty if it is neither."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    return value if isinstance(value, dict) else {}


class Setup:
    """What the rules see: configuration, overrides, environment and scripts of one run."""

    def __init__(self, run: Run, resolved: Resolved, scripts: dict[str, str], extra: int = 0):
        self.run, self.env, self.scripts = run, run.env, scripts  # scripts: {path: text}
        self.config, self.given = resolved.config, resolved.given
        self.own_args = run.args[: len(run.args) - extra]  # without the overrides of the command line

    def get(self, key: str, default: Any = None) -> Any:
        return select(self.config, key, default)

    def number(self, key: str, default: int = 1) -> int:
        """An integer of the configuration; the default also for what is no number (another rule says so)."""
        try:
            return int(float(self.get(key, default)))
        except (TypeError, ValueError):
            return default

    def size(self, key: str) -> int:
        """A number of ranks, at least 1: rules divide by it, and parallel.positive reports others."""
        return max(self.number(key), 1)

    def variable(self, name: str, default: int = 0) -> int:
        value = self.env.get(name, "").strip()
        return int(value) if re.fullmatch(r"-?\d+", value) else default

    @cached_property
    def npu(self) -> bool:
        return self.get("trainer.device") != "cpu"

    @cached_property
    def megatron(self) -> bool:
        return self.get(f"{ACTOR}.strategy") == "megatron"

    @cached_property
    def fsdp(self) -> bool:
        return str(self.get(f"{ACTOR}.strategy")).startswith("fsdp")

    @cached_property
    def model(self) -> Geometry | None:
        return Geometry.of(str(self.get("actor_rollout_ref.model.path", "")))

    @property
    def dies(self) -> int:
        return self.size("trainer.nnodes") * self.size("trainer.n_gpus_per_node")

    @cached_property
    def tp(self) -> int:
        return self.size(f"{MEGATRON}.tensor_model_parallel_size")

    @cached_property
    def pp(self) -> int:
        return self.size(f"{MEGATRON}.pipeline_model_parallel_size")

    @cached_property
    def cp(self) -> int:
        return self.size(f"{MEGATRON}.context_parallel_size")

    @cached_property
    def ep(self) -> int:
        return self.size(f"{MEGATRON}.expert_model_parallel_size")

    @cached_property
    def etp(self) -> int:
        return max(self.number(f"{MEGATRON}.expert_tensor_parallel_size", self.tp), 1)

    @cached_property
    def sp(self) -> int:
        """Ulysses; the actor's own key wins, as in verl."""
        own = self.size(f"{ACTOR}.ulysses_sequence_parallel_size")
        return own if own > 1 else self.size(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size")

    @cached_property
    def dp(self) -> int:
        """Training ranks that get different samples; 0 if the sizes do not fit."""
        split = self.tp * self.pp * self.cp if self.megatron else self.sp
        return self.dies // split if self.dies % split == 0 else 0

    @cached_property
    def layer_split(self) -> tuple[int, ...]:
        """Layers of each pipeline stage, where MindSpeed is given a list of them."""
        for name in ("pipeline_num_transformer_layers", "num_layer_list"):
            if value := self.get(f"{MEGATRON}.override_transformer_config.{name}"):
                return tuple(int(number) for number in re.findall(r"\d+", str(value)))
        return ()

    @cached_property
    def rollout_tp(self) -> int:
        return self.size(f"{ROLLOUT}.tensor_model_parallel_size")

    @cached_property
    def rollout_dp(self) -> int:
        return self.size(f"{ROLLOUT}.data_parallel_size")

    @cached_property
    def sequence(self) -> int:
        """The longest sequence, tokens."""
        return self.number("data.max_prompt_length") + self.number("data.max_response_length")

    @cached_property
    def dynamic(self) -> bool:
        return bool(self.get(f"{ACTOR}.use_dynamic_bsz"))

    @cached_property
    def graphs(self) -> bool:
        return self.npu and not self.get(f"{ROLLOUT}.enforce_eager") and self.graph_mode != "NONE"

    @cached_property
    def utilization(self) -> float:
        """The share of a die that vLLM may take; 0 if what is given is none."""
        value = self.get(f"{ROLLOUT}.gpu_memory_utilization", 0.5)
        return value if isinstance(value, int | float) and 0 < value <= 1 else 0.0

    def mapping(self, key: str) -> dict[str, Any]:
        """A node of the configuration, see `as_mapping`."""
        return as_mapping(self.get(key))

    @cached_property
    def compilation(self) -> dict[str, Any]:
        return self.mapping(f"{VLLM}.compilation_config")

    @cached_property
    def engine_options(self) -> dict[str, Any]:
        """engine_kwargs.vllm, its configurations as dicts."""
        given = self.mapping(VLLM)
        return given | {key: as_mapping(given[key]) for key in npu_options.CONFIGS if key in given}

    @cached_property
    def graph_mode(self) -> str:
        eager = bool(self.get(f"{ROLLOUT}.enforce_eager"))
        return npu_options.graph_mode(self.engine_options, self.npu, eager)

    @cached_property
    def decode_tokens(self) -> int:
        """Tokens a sequence brings to a decode step: one, and the speculative ones."""
        return 1 + max(self.number(f"{VLLM}.speculative_config.num_speculative_tokens", 0), 0)

    @cached_property
    def given_graph_sizes(self) -> Any:
        return self.get(f"{ROLLOUT}.cudagraph_capture_sizes") or self.compilation.get(
            "cudagraph_capture_sizes"
        )

    @cached_property
    def graph_sizes(self) -> list[int]:
        """Sizes that are given (rollout's own key wins over compilation_config), else vLLM's, ascending."""
        if self.given_graph_sizes:
            return sorted({int(size) for size in re.findall(r"\d+", str(self.given_graph_sizes))})
        top = min(self.number(f"{ROLLOUT}.max_num_seqs") * self.decode_tokens * 2, 512)
        sizes = [1, 2, 4, *range(8, min(top + 1, 256), 8), *range(256, top + 1, 16)]
        return [size for size in sizes if size <= top]


Hit = tuple[str, str] | tuple[str, str, str]


@dataclass(frozen=True)
class Rule:
    id: str
    severity: str
    checks: str
    why: str
    fix: str
    find: Callable[[Setup], Iterator[Hit]]

    def __call__(self, setup: Setup) -> list[Finding]:
        return [
            Finding(
                self.severity,
                self.id,
                hit[0],
                f"{hit[1]}: {self.why}" if self.why else hit[1],
                hit[2] if len(hit) > 2 else self.fix,
            )
            for hit in self.find(setup)
        ]


RULES: list[Rule] = []


def rule(id: str, severity: str, checks: str, *, why: str = "", fix: str):
    """Enter the function below into the table."""

    def enter(find: Callable[[Setup], Iterator[Hit]]) -> Callable[[Setup], Iterator[Hit]]:
        RULES.append(Rule(id, severity, checks, why, fix, find))
        return find

    return enter
