"""Every switch on every recipe: something changes, or the recipe or the linter says no by name.

The switches are those of settings/switches.txt. What the ``Switch:`` lines of patches, the scripts and
NAME=VALUE in the pages document must be there; others are not a recipe's (LAUNCHER), or work wherever vLLM or
Ray does (ANYWHERE).
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from ascend_rl.launch import launch_plan
from ascend_rl.lint import lint, switch_table, switches, tuning  # noqa: F401  (lint fills RULES)
from ascend_rl.lint.dry_run import Run, dry_run, environment_script
from ascend_rl.lint.setup import RULES, Setup
from ascend_rl.lint.verl_config import Resolved, resolve
from ascend_rl.recipe import step_time
from ascend_rl.settings import stack
from ascend_rl.settings.switch import OFF
from ascend_rl.settings.switches import TAKEN, table

ROOT = Path(__file__).resolve().parent.parent
RECIPES = stack.recipes()
# Of the launcher, the rehearsal, the build and the machine: no recipe reads them.
LAUNCHER = {*launch_plan.SETTINGS} | set(
    """ASCEND_RL_PROGRESS DRY_RUN WARM_START SMOKE_DTYPE NPU_SERIES MASTER_ADDR MASTER_PORT NODES NNODES
    NPUS_PER_NODE RANK WORLD_SIZE PP RAY_AUTH_MODE RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER NAME SOFTWARE_NPU_CHIP
    SOFTWARE_NPU_VLLM_ASCEND PYTHONPATH PIP_EXTRA_INDEX_URL STACK VERL_PLATFORM
    VLLM_USE_AOT_COMPILE""".split()
)
# Read by every process of vLLM, torch_npu, CANN or Ray, whatever the recipe; env.value checks their values.
ANYWHERE = set(
    """ROLLOUT_DISABLE_GC ROLLOUT_SPIN_S VLLM_SLEEP_WHEN_IDLE CPU_AFFINITY_CONF MULTI_STREAM_MEMORY_REUSE
    CUDA_DEVICE_MAX_CONNECTIONS TASK_QUEUE_ENABLE RAY_DEDUP_LOGS ASCEND_LAUNCH_BLOCKING DYNAMIC_EPLB
    OMP_NUM_THREADS NUMBA_NUM_THREADS TQ_NUM_THREADS TORCHDYNAMO_DISABLE VLLM_CPU_KVCACHE_SPACE
    VLLM_ENABLE_CUDAGRAPH_GC PYTORCH_NPU_ALLOC_CONF""".split()
)
FOREIGN = re.compile(r"^(HCCL_(?!TP_)|VLLM_ASCEND_)")  # of CANN and vllm-ascend, with rules of their own


@cache
def documented() -> tuple[dict[str, str], dict[str, str]]:
    """{variable: value} and {key: value} that switch something, as documented."""
    patches = [file.read_text(errors="replace") for file in ROOT.glob("patches/*/*.patch")]
    scripts = [file.read_text() for file in ROOT.glob("internal/*.sh")]
    sources = [file.read_text() for file in (ROOT / "ascend_rl").rglob("*.py")]
    added = "\n".join(line for text in patches for line in text.splitlines() if line.startswith("+"))
    code = "\n".join([*scripts, *sources, added])
    trailers = " ".join(re.findall(r"^Switch: (.*)$", "\n".join(patches), re.M))
    pages = " ".join(file.read_text() for file in ROOT.glob("docs/*.md") if ".zh" not in file.suffixes)
    given = re.findall(r"\b([A-Z][A-Z0-9_]{2,})=([\w.:]+)", f"{pages} {trailers}")
    given += re.findall(r"\bswitched ([A-Z]\w+)()", code)
    given += re.findall(r"\$\{([A-Z]\w+):?-([01]|True|False)\}", "".join(scripts))
    variables: dict[str, str] = {}
    for name, value in given:
        if value in ("N", "STEPS"):  # placeholders
            continue
        read = re.search(rf"[\"']{name}[\"']|\$\{{{name}\b|env:{name}\b|switched {name}\b", code)
        if read and variables.get(name, "0").lower() in OFF:
            variables[name] = "1" if value in (*OFF, "False") else value
    keys = dict(re.findall(r"(?:^| )([a-z]\S*\.\S+?)(?:=(\S+)|(?= ))", trailers))
    return variables, keys


def recipes_own() -> dict[str, str]:
    """The switches that a recipe may have, without those of the launcher and of other frameworks."""
    return {
        name: value
        for name, value in documented()[0].items()
        if name not in LAUNCHER | ANYWHERE and not FOREIGN.match(name)
    }


def started(recipe: Path, **variables: str) -> Run:
    """The recipe with its environment script and the caller's variables, nothing started."""
    bare = {"PATH": os.environ["PATH"], "HOME": "/root", "NPUS_PER_NODE": "2"}
    if not recipe.stem.endswith("_cpu"):
        del bare["NPUS_PER_NODE"]
    return dry_run(recipe, environment_script(recipe), environ=bare | variables)


def said(run: Run, resolved: Resolved) -> str:
    """All that the rules say, and where."""
    setup = Setup(run, resolved, {})
    found = [finding for rule in RULES for finding in rule(setup)]
    return "\n".join(f"{one.where} {one.why} {one.fix}" for one in found if one.severity != "info")


VARIABLES = {switch.variable: switch for switch in table() if switch.variable}
# Read by scripts as inputs and places, of logs, or of the machine.
INPUTS = set(
    """MODEL_PATH TRAIN_FILE TEST_FILE DIST_CKPT_PATH DATA_DIR EP PP ROLL_DATA ROLL_LOG_DIR
    GLOO_SOCKET_IFNAME VLLM_HOST_IP PYTHONWARNINGS TOKENIZERS_PARALLELISM VERL_LOGGING_LEVEL
    VLLM_LOGGING_LEVEL VLLM_CPU_OMP_THREADS_BIND USE_MODELSCOPE""".split()
)


def test_the_table_has_every_switch():
    """Those that scripts read or the patches and pages document; tuning.yaml has those of frameworks."""
    tuned = {entry.name for entry in tuning.table()}
    files = [*ROOT.glob("internal/*.sh"), *ROOT.glob("internal/roll/*.sh")]
    scripts = "\n".join(file.read_text() for file in files if file.name != "common.sh")
    read = {
        *re.findall(r"\$\{([A-Z][A-Z0-9_]+):?[-=?]", scripts),
        *re.findall(r"\bswitched ([A-Z]\w+)", scripts),
    }
    assert len(read) > 60
    assert read - {*VARIABLES} - tuned - LAUNCHER - ANYWHERE - INPUTS == set()
    assert recipes_own().keys() - {*VARIABLES} == set()
    keys = documented()[1]
    assert keys["actor_rollout_ref.actor.compute_old_log_prob"] == "False" and len(keys) > 10


def test_every_switch_has_a_reader_and_a_page():
    for switch in table():
        name = switch.variable or switch.key.rpartition(".")[2]
        reader = ROOT / switch.reader
        files = [reader] if reader.is_file() else [*reader.glob("*.p*")]
        assert any(re.search(rf"\b(switch_)?{name}\b", file.read_text()) for file in files) or (
            switch.reader == "internal/recipe.sh" and switch.taken in ("value", "flag", "own")
        ), switch
        for language in ("", ".zh"):
            assert name in (ROOT / f"docs/{switch.page}{language}.md").read_text(), (switch, language)
        assert switch.taken in TAKEN and (switch.on or switch.taken == "key")


@pytest.mark.parametrize("language", ["", ".zh"])
def test_the_page_lists_the_switches(language):
    text = (ROOT / f"docs/recipes{language}.md").read_text()
    listed = text.partition("<!-- switches -->\n")[2].partition("<!-- /switches -->")[0]
    assert [line.split("|")[1].strip(" `") for line in listed.splitlines()[2:]] == [*VARIABLES]
    assert listed == switch_table.markdown(language.strip("."))


def test_step_time_knows_the_switches_by_their_names():
    words = [word for name, _, _ in step_time.SWITCHES for word in name.split() if "=" in word]
    named = {word.partition("=")[0] for word in words if word[0].isupper()}
    assert len(named) > 4 and named <= {*VARIABLES}


CASES = [  # the tiny ones make their data
    pytest.param(
        path,
        marks=pytest.mark.long if path.stem.startswith("train_grpo") and "tiny" in path.stem else (),
        id=path.stem[6:],
    )
    for path in RECIPES
]


@pytest.mark.parametrize("recipe", CASES)
def test_every_recipe_takes_or_refuses_every_switch(recipe):
    """As the matrix says; what only processes read, the linter names where it does nothing."""
    plain = started(recipe)
    base = resolve(plain.module, plain.args)
    fates = {name: switch_table.fate(plain, base, switch) for name, switch in VARIABLES.items()}
    left = {}
    for name, switch in VARIABLES.items():
        if switch.taken in ("run", "with") and name != "SMOKE":
            left[name] = "0" if plain.env.get(name) == switch.on else switch.on
            continue
        on = started(recipe, **{name: switch.on})
        assert (on.module == "") == (fates[name] == "refused"), (name, fates[name], on.errors)
        if on.module:
            has = str(Setup(plain, base, {}).get(switch.key)) == switch.on
            by_verl = name == "ROLLOUT_REBALANCE_ENABLE"  # which reads the variable
            assert on.args != plain.args or has or by_verl, name
        else:
            assert name in on.errors, (name, on.errors)
    del left["USE_HDP"]  # its fate asks the rules; with it on, HDP_COST_MODEL does something
    text = said(replace(plain, env=plain.env | left), base)
    does = {name: value for name, value in left.items() if value != "0"}
    idle = [name for name in does if fates[name] not in ("taken", "refused")]
    assert [name for name in idle if name not in text] == []


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem.removeprefix("train_"))
def test_every_documented_key_is_taken_or_refused_by_name(recipe):
    plain = started(recipe)
    base = resolve(plain.module, plain.args)
    keys = {key: value for key, value in documented()[1].items() if value}
    words = [f"{'' if key in base.defaults else '+'}{key}={value}" for key, value in keys.items()]
    one = resolve(plain.module, [*plain.args, *words])
    refused = {finding.where for finding in one.findings}
    got = Setup(plain, one, {})
    taken = {key for key, value in keys.items() if str(got.get(key)).replace(" ", "") == value}
    assert keys.keys() - taken <= refused


ON = {  # a variable or an override: a run in which it works, and one in which it does nothing
    "ENABLE_SAM=1": ("grpo_qwen3_32b_32die_true_weight", None),
    "VLLM_FUSED_MOE_CHUNK_SIZE=8192": (
        "grpo_qwen3_235b_128die_true_weight",
        "grpo_qwen3_32b_32die_true_weight",
    ),
    "ALL_TO_ALL_RESHARD=1": ("grpo_qwen3_235b_128die_true_weight", "gspo_qwen3_32b_64die_true_weight"),
    "USE_ALLTOALL_OVERLAP=1": ("grpo_qwen3_235b_128die_true_weight", "grpo_qwen3_32b_32die_true_weight"),
    "CORE_BINDING=1": ("grpo_qwen3_32b_32die_true_weight", "gspo_qwen3_tiny_cpu"),
    "ENABLE_NPUGRAPH_EX=1": ("gspo_qwen3_32b_64die_true_weight", "gspo_qwen3_tiny_cpu"),
    "NUM_SPECULATIVE_TOKENS=3": (None, "grpo_qwen3_32b_32die_true_weight"),
    "VLLM_SPECULATIVE_BATCH_SIZE_THRE=32": (None, "grpo_qwen3_32b_32die_true_weight"),
    "HDP_COST_MODEL=1,1,1,1,1": (None, "grpo_qwen3_235b_128die_true_weight"),
    f"+{switches.EXTRA}.sam_decoding.history=1": (None, "grpo_qwen3_32b_32die_true_weight"),
    f"+{switches.EXTRA}.graphs_by_rank=True": (
        "grpo_qwen3_235b_128die_true_weight",
        "grpo_qwen3_32b_32die_true_weight",
    ),
    f"+{switches.EXTRA}.eplb_policy_type=1": (None, "grpo_qwen3_235b_128die_true_weight"),
    "actor_rollout_ref.rollout.cudagraph_capture_sizes=[8]": (
        "grpo_qwen3_32b_32die_true_weight",
        "gspo_qwen2_5_3b_8die_fsdp",
    ),
    "actor_rollout_ref.rollout.rollout_rebalance.send_kv_tokens=64": (
        None,
        "grpo_qwen3_32b_32die_true_weight",
    ),
}


@pytest.mark.parametrize("switch", ON, ids=lambda text: text[-36:])
def test_the_linter_says_what_does_nothing(switch):
    name, _, value = switch.partition("=")
    works, idle = ON[switch]
    for recipe, expected in ((works, False), (idle, True)):
        if recipe:
            variables = {name: value} if name.isupper() else {}
            run = started(ROOT / f"internal/train_{recipe}.sh", **variables)
            resolved = resolve(run.module, [*run.args, *([] if variables else [switch])])
            found = [where for where, _ in switches.idle(Setup(run, resolved, {}))]
            assert any(where.lstrip("$") in name for where in found) == expected, (recipe, found)


def test_a_switch_that_is_neither_on_nor_off_is_refused():
    for name in ("ENABLE_SAM", "ROLLOUT_REBALANCE_ENABLE", "SMOKE"):
        recipe = ROOT / "internal/train_grpo_qwen3_32b_32die_true_weight.sh"
        run = started(recipe, **{name: "yes"})
        assert not run.module and f"{name}=yes: give 1 or 0" in run.errors
        assert started(recipe, **{name: "true"}).args == started(recipe, **{name: "1"}).args
