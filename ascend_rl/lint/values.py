"""Rules about single values: names that the frameworks look up, types and ranges.

The accepted names are read from the pinned sources by `pinned`; only the key that each belongs to is written
here. A wrong one ends a run where it is used: an unknown advantage estimator after the first rollout, 1.8
hours into a run of 235B.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ascend_rl.estimate.tensors import WEIGHT_BYTES
from ascend_rl.lint import pinned
from ascend_rl.lint.options import megatron_classes, vllm_classes, vllm_options
from ascend_rl.lint.setup import ACTOR, MEGATRON, REF, ROLLOUT, VLLM, Hit, Setup, rule
from ascend_rl.lint.verl_config import class_fields, dataclass_fields

CRITIC, TRANSFORMER = "critic", f"{MEGATRON}.override_transformer_config"
ENGINES = (ACTOR, REF, CRITIC)


# Names.


def _verl(*patterns: str) -> tuple[Path, ...]:
    return pinned.sources("verl", *patterns)


@cache
def _vllm() -> tuple[Path, ...]:
    return pinned.sources(
        "vllm",
        "config/*.py",
        "model_executor/model_loader/__init__.py",
        "model_executor/layers/quantization/__init__.py",
    )


@cache
def _megatron() -> tuple[Path, ...]:
    files = (
        "model_parallel_config transformer/transformer_config transformer/enums optimizer/optimizer_config"
    )
    return pinned.sources("megatron", *(f"core/{file}.py" for file in files.split()))


@cache
def _load_formats() -> tuple:
    formats = pinned.aliases(_vllm()).get("LoadFormats")
    loaders = [
        name
        for package in ("vllm", "vllm_ascend")
        for name in pinned.registered("register_model_loader", pinned.sources(package, "**/*loader*.py"))
    ]
    return (*pinned.literal(ast.unparse(formats), ()), *loaders) if formats else ()


def _core(read: Callable[..., Any], name: str, *more: str) -> tuple:
    ours = Path(__file__).parents[1] / "glue/policy_losses.py"
    return tuple(read(name, (*_verl("trainer/ppo/core_algos.py"), ours), *more))


# {key: what it may be}, read when the rule runs; empty means that nobody knows.
NAMES: dict[str, Callable[[], tuple]] = {
    "algorithm.adv_estimator": lambda: _core(pinned.registered, "register_adv_est"),
    f"{ACTOR}.policy_loss.loss_mode": lambda: _core(pinned.registered, "register_policy_loss"),
    f"{ACTOR}.kl_loss_type": lambda: _core(pinned.compared, "kl_penalty", "kl_penalty_forward"),
    "algorithm.kl_penalty": lambda: _core(pinned.compared, "kl_penalty", "kl_penalty_forward"),
    "algorithm.kl_ctrl.type": lambda: _core(pinned.compared, "kl_ctrl.type"),
    f"{ACTOR}.strategy": lambda: (
        pinned.compared("actor.strategy", _verl("trainer/main_ppo.py"))
        or pinned.registered_with("EngineRegistry.register", "backend", _verl("workers/engine/**/*.py"))
    ),
    # The last by a patch or a plug-in.
    **{f"{engine}.megatron.dtype": lambda: ("bfloat16", "float16", "float32") for engine in ENGINES},
    "trainer.resume_mode": lambda: pinned.compared("trainer.resume_mode", _verl("trainer/ppo/*.py")),
    "trainer.logger": lambda: (*pinned.listed("supported_backend", _verl("utils/tracking.py")), "tracking"),
    "trainer.device": lambda: ("cpu", "cuda", "npu"),
    "data.truncation": lambda: pinned.checked_argument("truncation", _verl("utils/torch_functional.py")),
    f"{ROLLOUT}.name": lambda: tuple(
        name for name, _ in pinned.listed("_ROLLOUT_REGISTRY", _verl("workers/rollout/base.py"))
    ),
    f"{ROLLOUT}.quantization": lambda: pinned.listed(
        "_SUPPORTED_QUANTIZATION", _verl("workers/rollout/vllm_rollout/vllm_async_server.py")
    ),
    f"{ROLLOUT}.load_format": _load_formats,
    f"{ROLLOUT}.agent.default_agent_loop": lambda: tuple(
        pinned.registered("register", _verl("experimental/agent_loop/*.py"))
    ),
    f"{ROLLOUT}.multi_turn.format": lambda: tuple(
        pinned.registered("ToolParser.register", _verl("experimental/agent_loop/*.py"))
    ),
    f"{ROLLOUT}.checkpoint_engine.backend": lambda: tuple(
        pinned.registered("CheckpointEngineRegistry.register", _verl("checkpoint_engine/*.py"))
    ),
    "reward.reward_manager.name": lambda: tuple(
        name
        for decorator in ("register", "register_manager")
        for name in pinned.registered(decorator, _verl("experimental/reward_loop/reward_manager/*.py"))
    ),
    "reward.reward_manager.source": lambda: ("register", "importlib"),
}
# Where users may register names of their own, and the setting that does it.
EXTENSIBLE = {
    "algorithm.adv_estimator": "actor_rollout_ref.model.external_lib",
    f"{ACTOR}.policy_loss.loss_mode": "actor_rollout_ref.model.external_lib",
    f"{ROLLOUT}.agent.default_agent_loop": f"{ROLLOUT}.agent.agent_loop_config_path",
    "reward.reward_manager.name": "reward.custom_reward_function.path",
}
USED_ONLY_WITH = {  # a name that is never looked up may be anything
    f"{ACTOR}.kl_loss_type": f"{ACTOR}.use_kl_loss",
    "algorithm.kl_penalty": "algorithm.use_kl_in_reward",
    "algorithm.kl_ctrl.type": "algorithm.use_kl_in_reward",
    f"{ROLLOUT}.multi_turn.format": f"{ROLLOUT}.multi_turn.enable",
}


def _one_of(s: Setup, key: str, value: Any, known: tuple) -> Iterator[Hit]:
    """A hit unless the value is known; the fix is the nearest name."""
    names = [str(name) for name in dict.fromkeys(known) if name is not None]
    if not known or value is None or value in known or str(value) in names:
        return
    close = difflib.get_close_matches(str(value).lower(), names, 1, 0.5)
    listed = ", ".join(names[:16])
    yield (
        key,
        f"'{value}' is none of the names",
        f"use one of: {listed}" + (f"; nearest: {close[0]}" if close else ""),
        s.override(key, close[0]) if close else "",
    )


def _nodes(config: Any, prefix: str = "") -> Iterator[tuple[str, dict]]:
    """Every mapping below config, with its dotted key."""
    for name, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, dict):
            yield prefix + name, value
            yield from _nodes(value, f"{prefix}{name}.")


@rule(
    "values.name",
    "error",
    "names of losses, estimators, formats, engines and modes are known to the pinned frameworks",
    why="the run ends where the name is looked up: at the start, or after the first rollout",
    fix="use a name that exists",
)
def values_name(s):
    for key, known in NAMES.items():
        if key in EXTENSIBLE and s.get(EXTENSIBLE[key]):
            continue
        if key in USED_ONLY_WITH and not s.get(USED_ONLY_WITH[key]):
            continue
        if key == f"{ROLLOUT}.load_format" and not s.vllm:
            continue
        value = s.get(key)
        for one in value if isinstance(value, list) else [value]:
            yield from _one_of(s, key, one, known())
    files = _verl("workers/config/*.py", "trainer/config/*.py", "utils/profiler/*.py")
    checked, fields = pinned.checked(files), dataclass_fields()
    for where, node in _nodes(s.config):
        name = str(node.get("_target_", "")).rpartition(".")[2]
        if where.startswith(CRITIC) and not s.critic:
            continue
        for key, value in node.items():
            allowed = checked.get(name, {}).get(key) or pinned.literal(fields.get(name, {}).get(key, ""), ())
            if not isinstance(value, dict | list) and f"{where}.{key}" not in NAMES:
                yield from _one_of(s, f"{where}.{key}", value, allowed)


@rule(
    "values.engine",
    "error",
    "values handed on to vLLM, Megatron and MindSpeed are among those they list",
    why="the engine or the model refuses it when it is built, or takes another path in silence",
    fix="use a value of the list",
)
def values_engine(s):
    if s.vllm:
        sent = pinned.forwarded(
            "args", "self.config", _verl("workers/rollout/vllm_rollout/vllm_async_server.py")
        )
        for option, own in sent.items():
            if f"{ROLLOUT}.{own}" not in NAMES:
                allowed = pinned.literal(vllm_options().get(option, ""), _vllm())
                yield from _one_of(s, f"{ROLLOUT}.{own}", s.get(f"{ROLLOUT}.{own}"), allowed)
        for key, value in s.mapping(VLLM).items():
            kind = vllm_options().get(key.replace("-", "_"), "")
            if key == "load_format":
                yield from _one_of(s, f"{VLLM}.{key}", value, _load_formats())
            elif key != "quantization" and not isinstance(value, dict | list):
                yield from _one_of(s, f"{VLLM}.{key}", value, pinned.literal(kind, _vllm()))
            inner = next((name for name in re.findall(r"\w+Config", kind) if name in vllm_classes()), "")
            for name, given in s.mapping(f"{VLLM}.{key}").items() if inner else ():
                allowed = pinned.literal(vllm_classes()[inner].get(name, ""), _vllm())
                if not isinstance(given, dict | list):
                    yield from _one_of(s, f"{VLLM}.{key}.{name}", given, allowed)
    if s.megatron:
        checked = pinned.checked(_megatron()).get("TransformerConfig", {})
        kinds = megatron_classes().get("MLATransformerConfig", {})
        options = pinned.choices(pinned.sources("mindspeed", "**/*.py")) if s.npu else {}
        for key, value in s.mapping(TRANSFORMER).items():
            allowed = (
                checked.get(key, ()) or pinned.literal(kinds.get(key, ""), _megatron()),
                options.get(key, ()),
            )
            if not isinstance(value, dict | list) and (allowed[0] or key not in kinds):
                yield from _one_of(s, f"{TRANSFORMER}.{key}", value, (*allowed[0], *allowed[1]))
        schedule = pinned.compared(
            "lr_decay_style", pinned.sources("megatron", "core/optimizer_param_scheduler.py")
        )
        yield from _one_of(
            s, f"{ACTOR}.optim.lr_decay_style", s.get(f"{ACTOR}.optim.lr_decay_style"), schedule
        )
        optimizers = pinned.compared("config.optimizer", pinned.sources("megatron", "core/optimizer/*.py"))
        yield from _one_of(s, f"{ACTOR}.optim.optimizer", s.get(f"{ACTOR}.optim.optimizer"), optimizers)
    elif s.fsdp and str(s.get(f"{ACTOR}.optim.optimizer_impl", "")) == "torch.optim":
        classes = tuple(class_fields(pinned.sources("torch", "optim/*.py")))
        yield from _one_of(s, f"{ACTOR}.optim.optimizer", s.get(f"{ACTOR}.optim.optimizer"), classes)


# Types and ranges.


@rule(
    "values.type",
    "error",
    "a number is given where verl's default or dataclass has one, and a switch where it has a switch",
    why="verl or a framework stops with a TypeError, or takes the text 'False' for true",
    fix="write a number, or True or False",
)
def values_type(s):
    for key in s.given:
        value = s.get(key)
        if value in (None, "") or isinstance(value, dict | list) or key not in s.defaults:
            continue
        kind, default = s.kind(key), s.defaults[key]
        switch = isinstance(default, bool) or kind in ("bool", "Optional[bool]")
        number = kind in ("int", "float", "Optional[int]", "Optional[float]") or (
            isinstance(default, int | float) and not isinstance(default, bool)
        )
        if switch and isinstance(value, str):
            close = difflib.get_close_matches(value.lower(), ["true", "false"], 1, 0.4)
            yes = close == ["true"] or value.lower() in ("yes", "on", "y", "1")
            yield key, f"'{value}' is not True or False", "write True or False", s.override(key, yes)
        elif number and not switch and isinstance(value, str | bool):
            found = re.match(r"-?\d+(\.\d+)?(e-?\d+)?", str(value))
            fix = s.override(key, found[0] if found else default) if default is not None or found else ""
            yield key, f"'{value}' is not a number", "write a number", fix
        elif (
            kind in ("int", "Optional[int]") and isinstance(value, float) and value % 1 > 0
        ):  # not of nan, inf
            yield key, f"{value} is not a whole number", "write a whole number", s.override(key, int(value))


ABOVE, AT_LEAST = "above", "at least"
# (key, how, bound, upper bound, what says so). Values outside end the run or turn the update into noise.
RANGES = (
    (f"{ROLLOUT}.temperature", ABOVE, 0, None, "log-probs are divided by it"),
    (f"{ROLLOUT}.top_p", ABOVE, 0, 1, "vLLM's SamplingParams"),
    (f"{ROLLOUT}.top_k", AT_LEAST, -1, None, "vLLM's SamplingParams"),
    (f"{ROLLOUT}.val_kwargs.temperature", AT_LEAST, 0, None, "vLLM's SamplingParams"),
    (f"{ROLLOUT}.val_kwargs.top_p", ABOVE, 0, 1, "vLLM's SamplingParams"),
    (f"{ROLLOUT}.val_kwargs.n", AT_LEAST, 1, None, "vLLM's SamplingParams"),
    (f"{ROLLOUT}.max_num_seqs", AT_LEAST, 1, None, "vLLM's SchedulerConfig"),
    (f"{ROLLOUT}.agent.num_workers", AT_LEAST, 1, None, "nobody would generate"),
    (f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", AT_LEAST, 1, None, "no tensor fits"),
    (f"{ACTOR}.clip_ratio", ABOVE, 0, None, "every update is clipped"),
    (f"{ACTOR}.clip_ratio_low", AT_LEAST, 0, 1, "the ratio's lower bound is 1 minus it"),
    (f"{ACTOR}.clip_ratio_high", AT_LEAST, 0, None, "the ratio's upper bound is 1 plus it"),
    (f"{ACTOR}.ppo_epochs", AT_LEAST, 1, None, "nothing is trained"),
    (f"{ACTOR}.grad_clip", ABOVE, 0, None, "every gradient becomes 0"),
    (f"{ACTOR}.optim.clip_grad", AT_LEAST, 0, None, "a norm"),
    (f"{ACTOR}.optim.lr", ABOVE, 0, 1, "the optimizer refuses or diverges"),
    (f"{ACTOR}.optim.weight_decay", AT_LEAST, 0, None, "the optimizer refuses it"),
    (f"{ACTOR}.optim.lr_warmup_steps_ratio", AT_LEAST, 0, 1, "a share of the steps"),
    (f"{ACTOR}.kl_loss_coef", AT_LEAST, 0, None, "the KL would be paid for"),
    ("algorithm.gamma", AT_LEAST, 0, 1, "a discount"),
    ("algorithm.lam", AT_LEAST, 0, 1, "a discount"),
    ("data.max_prompt_length", AT_LEAST, 1, None, "a length"),
    ("data.max_response_length", AT_LEAST, 1, None, "a length"),
    ("data.dataloader_num_workers", AT_LEAST, 0, None, "torch's DataLoader"),
    ("trainer.total_epochs", AT_LEAST, 1, None, "nothing is trained"),
    ("trainer.total_training_steps", AT_LEAST, 1, None, "nothing is trained"),
    (f"{VLLM}.speculative_config.num_speculative_tokens", AT_LEAST, 1, None, "vLLM's SpeculativeConfig"),
)


@rule("values.range", "error", "numbers are within the range that their user accepts", fix="see the range")
def values_range(s):
    for key, how, low, high, source in RANGES:
        value = s.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value < low or (how == ABOVE and value == low) or (high is not None and value > high):
            wanted = f"{how} {low}" + (f" and at most {high}" if high is not None else "")
            default = s.defaults.get(key)
            fits = isinstance(default, int | float) and low <= default and (high is None or default <= high)
            fits = fits and not (how == ABOVE and default == low)
            fix = s.override(key, default) if fits else s.override(key, 1)
            yield key, f"{value}, must be {wanted}: {source}", f"give a value {wanted}", fix


# Bounds that inf switches off.
UNBOUNDED = re.compile(r"(clip_grad|grad_clip|clip_ratio(_high|_c)?|threshold|_coef_max|timeout)$")


@rule(
    "values.finite",
    "error",
    "numbers are numbers: no nan, and inf only where it switches a bound off",
    why="it passes every comparison, and the update or a size becomes nan",
    fix="give a number",
)
def values_finite(s):
    for key in s.given:
        value, default = s.get(key), s.defaults.get(key)
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, float) or math.isfinite(one):
                continue
            whole = isinstance(default, int) or "int" in s.kind(key)
            if math.isnan(one) or whole or not UNBOUNDED.search(key):
                usable = isinstance(default, int | float) and not isinstance(default, bool)
                yield key, f"{one}", "give a number", s.override(key, default) if usable else ""


@rule(
    "algorithm.greedy_validation",
    "warning",
    "a prompt of the validation is answered several times only where answers are sampled",
    why="all n answers are the same, at n times the cost",
    fix="val_kwargs.n=1, or val_kwargs.do_sample=True with val_kwargs.temperature=1.0",
)
def greedy_validation(s):
    key = f"{ROLLOUT}.val_kwargs"
    count, heat = s.number(f"{key}.n"), s.get(f"{key}.temperature", 0)
    if count > 1 and (heat == 0 or not s.get(f"{key}.do_sample")):
        detail = f"{count} with do_sample={s.get(f'{key}.do_sample')} and temperature {heat}"
        yield f"{key}.n", detail, "val_kwargs.n=1, or sample", s.override(f"{key}.n", 1)


MIGRATED = re.compile(  # what verl 0.7.1 reads of its old node reward_model, before it deletes it
    r"(num_workers|reward_manager|reward_loop_(source|module_path|class_name)|enable|enable_resource_pool|"
    r"n_gpus_per_node|nnodes|model\.path|reward_kwargs(\..+)?|rollout\..+)"
)


@rule(
    "config.dropped",
    "warning",
    "no key is below reward_model that verl no longer reads",
    why="verl 0.7.1 moves what it knows from reward_model to reward and deletes the rest: it is ignored",
    fix="use the key below reward",
)
def config_dropped(s):
    for key in s.given:
        name = key.removeprefix("reward_model.")
        if name == key or MIGRATED.fullmatch(name) or s.get(key) is None:
            continue
        kept = re.sub(r"^overlong_buffer\b", "reward_kwargs.overlong_buffer_cfg", name)
        moved = f"reward.{kept}" if kept != name else f"reward.reward_model.{name}"
        known = moved in s.defaults or kept != name
        fix = f"use {'+' if kept != name else ''}{moved}=..." if known else "remove it"
        yield key, f"{s.get(key)}", fix


@cache
def _clipped_twice() -> list[str]:
    """The losses that assert clip_ratio_c > 1."""
    return [
        name
        for name, node in pinned.registered(
            "register_policy_loss", _verl("trainer/ppo/core_algos.py")
        ).items()
        if any(
            isinstance(item, ast.Assert) and ast.unparse(item.test) == "clip_ratio_c > 1.0"
            for item in ast.walk(node)
        )
    ]


@rule(
    "algorithm.dual_clip",
    "error",
    "clip_ratio_c is above 1 where the loss is clipped twice",
    why="the loss asserts 'clip_ratio_c should be greater than 1.0', in the first update",
    fix="verl's default is 3.0",
)
def dual_clip(s):
    value, loss = s.get(f"{ACTOR}.clip_ratio_c", 3.0), s.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    if loss in _clipped_twice() and isinstance(value, int | float) and value <= 1:
        yield (
            f"{ACTOR}.clip_ratio_c",
            f"{value} with the loss {loss}",
            "verl's default is 3.0",
            s.override(f"{ACTOR}.clip_ratio_c", 3.0),
        )


@rule(
    "algorithm.group_of_one",
    "error",
    "estimators that compare the responses to one prompt get several of them",
    why="a response is compared with itself: GRPO's advantage is the reward itself, RLOO has no baseline",
    fix="raise rollout.n (16 in the recipes), or use another estimator",
)
def group_of_one(s):
    estimators = pinned.registered("register_adv_est", _verl("trainer/ppo/core_algos.py"))
    node = estimators.get(str(s.get("algorithm.adv_estimator")))
    grouped = node is not None and "index" in {arg.arg for arg in node.args.args}
    if grouped and s.number(f"{ROLLOUT}.n") == 1:
        yield (
            f"{ROLLOUT}.n",
            f"1 with {s.get('algorithm.adv_estimator')}",
            "n of 4 to 16",
            s.override(f"{ROLLOUT}.n", 8),
        )


@rule(
    "train.resume",
    "error",
    "a path with global_step_<N> is given where a run resumes from a path",
    why="verl asserts 'resume ckpt must be str type' or '... must specify the global_steps' when it loads",
    fix="trainer.resume_from_path=.../global_step_<N>, or resume_mode=auto",
)
def train_resume(s):
    path, mode = s.get("trainer.resume_from_path"), s.get("trainer.resume_mode")
    auto = s.override("trainer.resume_mode", "auto")
    if mode == "resume_path" and "global_step_" not in str(path):
        yield "trainer.resume_from_path", f"'{path}' with resume_mode=resume_path", "name the step", auto
    if mode != "disable" and s.get("trainer.default_hdfs_dir"):
        disable = s.override("trainer.default_hdfs_dir", "null")
        yield "trainer.default_hdfs_dir", "set: loading from HDFS is not implemented", "remove it", disable


@rule(
    "train.virtual_pipeline",
    "error",
    "virtual pipeline stages are used with PP above 1 and divide the layers of a stage",
    why="megatron-core refuses interleaving without a pipeline, and stages of unequal size",
    fix="use a divisor of layers / PP, or null",
)
def virtual_pipeline(s):
    key = f"{MEGATRON}.virtual_pipeline_model_parallel_size"
    stages = s.number(key, 0)
    if not s.megatron or stages < 1:
        return
    if s.pp < 2:
        yield key, f"{stages} with PP {s.pp}", "null without a pipeline", s.override(key, "null")
    elif s.model and not s.uneven_layers and s.model.layers % (s.pp * stages):
        fits = [size for size in range(stages, 1, -1) if s.model.layers % (s.pp * size) == 0]
        yield (
            key,
            f"{s.model.layers} layers over PP {s.pp} x VPP {stages}",
            "use a divisor of layers / PP",
            s.override(key, fits[0] if fits else "null"),
        )


BUCKET = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"


def _bucket(s: Setup, width: int) -> Iterator[Hit]:
    """A hit if the embedding, the largest tensor, does not fit in `width` bytes a number."""
    if not s.model or not s.vllm:
        return
    need = -(-s.model.vocabulary * s.model.hidden * width // 2**20)
    if 0 < s.number(BUCKET, 2048) < need:
        shape = f"{s.model.vocabulary} x {s.model.hidden} x {width} bytes"
        fix = s.override(BUCKET, 2 ** (need - 1).bit_length())
        yield (
            BUCKET,
            f"{s.number(BUCKET, 2048)} MB, the embedding ({shape}) {need} MB",
            f"at least {need}",
            fix,
        )


@rule(
    "rollout.bucket",
    "error",
    "the largest tensor fits in a bucket of the weight sync",
    why="the sender asserts 'too large to fit in the bucket', after the model and the engines were loaded",
    fix="raise update_weights_bucket_megabytes",
)
def rollout_bucket(s):
    yield from _bucket(s, WEIGHT_BYTES)


@rule(
    "rollout.bucket_full",
    "warning",
    "the largest tensor fits in a bucket in float32 too, which FSDP sends",
    why="verl's FSDP worker keeps the parameters in float32 and does not convert them before it sends them",
    fix="raise update_weights_bucket_megabytes",
)
def bucket_full(s):
    full = s.get(f"{ACTOR}.fsdp_config.model_dtype", "fp32") in ("fp32", "float32")
    if s.fsdp and full and not any(_bucket(s, WEIGHT_BYTES)):
        yield from _bucket(s, 4)


@rule(
    "data.unfiltered",
    "warning",
    "prompts that are too long are filtered where truncation=error is asked for",
    why="one prompt longer than max_prompt_length ends the run in the step that meets it: the rollout pads "
    "prompts to that length and does not cut them",
    fix="data.filter_overlong_prompts=True",
)
def data_unfiltered(s):
    key = "data.filter_overlong_prompts"
    asked = s.get("data.truncation") == "error" and "data.truncation" in s.given
    if s.vllm and asked and not s.get(key):
        yield key, "False, with truncation=error", "data.filter_overlong_prompts=True", s.override(key, True)
