"""What the rules of the config linter see of a run, and the table that holds them.

A `Setup` holds the resolved configuration, the environment and the scripts, and derives the sizes that
several rules need: dies, partitions, the longest sequence, the graph sizes. A value that is not a number
counts as the default there; another rule reports it. The geometry of a model comes from its config.json, or
from the name of a published checkpoint, so that a recipe can be checked on a machine without the weights.

A rule is one small function that yields (where, detail) or (where, detail, fix); `rule` enters it into RULES
with its id, its severity, what it checks, the failure that is known to follow, and the fix. The function has
the last part of its id as its name, or the whole id where that part is one word or names something else.
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

from ascend_rl.lint.dry_run import Run
from ascend_rl.lint.findings import Finding
from ascend_rl.lint.verl_config import Resolved, dataclass_fields, select
from ascend_rl.rollout import npu_options
from ascend_rl.settings.model import Model, published, published_positions
from ascend_rl.settings.switch import CannotWork

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MEGATRON = f"{ACTOR}.megatron"
# Of the one stack and of the other.
LOADS_WEIGHTS = (f"{ACTOR}.load_weight", f"{MEGATRON}.override_mcore_model_config.load_weight")
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"


def checkpoint(path: str, kinds: tuple[str, ...] = ()) -> Model | None:
    """The model of config.json at `path`, else of a published model's name in `path`; None for others."""
    if (Path(path).expanduser() / "config.json").is_file():
        with contextlib.suppress(CannotWork):
            return Model.from_path(path, kinds)
        return None
    name = published(path)
    return Model.named(name) if name else None


def local_path(value: Any) -> Path | None:
    """A path on this machine's disks; None for names on a hub, remote addresses and what is no path."""
    text = str(value or "")
    if not text or "://" in text or not (text.startswith(("/", "~", ".", "$")) or text.count("/") > 1):
        return None
    return Path(text).expanduser()


def as_mapping(value: Any) -> dict[str, Any]:
    """A dict, given as one or as JSON; empty if it is neither."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    return value if isinstance(value, dict) else {}


class Setup:
    """What the rules see: configuration, overrides, environment and scripts of one run."""

    def __init__(
        self, run: Run, resolved: Resolved, scripts: dict[str, str], extra: int = 0, here: bool = False
    ):
        self.run, self.env, self.scripts = run, run.env, scripts  # scripts: {path: text}
        self.config, self.given, self.defaults = resolved.config, resolved.given, resolved.defaults
        self._here = here
        self.own_args = run.args[: len(run.args) - extra]  # without the overrides from the command line

    def get(self, key: str, default: Any = None) -> Any:
        return select(self.config, key, default)

    def number(self, key: str, default: int = 1) -> int:
        """An integer of the configuration; the default if it is not a number (another rule reports that)."""
        try:
            return int(float(self.get(key, default)))
        except (TypeError, ValueError, OverflowError):  # text, nan, inf
            return default

    def made(self, path: Path) -> bool:
        """Whether the script itself writes it before the training."""
        return any(path.is_relative_to(made) for made in self.run.makes)

    def size(self, key: str) -> int:
        """A number of ranks, at least 1: rules divide by it, and parallel.positive reports others."""
        return max(self.number(key), 1)

    def variable(self, name: str, default: int = 0) -> int:
        value = self.env.get(name, "").strip()
        return int(value) if re.fullmatch(r"-?\d+", value) else default

    def override(self, key: str, value: Any) -> str:
        """`key=value` as the command line needs it: with + where verl has no such key."""
        plus = "" if key in self.defaults else "+"
        return f"{plus}{key}={value}"

    def kind(self, key: str) -> str:
        """The annotation of a key's field in verl's dataclass of its node; empty if it has none."""
        node, _, name = key.rpartition(".")
        target = str(self.get(f"{node}._target_", "")).rpartition(".")[2]
        return dataclass_fields().get(target, {}).get(name, "")

    @cached_property
    def here(self) -> bool:
        """Whether the run takes place on this machine: it was said so, it needs no NPU, or there are some."""
        return self._here or not self.npu or any(Path("/dev").glob("davinci[0-9]*"))

    @cached_property
    def vllm(self) -> bool:
        return self.get(f"{ROLLOUT}.name") == "vllm"

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
    def critic(self) -> bool:
        """Whether the run trains a critic, as verl's need_critic decides."""
        enabled = self.get("critic.enable")
        return bool(enabled) if enabled is not None else self.get("algorithm.adv_estimator") == "gae"

    @cached_property
    def model(self) -> Model | None:
        return checkpoint(str(self.get("actor_rollout_ref.model.path", "")))

    @cached_property
    def positions(self) -> int:
        """The longest sequence, by config.json or the model's name; 0 if not known or extended."""
        extended = self.get(f"{VLLM}.hf_overrides") or self.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1"
        if extended or not self.model:
            return 0
        return self.model.positions or published_positions(str(self.get("actor_rollout_ref.model.path", "")))

    @property
    def dies(self) -> int:
        return self.size("trainer.nnodes") * self.size("trainer.n_gpus_per_node")

    @property
    def apart(self) -> bool:
        """Whether the rollout has dies of its own (docs/async.md)."""
        return self.number(f"{ROLLOUT}.nnodes", 0) > 0

    @property
    def rollout_dies(self) -> int:
        own = self.number(f"{ROLLOUT}.nnodes") * self.size(f"{ROLLOUT}.n_gpus_per_node")
        return own if self.apart else self.dies

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
        """The Ulysses size; the actor's own key wins, as in verl."""
        own = self.size(f"{ACTOR}.ulysses_sequence_parallel_size")
        return own if own > 1 else self.size(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size")

    @cached_property
    def dp(self) -> int:
        """Training ranks that get different samples; 0 if the sizes do not fit."""
        split = self.tp * self.pp * self.cp if self.megatron else self.sp
        return self.dies // split if self.dies % split == 0 else 0

    @cached_property
    def layer_split(self) -> tuple[int, ...]:
        """Layers of each pipeline stage, if MindSpeed is given a list of them."""
        for name in ("pipeline_num_transformer_layers", "num_layer_list"):
            if value := self.get(f"{MEGATRON}.override_transformer_config.{name}"):
                return tuple(int(number) for number in re.findall(r"\d+", str(value)))
        return ()

    @cached_property
    def uneven_layers(self) -> bool:
        """Whether the layers of the pipeline are split by hand."""
        prefix = f"{MEGATRON}.override_transformer_config"
        edges = [f"{prefix}.num_layers_in_{edge}_pipeline_stage" for edge in ("first", "last")]
        counted = [f"{prefix}.account_for_{part}_in_pipeline_split" for part in ("loss", "embedding")]
        return bool(self.layer_split) or any(map(self.get, [*edges, *counted]))

    @cached_property
    def rollout_tp(self) -> int:
        return self.size(f"{ROLLOUT}.tensor_model_parallel_size")

    @cached_property
    def rollout_dp(self) -> int:
        return self.size(f"{ROLLOUT}.data_parallel_size")

    @cached_property
    def sequence(self) -> int:
        """The longest sequence, in tokens."""
        return self.number("data.max_prompt_length") + self.number("data.max_response_length")

    @cached_property
    def dynamic(self) -> bool:
        return bool(self.get(f"{ACTOR}.use_dynamic_bsz"))

    @cached_property
    def graphs(self) -> bool:
        eager = self.get(f"{ROLLOUT}.enforce_eager")
        return self.npu and self.vllm and not eager and self.graph_mode != "NONE"

    @cached_property
    def utilization(self) -> float:
        """The share of a die that vLLM may take; 0 if the given value is invalid."""
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
        """Tokens a sequence adds to a decode step: one, plus the speculative ones."""
        return 1 + max(self.number(f"{VLLM}.speculative_config.num_speculative_tokens", 0), 0)

    @cached_property
    def given_graph_sizes(self) -> Any:
        return self.get(f"{ROLLOUT}.cudagraph_capture_sizes") or self.compilation.get(
            "cudagraph_capture_sizes"
        )

    @cached_property
    def graph_sizes(self) -> list[int]:
        """The sizes given (rollout's own key wins over compilation_config), else vLLM's, ascending."""
        if self.given_graph_sizes:
            return sorted({int(size) for size in re.findall(r"\d+", str(self.given_graph_sizes))})
        top = min(self.number(f"{ROLLOUT}.max_num_seqs") * self.decode_tokens * 2, 512)
        sizes = [1, 2, 4, *range(8, min(top + 1, 256), 8), *range(256, top + 1, 16)]
        return [size for size in sizes if size <= top]


Hit = tuple[str, ...]  # where, detail, and where they differ from the rule's: fix, override to paste


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
                hit[3] if len(hit) > 3 else "",
            )
            for hit in self.find(setup)
        ]


RULES: list[Rule] = []


def rule(id: str, severity: str, checks: str, *, why: str = "", fix: str, rules: list[Rule] = RULES):
    """Enter the decorated function into ``rules``."""

    def enter(find: Callable[[Setup], Iterator[Hit]]) -> Callable[[Setup], Iterator[Hit]]:
        rules.append(Rule(id, severity, checks, why, fix, find))
        return find

    return enter
