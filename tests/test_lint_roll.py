"""ROLL's recipes have no findings, each mistake has its own, and ROLL's classes agree if ROLL is present."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from ascend_rl.lint.lint import lint as lint_script
from ascend_rl.lint.roll import CONF, ROLL, RULES, Setup, compose, devices, launch, lint, unknown_key
from ascend_rl.settings.switch import CannotWork

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(path.stem for path in CONF.glob("*_*.yaml"))
RESOURCES = sorted(path.stem for path in (CONF / "resources").glob("*.yaml"))
RLVR, AGENTIC, TWO_NODES = "rlvr_qwen3_8b", "agentic_frozen_lake_qwen2_5_0_5b", "rlvr_qwen2_5_7b_2nodes"
ENV = {"VLLM_ASCEND_ENABLE_NZ": "0"}  # as internal/roll/roll_env.sh sets it


@pytest.fixture(autouse=True)
def variables(monkeypatch, tmp_path):
    """What the scripts export; the data is there, but empty."""
    for name in ("math_deepmath_deal.jsonl", "code_KodCode_data.jsonl"):
        (tmp_path / name).touch()
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path / "out"))
    monkeypatch.setenv("ROLL_DATA", str(tmp_path))
    monkeypatch.delenv("MODEL_PATH", raising=False)


def found(name: str, *overrides: str, npus_per_node: int | None = None, env=ENV) -> list[tuple[str, str]]:
    findings = lint(compose(name, overrides), npus_per_node, env)
    return [(finding.severity, finding.check) for finding in findings]


@pytest.mark.parametrize("resources", RESOURCES)
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_have_no_findings_with_any_resources(name, resources):
    assert {RLVR, AGENTIC, TWO_NODES} == set(RECIPES) and len(RESOURCES) == 5
    config = compose(name, [f"resources={resources}"])
    assert lint(config, config["resources"]["npus_per_node"], ENV) == []


@pytest.mark.parametrize("name", RECIPES)
def test_scripts_start_their_recipe(name):
    scripts = (ROOT / "internal/roll").glob("train_*.sh")
    (script,) = [path for path in scripts if f"\nroll {name} " in path.read_text()]
    result = subprocess.run(
        ["bash", script, "max_steps=2"],
        env=os.environ | {"DRY_RUN": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    run = json.loads(result.stdout)
    assert (run["module"], run["args"]) == ("ascend_rl.launch.start_roll", [name, "max_steps=2"])
    assert compose(run["args"][0], run["args"][1:])["max_steps"] == 2
    assert lint(compose(name), env=run["env"]) == []


# Mistakes: overrides, and what must be found; nothing else may be.
VLLM = "actor_infer.strategy_args.strategy_config"
MISTAKES = [
    (RLVR, ["actor_infer.device_mapping='list(range(4,12))'"], "error roll.colocated"),
    (RLVR, ["reference.device_mapping='list(range(0,8))'"], "error roll.colocated"),
    (RLVR, ["actor_train.device_mapping='[0,1,2,3,4,5,6,6]'"], "error roll.device_mapping"),
    (RLVR, ["actor_train.device_mapping=\"__import__('os').getcwd()\""], "error roll.device_mapping"),
    (RLVR, ["reference.device_mapping=null"], "error roll.reference"),
    (RLVR, ["+init_kl_coef=0"], "info roll.reference_unused"),
    (AGENTIC, ["init_kl_coef=0.1"], "error roll.reference"),
    (
        AGENTIC,
        [
            "init_kl_coef=0.1",
            "+reference.device_mapping='list(range(4,8))'",
            "+reference.strategy_args.strategy_name=hf_infer",
        ],
        "error roll.reference",
    ),
    (RLVR, ["resources.npus_per_node=8"], "error roll.nodes"),
    (TWO_NODES, ["resources.nodes=3"], "error roll.nodes"),
    (RLVR, [f"+{VLLM}.tensor_parallel_size=3"], "error roll.world_size"),
    (TWO_NODES, ["resources=2x8_spread", f"+{VLLM}.tensor_parallel_size=8"], "warning roll.engine_nodes"),
    (RLVR, ["actor_train.strategy_args.strategy_name=megatron_train"], "error roll.strategy"),
    (RLVR, ["actor_train.strategy_args.strategy_name=fsdp2_train"], "error roll.strategy"),
    (RLVR, ["reference.strategy_args.strategy_name=megatron_infer"], "error roll.strategy"),
    (RLVR, ["deepspeed.zero_optimization.stage=2"], "warning roll.zero_stage"),
    (RLVR, ["actor_train.model_args.attn_implementation=flash_attn"], "error roll.attention"),
    (RLVR, ["actor_train.training_args.gradient_accumulation_steps=24"], "error roll.batch"),
    (AGENTIC, ["rollout_batch_size=1000"], "warning roll.batch_adjusted"),
    (AGENTIC, ["train_env_manager.num_groups_partition=[100]"], "error roll.batch"),
    (AGENTIC, ["val_batch_size=1000"], "error roll.batch"),
    (RLVR, [f"{VLLM}.max_model_len=8000"], "error roll.length"),  # as published: 2048 + 8192 do not fit
    (RLVR, ["response_length=null"], "error roll.length"),
    (AGENTIC, [f"+{VLLM}.max_model_len=4096"], "error roll.length"),
    (
        RLVR,
        [
            "~actor_infer.system_envs.PYTORCH_NPU_ALLOC_CONF",
            "+system_envs.PYTORCH_NPU_ALLOC_CONF='expandable_segments:True'",
        ],  # as published
        "error roll.variable",
    ),
    (RLVR, ["actor_infer.system_envs.TASK_QUEUE_ENABLE='2'"], "warning roll.task_queue"),
    (RLVR, ["+system_envs.OMP_NUM_THREADS=1"], "error roll.variable"),
    (RLVR, ["+system_envs.NPU_MEMORY_FRACTION='0.96'"], "info roll.unread"),
    (RLVR, ["+system_envs.VLLM_ASCEND_ENABLE_NZ='1'"], "error roll.variable"),
    (TWO_NODES, ["actor_train.data_args.domain_interleave_probs.math_rule=0.6"], "error roll.reward"),
    (TWO_NODES, ["~rewards.code_sandbox"], "error roll.reward"),
    (RLVR, ["+rewards.unused.tag_included=[unused]"], "warning roll.reward_unused"),
    (TWO_NODES, ["rewards.code_sandbox.tag_included=[KodCode,aime]"], "error roll.reward"),
    (RLVR, ["actor_train.data_args.file_name=/none/data.jsonl"], "warning roll.data"),
]


def test_every_rule_has_a_mistake_and_is_documented():
    elsewhere = {"roll.launch", "roll.unknown_key"}
    assert {rule.id for rule in RULES} == {expected.split()[1] for *_, expected in MISTAKES} | elsewhere
    assert [f"roll.{rule.find.__name__}" for rule in RULES] == [rule.id for rule in RULES]
    for page in ("roll.md", "roll.zh.md"):
        documented = set(re.findall(r"`(roll\.\w+)`", (ROOT / "docs" / page).read_text()))
        assert {rule.id for rule in RULES} <= documented


@pytest.mark.parametrize("name, overrides, expected", MISTAKES, ids=[" ".join(m[1]) for m in MISTAKES])
def test_each_mistake_is_found_and_nothing_else(name, overrides, expected):
    assert found(name, *overrides) == [tuple(expected.split())]


def test_what_the_machine_shows_counts():
    """ROLL numbers devices by what a node shows, so 2x8 lands on one A3 node."""
    assert found(TWO_NODES, npus_per_node=8) == []
    assert found(TWO_NODES, npus_per_node=16) == [("error", "roll.nodes")]
    assert found(RLVR, env={}) == [("error", "roll.variable")]
    assert found(RLVR, "+system_envs.VLLM_ASCEND_ENABLE_NZ='0'", env={}) == []


def test_devices_are_those_that_roll_evaluates():
    rng = random.Random(0)
    for _ in range(200):
        some = f"list(range({rng.randrange(9)},{rng.randrange(20)}))"
        parts = rng.choices([some, "[3, 1]", "list(range(4))", "list(range(0, 16, 2))"], k=rng.randint(1, 3))
        text = rng.choice(["+", " + "]).join(parts)
        assert devices(text) == eval(text)
    assert devices(None) == []


@pytest.mark.parametrize(
    "text", ["range(8)", "list(range(8)", "[i for i in range(8)]", "list(range(n))", "8", "['a']"]
)
def test_devices_refuses_what_is_no_list(text):
    with pytest.raises(CannotWork, match="is not a list of devices"):
        devices(text)


def test_batches_against_what_roll_does():
    """ROLL cuts the samples over the ranks, which go in step, then each rank's into updates, all full."""
    rng, seen = random.Random(0), set()
    base = compose(RLVR)
    for _ in range(300):
        ranks, micro, steps = rng.choice([1, 2, 3, 4, 8]), rng.choice([1, 2, 3]), rng.choice([1, 2, 4, 5, 8])
        prompts, group = rng.choice([4, 6, 15, 16, 32]), rng.choice([1, 2, 8])
        config = base | {"rollout_batch_size": prompts, "num_return_sequences_in_group": group}
        config["actor_train"] = base["actor_train"] | {
            "device_mapping": f"list(range({ranks}))",
            "training_args": {"per_device_train_batch_size": micro, "gradient_accumulation_steps": steps},
        }
        parts = np.array_split(np.arange(prompts * group), ranks)
        lengths = {len(part) for part in parts}
        works = len(lengths) == 1 and lengths.pop() % (micro * steps) == 0
        bad = ("error", "roll.batch") in [(f.severity, f.check) for f in lint(config, None, ENV)]
        assert bad != works, (prompts, group, ranks, micro, steps)
        seen.add(works)
    assert seen == {True, False}


@pytest.mark.parametrize(
    "nodes, environ, wrong",
    [
        (1, {}, None),
        (2, {"RAY_ADDRESS": "10.0.0.1:6379"}, None),
        (2, {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "10.0.0.1"}, None),
        (2, {}, "WORLD_SIZE"),
        (1, {"WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}, "WORLD_SIZE"),
        (2, {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "10.0.0.1"}, "RANK"),
        (2, {"WORLD_SIZE": "2", "RANK": "<rank>", "MASTER_ADDR": "10.0.0.1"}, "RANK"),
        (2, {"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR"),
        (2, {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1"}, "MASTER_ADDR"),
        (2, {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "<HEAD_IP>"}, "MASTER_ADDR"),
    ],
)
def test_rank_variables(nodes, environ, wrong):
    config = {"resources": {"nodes": nodes}}
    assert [hit[0] for hit in launch(Setup(config, env=environ, starting=object))] == (
        [wrong] if wrong else []
    )
    assert not list(launch(Setup(config, env=environ)))


def test_unknown_keys():
    @dataclass
    class Inner:
        attn_implementation: str = ""

    @dataclass
    class Outer:
        model_args: Inner = field(default_factory=Inner)
        rewards: dict[str, Inner] | None = None
        free: dict | None = None

    globals().update(Inner=Inner)  # the annotations are strings, which are looked up here
    config = {
        "model_args": {"attn_implementatoin": 1},
        "free": {"anything": 1},
        "pipeline": "rlvr",
        "rewards": {"math": {"attn_implementation": 1, "x": 1}},
    }
    hits = list(unknown_key(Setup(config, starting=Outer)))
    assert [hit[0] for hit in hits] == ["model_args.attn_implementatoin", "rewards.math.x"]
    assert hits[0][2] == "did you mean attn_implementation?"


# With ROLL's sources. One process: importing its configuration takes seconds.

CHECK = """
import json, logging, sys
from ascend_rl.lint.lint import lint as lint_script
from ascend_rl.lint.roll import Setup, compose, unknown_key
from ascend_rl.launch.start_roll import PIPELINES, load
from dacite import from_dict
from roll.platforms import current_platform
logging.disable(logging.INFO)
type(current_platform).device_count = lambda self: shown  # the NPUs that a node shows
result = []
for name, overrides, shown in json.loads(sys.argv[1]):
    config = compose(name, overrides)
    kind = load(PIPELINES[config["pipeline"]][0])
    built = {"unknown": [hit[:2] for hit in unknown_key(Setup(config, starting=kind))]}
    try:
        settings = from_dict(kind, config)
        built |= {"nodes": settings.num_nodes, "train": settings.actor_train.world_size,
                  "infer": settings.actor_infer.world_size, "reference": settings.enable_reference}
    except Exception as error:
        built["error"] = f"{type(error).__name__}: {error}"
    result.append(built)
print("RESULT", json.dumps(result))
"""


@pytest.mark.weekly
@pytest.mark.skipif(not (ROLL / "roll").is_dir(), reason="no roll checkout")
def test_rolls_own_classes_agree(tmp_path):
    """They accept every recipe and drop no key of it; placement and KL are what the linter takes them for."""
    chosen = [
        (name, [f"resources={resources}"])
        for name in RECIPES
        for resources in RESOURCES
        if name != AGENTIC or resources in ("1x8", "2x8")
    ]
    recipes = [(name, overrides, compose(name, overrides)["resources"]) for name, overrides in chosen]
    cases = [(name, overrides, resources["npus_per_node"]) for name, overrides, resources in recipes]
    mistakes = [
        (TWO_NODES, [], 16),
        (RLVR, ["actor_train.strategy_args.strategy_name=magic_train"], 16),
        (RLVR, ["+actor_train.model_args.flash_attn=fa2"], 16),
        (RLVR, ["response_length=null"], 16),
        (AGENTIC, ["train_env_manager.num_groups_partition=[100]"], 8),
    ]
    command = [sys.executable, "-c", CHECK, json.dumps(cases + mistakes)]
    env = os.environ | {"PYTHONPATH": f"{ROLL}:{ROOT}"}
    run = subprocess.run(command, cwd=tmp_path, env=env, timeout=600, capture_output=True, text=True)
    assert "RESULT " in run.stdout, run.stderr[-3000:]
    results = json.loads(run.stdout.split("RESULT ")[1])
    for (name, overrides, resources), built in zip(recipes, results, strict=False):
        assert built == {
            "unknown": [],
            "nodes": resources["nodes"],
            "train": len(devices(resources["train"])),
            "infer": len(devices(resources["infer"])),
            "reference": name != AGENTIC,
        }, overrides
    one_node, strategy, key, length, groups = results[len(recipes) :]
    assert one_node["nodes"] == 1
    assert "strategy_name" in strategy["error"]
    assert [where for where, _ in key["unknown"]] == ["actor_train.model_args.flash_attn"]
    assert "error" not in key
    assert "AssertionError" in length["error"] and "AssertionError" in groups["error"]


@pytest.mark.parametrize("script", sorted(CONF.parent.glob("train_*.sh")), ids=lambda script: script.stem)
def test_preflight_lints_the_scripts(script, monkeypatch):
    monkeypatch.delenv("OUTPUT_DIR")
    environment = CONF.parent / "roll_env.sh"
    assert not [finding for finding in lint_script(script, environment) if finding.severity == "error"]
    # Training and rollout on the same NPUs, and an override that Hydra cannot read.
    shared = lint_script(
        script, environment, ["actor_train.device_mapping='[0,1]'", "actor_infer.device_mapping='[0,1]'"]
    )
    assert "roll.colocated" in {finding.check for finding in shared if finding.severity == "error"}
    wrong = lint_script(script, environment, ["actor_train.device_mapping=list(3)"])
    assert [finding.check for finding in wrong] == ["config.override"]
