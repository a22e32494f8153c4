"""Every recipe of internal/: verl accepts its configuration, which is as published and fits the dies.

Nothing runs here; tests/e2e/test_recipes_smoke.py rehearses them. SMOKE=1 may change only sizes: the keys it
may touch are listed below, and so is how each recipe without a code path of its own differs from one that has
it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import published_recipes
import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

from ascend_rl.lint.dry_run import environment_script
from ascend_rl.lint.lint import lint
from ascend_rl.lint.tuning import table
from ascend_rl.settings import stack
from verl.utils.config import omega_conf_to_dataclass

INTERNAL = Path(__file__).resolve().parent.parent / "internal"
NAMES = [path.stem.removeprefix("train_") for path in stack.recipes() if "tiny" not in path.stem]
# layers, attention heads, query groups, experts
MODELS = {"235b": (94, 64, 4, 128), "30b": (48, 32, 4, 128), "32b": (64, 64, 8, 0), "3b": (36, 16, 2, 0)}
TRANSFORMER = "actor_rollout_ref.actor.megatron.override_transformer_config"

# What SMOKE=1 may change, as in internal/smoke_layout.sh.
SIZES = (
    """
actor_rollout_ref.model.path data.train_files data.val_files data.train_batch_size data.max_prompt_length
data.max_response_length data.dataloader_num_workers actor_rollout_ref.rollout.n
actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.ppo_max_token_len_per_gpu
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu
actor_rollout_ref.rollout.tensor_model_parallel_size actor_rollout_ref.rollout.data_parallel_size
actor_rollout_ref.rollout.expert_parallel_size actor_rollout_ref.rollout.max_model_len
actor_rollout_ref.rollout.max_num_seqs actor_rollout_ref.rollout.max_num_batched_tokens
actor_rollout_ref.rollout.agent.num_workers
actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes
actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override reward.num_workers
actor_rollout_ref.rollout.cudagraph_capture_sizes
reward.reward_kwargs.max_resp_len reward.reward_kwargs.overlong_buffer_cfg.len
actor_rollout_ref.actor.ulysses_sequence_parallel_size
actor_rollout_ref.actor.megatron.tensor_model_parallel_size
actor_rollout_ref.actor.megatron.pipeline_model_parallel_size
actor_rollout_ref.actor.megatron.context_parallel_size
actor_rollout_ref.actor.megatron.expert_model_parallel_size
actor_rollout_ref.actor.megatron.dist_checkpointing_path
actor_rollout_ref.ref.megatron.dist_checkpointing_path actor_rollout_ref.actor.optim.lr_warmup_steps
trainer.nnodes trainer.n_gpus_per_node
trainer.total_training_steps trainer.val_before_train trainer.test_freq
trainer.resume_mode
""".split()
    + [
        f"{TRANSFORMER}.{key}"  # of as many ranks and stages
        for key in """
context_parallel_size pipeline_num_transformer_layers num_layers_in_first_pipeline_stage
num_layers_in_last_pipeline_stage
""".split()
    ]
)
NAMING = {"trainer.experiment_name", "trainer.default_local_dir"}

# Recipes with no code path of their own: the one that has it, and how its smoke run differs from that one's.
DAPO_LOSS = {
    "algorithm.kl_ctrl.kl_coef",
    "algorithm.rollout_correction.rollout_is",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.kl_loss_coef",
    "actor_rollout_ref.actor.clip_ratio_high",
    "actor_rollout_ref.actor.clip_ratio_c",
    "reward.reward_manager.name",
    "reward.reward_kwargs.max_resp_len",
    "algorithm.filter_groups.enable",
    *(
        f"reward.reward_kwargs.overlong_buffer_cfg.{key}"
        for key in ("enable", "len", "penalty_factor", "log")
    ),
}
GSPO_LOSS = {
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.actor.clip_ratio_low",
    "actor_rollout_ref.actor.clip_ratio_high",
}
WITHOUT_CHECKPOINTS = ("gspo_qwen2_5_3b_8die_engine_workers",)
TWINS = {
    "grpo_qwen3_235b_128die_random_init": (
        "grpo_qwen3_235b_128die_true_weight",
        {
            "actor_rollout_ref.actor.load_weight",
            "actor_rollout_ref.ref.load_weight",
            "actor_rollout_ref.actor.use_dynamic_bsz",
            "actor_rollout_ref.rollout.gpu_memory_utilization",
            "trainer.save_freq",  # random weights are not kept
            *(
                f"actor_rollout_ref.{part}.megatron.{key}"
                for part in ("actor", "ref")
                for key in ("use_dist_checkpointing", "dist_checkpointing_path")
            ),
        },
    ),
    "gspo_qwen3_235b_128die_true_weight": (
        "grpo_qwen3_235b_128die_true_weight",
        GSPO_LOSS
        | {
            "actor_rollout_ref.actor.use_kl_loss",
            "actor_rollout_ref.actor.kl_loss_coef",
            "algorithm.kl_ctrl.kl_coef",
            "actor_rollout_ref.actor.compute_old_log_prob",
            "data.train_batch_size",
        },
    ),
    "dapo_qwen3_32b_32die_true_weight": ("grpo_qwen3_32b_32die_true_weight", DAPO_LOSS),
    "grpo_qwen3_30b_a3b_16die_true_weight": ("gspo_qwen3_30b_a3b_16die_true_weight", GSPO_LOSS),
}


def dry_run(name: str, script: Path | None = None, **variables: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k not in ("NNODES", "NPUS_PER_NODE", "SMOKE")}
    return subprocess.run(
        ["bash", script or INTERNAL / f"train_{name}.sh"],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment | {"DRY_RUN": "1"} | variables,
    )


def resolve(arguments: list[str]):
    """The configuration that verl would get."""
    import verl

    name = next((a.split("=")[1] for a in arguments if a.startswith("--config-name=")), "ppo_trainer")
    overrides = get_args_parser().parse_args(arguments).overrides  # which refuses an option behind them
    overrides = [override for override in overrides if not override.startswith("hydra.")]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        return compose(name, overrides)


@pytest.fixture(scope="module")
def lists() -> dict[tuple[str, bool], list[str]]:
    """(recipe, smoke) -> its arguments."""

    def arguments(case):
        run = dry_run(case[0], SMOKE=str(int(case[1])))
        assert run.returncode == 0, run.stderr
        printed = json.loads(run.stdout)
        assert printed["module"] == "verl.trainer.main_ppo"
        return case, printed["args"]

    with ThreadPoolExecutor(4) as pool:
        return dict(pool.map(arguments, [(name, smoke) for name in NAMES for smoke in (False, True)]))


@pytest.fixture(scope="module")
def configs(lists):
    """(recipe, smoke) -> its configuration."""
    return {case: resolve(arguments) for case, arguments in lists.items()}


def flat(config, prefix: str = "") -> dict[str, object]:
    """Leaves by their dotted names, references unresolved."""
    leaves = {}
    for key, value in OmegaConf.to_container(config).items() if prefix == "" else config.items():
        name = f"{prefix}{key}"
        leaves |= flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return leaves


def differences(one, other) -> set[str]:
    one, other = flat(one), flat(other)
    return {key for key in one.keys() | other.keys() if one.get(key, "absent") != other.get(key, "absent")}


def model_of(name: str) -> tuple[int, int, int, int]:
    return next(shape for size, shape in MODELS.items() if f"_{size}_" in name)


def environment_of(name: str) -> str:
    """The environment script of a recipe, "qwen3_235b" of qwen3_235b_env.sh."""
    return environment_script(INTERNAL / f"train_{name}.sh").name.removesuffix("_env.sh")


def test_no_block_of_settings_stands_in_two_scripts():
    scripts: dict[tuple[str, ...], set[str]] = {}
    for path in INTERNAL.rglob("*.sh"):
        lines = [line.strip() for line in path.read_text().splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        for index in range(len(lines) - 3):
            scripts.setdefault(tuple(lines[index : index + 4]), set()).add(path.name)
    assert not {block: names for block, names in scripts.items() if len(names) > 1}


def test_the_matrix_is_complete():
    assert set(TWINS) < set(NAMES) and len(NAMES) == 11


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("smoke", [False, True])
def test_verl_accepts_the_configuration(configs, name, smoke):
    """Unknown keys, and + on known ones, fail in `configs` already; here verl's own checks."""
    from verl.experimental.reward_loop import migrate_legacy_reward_impl
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = migrate_legacy_reward_impl(configs[name, smoke].copy())
    OmegaConf.resolve(config)
    validate_config(config, use_reference_policy=config.actor_rollout_ref.actor.use_kl_loss, use_critic=False)
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert Path(config.reward.custom_reward_function.path).name == "math_reward.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_weighs_the_same_however_batches_are_split(configs, name):
    assert configs[name, False].actor_rollout_ref.actor.whole_batch_loss


@pytest.mark.parametrize("name", NAMES)
def test_a_right_answer_at_the_length_limit_earns_more_than_any_wrong_one(configs, name):
    """Whatever its length: the penalty reaches penalty_factor, half of the range of rewards."""
    from ascend_rl.recipe.math_reward import compute_score

    right, wrong = (compute_score("", f"Answer: {answer}", "1")["score"] for answer in (1, 2))
    config = configs[name, False]
    kwargs = config.reward.get("reward_kwargs") or {}
    penalty = kwargs.get("overlong_buffer_cfg")
    assert (penalty is None) == (config.reward.reward_manager.name != "dapo")
    if penalty is not None:
        assert right - penalty.penalty_factor >= (right + wrong) / 2
        assert kwargs.max_resp_len == config.data.max_response_length > penalty.len


@pytest.mark.parametrize("name", NAMES)
def test_the_linter_has_nothing_against_it(name, monkeypatch):
    """Wherever this checkout is: one below /tmp is on no storage that nodes share."""
    for variable in ("MODEL_PATH", "DIST_CKPT_PATH", "OUTPUT_DIR"):
        monkeypatch.setenv(variable, f"/shared/{variable.lower()}")
    found = lint(INTERNAL / f"train_{name}.sh", INTERNAL / f"{environment_of(name)}_env.sh")
    serious = {finding.check for finding in found if finding.severity != "info"}
    assert serious == ({"train.saves_nothing"} if name in WITHOUT_CHECKPOINTS else set())


ODD = "\u914d\u65b9 #1 (it's),[a]=b&c;{d}"


@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_directory_reaches_verl(name, tmp_path):
    """Of the checkout, the model, the data and the outputs; ODD has what Hydra's grammar refuses unquoted."""
    checkout = tmp_path / ODD
    checkout.mkdir()
    for part in ("internal", "ascend_rl", ".venv"):
        (checkout / part).symlink_to(INTERNAL.parent / part)
    places = {"MODEL_PATH": f"/m/{ODD}", "TRAIN_FILE": f"{ODD}/x.parquet", "OUTPUT_DIR": f"/o/{ODD}"}
    run = dry_run(name, script=checkout / f"internal/train_{name}.sh", **places)
    assert run.returncode == 0, run.stderr
    config = resolve(json.loads(run.stdout)["args"])
    assert config.actor_rollout_ref.model.path == places["MODEL_PATH"]
    assert config.data.train_files == places["TRAIN_FILE"]
    assert config.data.val_files.startswith(f"{checkout}/data/")
    assert config.trainer.default_local_dir == f"/o/{ODD}/checkpoints"
    assert config.trainer.experiment_name == ODD
    assert config.reward.custom_reward_function.path == f"{checkout}/ascend_rl/recipe/math_reward.py"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_said_twice(lists, name):
    keys = [argument.lstrip("+").partition("=")[0] for argument in lists[name, False]]
    assert len(keys) == len(set(keys)), sorted(key for key in set(keys) if keys.count(key) > 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_model_fits_the_dies(configs, name):
    config = configs[name, False]
    layers, heads, groups, experts = model_of(name)
    actor, rollout, data = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.data
    dies = config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert dies == int(name.partition("die")[0].rpartition("_")[2])
    longest = data.max_prompt_length + data.max_response_length
    if actor.strategy == "megatron":
        m = actor.megatron
        tp, pp, cut = m.tensor_model_parallel_size, m.pipeline_model_parallel_size, m.context_parallel_size
        assert dies % (tp * pp * cut) == 0 and groups % tp == 0
        ends = m.override_transformer_config.get("num_layers_in_first_pipeline_stage")
        assert layers % pp == 0 if ends is None else (layers - 2 * ends) % (pp - 2) == 0
        if experts:
            ep = m.expert_model_parallel_size
            assert experts % ep == 0 and dies % (ep * m.expert_tensor_parallel_size * pp) == 0
        data_parallel = dies // (tp * pp * cut)
    else:
        cut = actor.ulysses_sequence_parallel_size
        assert dies % cut == 0 and heads % cut == 0
        data_parallel = dies // cut
    if actor.use_dynamic_bsz:
        reference = config.actor_rollout_ref.ref
        budgets = (
            actor.ppo_max_token_len_per_gpu,
            reference.log_prob_max_token_len_per_gpu,
            rollout.log_prob_max_token_len_per_gpu,
        )
        assert all(budget * cut >= longest for budget in budgets)
    assert data.train_batch_size % actor.ppo_mini_batch_size == 0
    assert actor.ppo_mini_batch_size * rollout.n % data_parallel == 0
    # The rollout.
    replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    assert dies % replica == 0 and (groups % rollout.tensor_model_parallel_size == 0)
    assert rollout.expert_parallel_size in (1, replica)
    if rollout.data_parallel_size > 1:
        assert rollout.expert_parallel_size == replica and experts % replica == 0
    assert rollout.max_model_len == rollout.max_num_batched_tokens == longest
    if not rollout.enforce_eager:
        sizes = list(rollout.cudagraph_capture_sizes)
        assert sizes == sorted(sizes) and sizes[-1] == rollout.max_num_seqs
        assert rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode == "FULL_DECODE_ONLY"


GRAPHS_235B, GRAPHS_DAPO, GRAPHS_32B = [32, 64, 128, 256], [8, 16, 32, 64], [16, 32, 64, 128]


@pytest.mark.parametrize(
    ("name", "published"),
    {
        "grpo_qwen3_235b_128die_random_init": (
            8,
            32768,
            512,
            256,
            GRAPHS_235B,
            0.85,
            (4, 4, 8, 32),
            (4, 32, 128),
        ),
        "grpo_qwen3_235b_128die_true_weight": (
            8,
            32768,
            512,
            256,
            GRAPHS_235B,
            0.87,
            (4, 4, 4, 32),
            (4, 32, 128),
        ),
        "dapo_qwen3_235b_128die_true_weight": (
            8,
            34816,
            128,
            64,
            GRAPHS_DAPO,
            0.85,
            (4, 4, 4, 32),
            (4, 32, 128),
        ),
        "grpo_qwen3_32b_32die_true_weight": (2, 34816, 32, 128, GRAPHS_32B, 0.87, (8, 2, 2, 1), (8, 1, 1)),
        "dapo_qwen3_32b_32die_true_weight": (2, 34816, 32, 128, GRAPHS_32B, 0.87, (8, 2, 2, 1), (8, 1, 1)),
    }.items(),
)
def test_published_parameters(configs, name, published):
    config = configs[name, False]
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    m = actor.megatron
    assert published == (
        config.trainer.nnodes,
        config.data.max_response_length,
        config.data.train_batch_size,
        rollout.max_num_seqs,
        rollout.cudagraph_capture_sizes,
        rollout.gpu_memory_utilization,
        (
            m.tensor_model_parallel_size,
            m.pipeline_model_parallel_size,
            m.context_parallel_size,
            m.expert_model_parallel_size,
        ),
        (rollout.tensor_model_parallel_size, rollout.data_parallel_size, rollout.expert_parallel_size),
    )
    assert (config.data.max_prompt_length, rollout.n, rollout.temperature) == (2048, 16, 0.9)
    assert (actor.optim.lr, actor.optim.clip_grad) == (1e-6, 10000)
    assert (rollout.top_k, rollout.top_p) == ((50, 0.9) if "235b" in name else (-1, 1))
    if name.startswith("dapo"):
        assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.28, 10)
        correction = config.algorithm.rollout_correction
        assert (correction.rollout_is, correction.rollout_is_threshold) == ("token", 2)
        assert not actor.use_kl_loss
        assert not config.reward.reward_kwargs.overlong_buffer_cfg.enable
        groups = config.algorithm.filter_groups
        assert (groups.enable, groups.metric, groups.max_num_gen_batches) == (True, "acc", 10)
    else:
        assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 0.001, "low_var_kl")


@pytest.mark.parametrize(("page", "language"), [("recipes.md", "en"), ("recipes.zh.md", "zh")])
def test_the_page_shows_what_differs_from_the_published_recipes(page, language):
    text = (INTERNAL.parent / "docs" / page).read_text()
    shown = text.partition("<!-- published -->\n")[2].partition("<!-- /published -->")[0]
    assert shown == published_recipes.table(language)


def test_a_difference_from_the_published_needs_a_reason(monkeypatch):
    resolved = published_recipes.resolved
    monkeypatch.setattr(
        published_recipes, "resolved", lambda name, key: 2 if key == "rollout.n" else resolved(name, key)
    )
    with pytest.raises(ValueError, match=r"rollout.n: .*published 16"):
        published_recipes.table("en")


def test_nothing_else_is_said_to_be_as_published():
    files = [*(INTERNAL.parent / "docs").glob("*.md"), *INTERNAL.rglob("*.sh"), INTERNAL.parent / "README.md"]
    said = [
        file.name
        for file in files
        if re.search(r"\bas published|\u4e0e\u516c\u5f00\u65b9\u6848\u4e00\u6837", file.read_text())
    ]
    assert said == []


@pytest.mark.parametrize("name", NAMES)
def test_smoke_changes_sizes_only(lists, configs, name):
    plain, smoke = lists[name, False], lists[name, True]
    assert smoke[: len(plain)] == plain  # the recipe's own list, then the overlay
    changed = differences(configs[name, False], configs[name, True])
    assert changed <= {*SIZES}
    rehearsed = configs[name, True]
    assert (
        rehearsed.trainer.device == "npu"
        and not rehearsed.actor_rollout_ref.rollout.enforce_eager
        or "3b_" in name
    )
    updates = 8 if "_30b_" in name else 4 if "gspo" in name else 1
    for config in (configs[name, False], configs[name, True]):
        assert config.data.train_batch_size == updates * config.actor_rollout_ref.actor.ppo_mini_batch_size


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_differs_by_what_is_listed(configs, name):
    like, by = TWINS[name]
    assert like not in TWINS
    assert differences(configs[name, True], configs[like, True]) - NAMING == by


def test_the_twins_differ_by_what_their_names_say(configs):
    engine, legacy = (configs[f"gspo_qwen2_5_3b_8die_{kind}", False] for kind in ("engine_workers", "fsdp"))
    assert differences(engine, legacy) - NAMING == {"trainer.use_legacy_worker_impl", "trainer.save_freq"}
    gspo, grpo = (configs[f"{kind}_qwen3_30b_a3b_16die_true_weight", False] for kind in ("gspo", "grpo"))
    assert differences(gspo, grpo) - NAMING == GSPO_LOSS


def test_four_nodes_give_the_published_layout_of_the_30b():
    config = resolve(json.loads(dry_run("gspo_qwen3_30b_a3b_16die_true_weight", NNODES="4").stdout)["args"])
    assert config.actor_rollout_ref.actor.megatron.expert_model_parallel_size == 8
    assert config.actor_rollout_ref.rollout.data_parallel_size == 8


@pytest.mark.parametrize(
    ("name", "variables", "message"),
    [
        ("grpo_qwen3_235b_128die_true_weight", {"NNODES": "3"}, "multiple of TP x PP x CP = 4 x 4 x 4: 48"),
        ("grpo_qwen3_235b_128die_random_init", {"NNODES": "16"}, "128 experts over 256 dies"),
        (
            "grpo_qwen3_32b_32die_true_weight",
            {"NPUS_PER_NODE": "8"},
            "multiple of TP x PP x CP = 8 x 2 x 2: 16",
        ),
        (
            "gspo_qwen3_32b_64die_true_weight",
            {"DRY_RUN": "0"},
            "bash download_weights.sh Qwen/Qwen3-32B --out",
        ),
        (
            "gspo_qwen2_5_3b_8die_fsdp",
            {"DRY_RUN": "0", "MODEL_PATH": "data/tiny/model"},
            "ascend_rl.data gsm8k",
        ),
    ],
)
def test_what_is_missing_or_does_not_fit_is_said(tiny, root, tmp_path, name, variables, message):
    paths = {"MODEL_PATH": str(tmp_path), "TRAIN_FILE": str(tmp_path / "none")} | variables
    paths["MODEL_PATH"] = str(root / paths["MODEL_PATH"])
    run = dry_run(name, **paths)
    assert run.returncode == 1 and message in run.stderr and not run.stdout


def environment(name: str, **variables: str) -> dict[str, str]:
    """What an environment script exports."""
    command = ["bash", "-euo", "pipefail", "-c", f". {INTERNAL}/{name}_env.sh; env -0"]
    run = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"} | variables
    )
    return dict(entry.split("=", 1) for entry in run.stdout.split("\0") if "=" in entry)


@pytest.mark.parametrize("name", NAMES)
def test_one_communication_domain_has_aiv(name):
    """CANN documents AIV for one domain at a time; vllm-ascend#14928 hangs where all have it."""
    variables = environment(environment_of(name))
    assert "HCCL_OP_EXPANSION_MODE" not in variables  # of all domains of all processes
    run = dry_run(name, **{key: variables[key] for key in variables if "EXPANSION" in key})
    vllm = resolve(json.loads(run.stdout)["args"]).actor_rollout_ref.rollout.engine_kwargs.vllm
    assert vllm.additional_config.hccl_op_expansion_mode == {"tp": "AIV"}


def test_torch_npu_is_told_to_bind_only_with_ranges():
    """Without them it takes a Ray worker's die for number 0: mode 2 puts all main threads on CPU 0."""
    (entry,) = (entry for entry in table() if entry.name == "CPU_AFFINITY_CONF")
    assert entry.value == "0" and entry.advise is None
    kinds = sorted({environment_of(name) for name in NAMES})
    for name in (*kinds, "roll/roll"):
        assert environment(name, ROOT=str(INTERNAL.parent))["CPU_AFFINITY_CONF"] == entry.value


def test_vllm_waits_longer_for_a_step_than_hccl_for_a_rank():
    """Else the engine ends first, after 300 s, and nobody says which collective a rank was late for."""
    ours = "HCCL_EXEC_TIMEOUT", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
    for kind in sorted({environment_of(name) for name in NAMES} | {"roll/roll"}):
        for given in ({}, {ours[0]: "100"}, {ours[0]: "20000"}, {ours[0]: "0"}):
            found = environment(kind, ROOT=str(INTERNAL.parent), **given)
            hccl, vllm = (int(found[variable]) for variable in ours)
            assert vllm > (hccl or 10**9)  # HCCL's 0: no limit
        assert environment(kind, ROOT=str(INTERNAL.parent), **{ours[1]: "7"})[ours[1]] == "7"


def test_environments_differ_between_a2_and_a3_and_yield_to_the_user():
    a3, a2 = environment("qwen3_235b"), environment("qwen3_235b", NPU_SERIES="a2")
    assert (a3["NPUS_PER_NODE"], a2["NPUS_PER_NODE"]) == ("16", "8")
    assert environment("qwen2_5_3b")["NPUS_PER_NODE"] == "8"  # of a recipe for 8 dies, on either
    hierarchical = {"HCCL_INTRA_PCIE_ENABLE", "HCCL_INTRA_ROCE_ENABLE"}  # of MC2, which A2 does not run
    assert not hierarchical & (a3.keys() | a2.keys())
    assert a3["USE_ALLTOALL_OVERLAP"] == a3["ALL_TO_ALL_RESHARD"] == a3["TASK_QUEUE_ENABLE"] == "1"
    assert "USE_ALLTOALL_OVERLAP" not in environment("qwen3_32b")
    assert environment("qwen2_5_3b")["TASK_QUEUE_ENABLE"] == "2"  # no graphs
    assert environment("qwen3_32b", TASK_QUEUE_ENABLE="0", HCCL_BUFFSIZE="9")["TASK_QUEUE_ENABLE"] == "0"
    with pytest.raises(subprocess.CalledProcessError):
        environment("qwen3_32b", NPU_SERIES="b7")


@pytest.mark.parametrize("name", ["grpo_qwen3_235b_128die_true_weight", "gspo_qwen2_5_3b_8die_fsdp"])
def test_profile_chooses_steps_and_ranks(name):
    """As verl's workers and rollout servers read the configuration: who profiles, what, and where to."""
    run = json.loads(dry_run(name, PROFILE="3,4:0,16", OUTPUT_DIR="/out").stdout)
    config = resolve(run["args"])
    whole, actor, rollout = (
        config.global_profiler,
        config.actor_rollout_ref.actor.profiler,
        config.actor_rollout_ref.rollout.profiler,
    )
    assert (whole.tool, list(whole.steps), whole.save_path) == ("npu", [3, 4], "/out/profile")
    for part in (actor, rollout):
        profiler = omega_conf_to_dataclass(part)
        tool = omega_conf_to_dataclass(part.tool_config.npu)
        assert profiler.enable and not profiler.all_ranks and profiler.ranks == [0, 16]
        assert (profiler.tool, profiler.save_path) == ("npu", "/out/profile")
        assert tool.contents == ["npu", "cpu"] and tool.discrete and tool.analysis
    assert resolve(
        json.loads(dry_run(name, PROFILE="7").stdout)["args"]
    ).actor_rollout_ref.actor.profiler.ranks == [0]
    assert not [word for word in json.loads(dry_run(name).stdout)["args"] if "profile" in word]


@pytest.mark.parametrize("value", ["0", "all", "3:", ":0", "3;4", "3,4:0,x"])
def test_a_wrong_profile_is_refused(value):
    run = dry_run("gspo_qwen2_5_3b_8die_fsdp", PROFILE=value)
    assert run.returncode == 1 and f"PROFILE={value}: give steps, or steps:ranks" in run.stderr


@pytest.mark.parametrize("name", NAMES)
def test_switches_of_the_rollout_reach_vllm(configs, name):
    switches = {"ENABLE_SAM": "1", "NUM_SPECULATIVE_TOKENS": "4", "ENABLE_NPUGRAPH_EX": "1",
                "ENABLE_STATIC_KERNEL": "1", "HCCL_TP_EXPANSION_MODE": "AI_CPU"}  # fmt: skip
    run = dry_run(name, **switches)
    vllm = resolve(json.loads(run.stdout)["args"]).actor_rollout_ref.rollout.engine_kwargs.vllm
    assert vllm.speculative_config == {"method": "sam", "num_speculative_tokens": 4}
    assert vllm.additional_config == {
        "bs_threshold_for_spec_decode": configs[name, False].actor_rollout_ref.rollout.max_num_seqs // 4,
        "enable_npugraph_ex": True,
        "enable_static_kernel": True,
        "hccl_op_expansion_mode": {"tp": "AI_CPU"},
    }


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("grpo_qwen3_235b_128die_true_weight", [4, 8, 16, 32, 64, 128, 256]),
        ("dapo_qwen3_235b_128die_true_weight", [4, 8, 16, 32, 64]),
        ("grpo_qwen3_32b_32die_true_weight", [8, 16, 32, 64, 128]),
        ("gspo_qwen3_30b_a3b_16die_true_weight", [4, 8, 16, 32, 64]),
        ("gspo_qwen3_32b_64die_true_weight", [4, 8, 16, 32, 64, 128, 192, 256]),
    ],
)
def test_moves_have_small_graphs_to_move_to(name, sizes):
    """Down to TP, of which sizes are multiples; without moves the published sizes stay."""
    chosen = {
        enabled: resolve(json.loads(dry_run(name, ROLLOUT_REBALANCE_ENABLE=enabled).stdout)["args"])
        for enabled in "01"
    }
    of = {enabled: list(c.actor_rollout_ref.rollout.cudagraph_capture_sizes) for enabled, c in chosen.items()}
    assert of["1"] == sizes and of["0"] == [size for size in sizes if size >= of["0"][0]] != sizes


WITHOUT_MINDSPEED = "import sys; sys.path[:] = [p for p in sys.path if not p.endswith('/mindspeed')]"


@pytest.mark.parametrize("name", NAMES)
def test_a_rehearsal_says_which_sources_it_needs_before_anything_starts(name, lists, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_MINDSPEED)
    command = ["bash", INTERNAL.parent / "ray_start_npu.sh", "--dry-run", INTERNAL / f"train_{name}.sh"]
    variables = {"SMOKE": "1", "PYTHONPATH": str(tmp_path), "OUTPUT_DIR": str(tmp_path / "out")}
    run = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=600)
    if "actor_rollout_ref.actor.strategy=megatron" in lists[name, True]:
        assert run.returncode == 1 and "download_frameworks_source_code.sh --only mindspeed" in run.stderr
        assert len(run.stderr.splitlines()) == 4
    else:
        assert "MindSpeed" not in run.stderr


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_the_doors_keep_everything_outside_the_container(readme):
    """What a run on NPUs reads and writes is below /data, which run_container.sh mounts."""
    blocks = re.findall(r"```bash\n(.*?)```", (INTERNAL.parent / readme).read_text(), re.S)
    doors = [block for block in blocks if "export MODEL_PATH" in block or "export NODES" in block]
    assert len(doors) == 2
    for block in doors:
        exports = "\n".join(line for line in block.splitlines() if line.startswith("export "))
        recipe, environment_script = re.search(
            r"(internal/train_\w+\.sh) (internal/\w+_env\.sh)", block
        ).groups()
        command = f"set -e; cd {INTERNAL.parent}; {exports}; . {environment_script}; DRY_RUN=1 bash {recipe}"
        run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        values = [argument.partition("=")[2].strip("'") for argument in json.loads(run.stdout)["args"]]
        places = {value for value in values if value.startswith("/") and not value.endswith("math_reward.py")}
        made = set(re.findall(r"(?:--out|--output_path) (\S+)", block))
        assert len(places) > 4 and all(place.startswith("/data/") for place in places)
        assert not {p for p in places if "/runs/" not in p and not any(p.startswith(m) for m in made)}
