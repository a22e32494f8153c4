"""lint/lint.py: each mistake in tests/samples/lint is found, and its correction has no finding left.

A sample holds both versions: lines that end in "#-" are the mistake, lines that end in "#+" its correction.
Its first line names exactly what must be found; "?" marks what may also be found. The clean runs that samples
start from are megatron.bash and fsdp.bash. Rules that need no sample are tested by overrides on these.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import logging
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from mindspeed_tree import needs_mindspeed

from ascend_rl.lint import lint as linter
from ascend_rl.lint import options as lint_options
from ascend_rl.lint import pinned
from ascend_rl.lint.dry_run import dry_run, environment_script
from ascend_rl.lint.findings import Finding
from ascend_rl.lint.memory import captured_sizes
from ascend_rl.lint.rollout import piecewise_limit
from ascend_rl.lint.script import PLACEHOLDER
from ascend_rl.lint.setup import RULES, Setup, checkpoint
from ascend_rl.lint.sizes import SIZES
from ascend_rl.lint.tuning import LANGUAGES, markdown, table
from ascend_rl.lint.values import MIGRATED
from ascend_rl.lint.verl_config import package, resolve
from ascend_rl.settings.model import Model

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = sorted((ROOT / "tests/samples/lint").glob("*.bash"))
BASES = {path.stem: path for path in SAMPLES if path.stem in ("megatron", "fsdp")}
MISTAKES = [path for path in SAMPLES if path.stem not in BASES]

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON, TRANSFORMER = f"{ACTOR}.megatron", f"{ACTOR}.megatron.override_transformer_config"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
SPECULATE = f"+{VLLM}.speculative_config.num_speculative_tokens=3"
SAM = f"{SPECULATE} +{VLLM}.speculative_config.method=sam +{VLLM}.additional_config.sam_decoding"


def checks(findings: list[Finding], *severities: str) -> set[str]:
    return {finding.check for finding in findings if finding.severity in (severities or ("error", "warning"))}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    """Variables of the machine that runs the tests must not decide."""
    for name in ("NNODES", "NPUS_PER_NODE", "MASTER_ADDR", "TASK_QUEUE_ENABLE", "VLLM_DP_SIZE"):
        monkeypatch.delenv(name, raising=False)


def version(sample: Path, keep: str, drop: str, directory: Path) -> Path:
    """The mistake (keep "#-") or its correction (keep "#+"), next to the files it sources."""
    for file in sample.parent.iterdir():
        if file.stem in BASES or file.suffix == ".py":
            (directory / file.name).write_text(file.read_text())
    lines = [line for line in sample.read_text().splitlines() if not line.endswith(drop)]
    script = directory / sample.name
    script.write_text("".join(line.removesuffix(keep) + "\n" for line in lines))
    return script


@pytest.mark.parametrize("sample", MISTAKES, ids=lambda path: path.stem)
def test_mistakes_are_found_and_corrections_are_clean(sample, tmp_path):
    expected = set(sample.read_text().splitlines()[0].removeprefix("# finds: ").split())
    optional = {name.removeprefix("?") for name in expected if name.startswith("?")}
    found = linter.lint(version(sample, "#-", "#+", tmp_path))
    assert checks(found) - optional == {name for name in expected if not name.startswith("?")}
    assert all(finding.where and finding.why and finding.fix for finding in found)
    assert checks(linter.lint(version(sample, "#+", "#-", tmp_path))) == set()


@pytest.fixture
def on_base(tmp_path):
    """A function that writes a script: a base, bash lines, and its start."""

    def write(base: str, lines: str = "") -> Path:
        script = tmp_path / "train.bash"
        script.write_text(f'. "{BASES[base]}"\n{lines}\nrun "$@"\n')
        return script

    return write


@pytest.mark.parametrize("base", BASES)
def test_the_runs_the_samples_start_from_are_clean(base, on_base):
    allowed = {"rollout.kv_capacity", "rollout.seats", "paths.elsewhere"}
    assert checks(linter.lint(on_base(base)), "error", "warning", "info") <= allowed


@pytest.mark.parametrize("base", BASES)
def test_no_value_breaks_a_rule(base, on_base):
    """Each number and switch in turn becomes something else; what is not a size is said to be none."""
    run = dry_run(on_base(base))
    resolved = resolve(run.module, run.args)
    for key in resolved.given:
        *parents, name = key.split(".")
        node = functools.reduce(dict.__getitem__, parents, resolved.config)
        kept = node[name]
        for value in (0, -1, None, "", "abc", [], {}, 2.5, 1 << 40, math.nan, math.inf):
            node[name] = value
            found = [finding for rule in RULES for finding in rule(Setup(run, resolved, {}))]
            if key in SIZES and value in (0, -1, "abc"):
                assert ("parallel.positive", key) in {(finding.check, finding.where) for finding in found}
        node[name] = kept


BUFFER, LIMIT = "+reward.reward_kwargs.overlong_buffer_cfg", "+reward.reward_kwargs.max_resp_len"
OVERLONG, OFF = f"reward.reward_manager.name=dapo {BUFFER}", f"{BUFFER}.enable=False"
PAID = f"{BUFFER}.penalty_factor=1.0 {BUFFER}.log=False {BUFFER}.enable=True"
OVERRIDES = [  # (rule, the run it is tried on, what spoils it)
    ("config.group", "fsdp", "model_engine=nonesuch"),
    ("config.interpolation", "fsdp", "trainer.project_name=${nothing.here}"),
    ("config.syntax", "fsdp", "trainer.logger=[console"),
    ("config.empty_value", "fsdp", "trainer.experiment_name="),
    ("parallel.positive", "megatron", f"{MEGATRON}.context_parallel_size=0"),
    ("parallel.ulysses", "fsdp", f"{ACTOR}.ulysses_sequence_parallel_size=3"),
    ("parallel.experts", "megatron", f"{MEGATRON}.expert_model_parallel_size=24"),
    ("parallel.expert_world", "megatron", f"{MEGATRON}.expert_tensor_parallel_size=null"),
    ("parallel.sequence_parallel", "megatron", f"{MEGATRON}.sequence_parallel=False"),
    ("parallel.layers", "megatron", f"+{TRANSFORMER}.pipeline_num_transformer_layers=[[23],[24]]"),
    ("parallel.layers", "megatron", f"{MEGATRON}.pipeline_model_parallel_size=5"),
    ("train.mindspeed_values", "megatron", f"+{TRANSFORMER}.use_fused_rotary_pos_emb=True"),
    ("rollout.routing_replay", "megatron", f"{ROLLOUT}.enable_rollout_routing_replay=True"),
    ("train.mindspeed_values", "megatron", f"+{TRANSFORMER}.pipeline_num_transformer_layers=[[24],[24]]"),
    ("parallel.rollout_world", "megatron", f"{ROLLOUT}.data_parallel_size=3"),
    ("parallel.rollout_node", "megatron", f"{ROLLOUT}.tensor_model_parallel_size=12"),
    ("parallel.rollout_across", "megatron", f"{ROLLOUT}.tensor_model_parallel_size=16"),
    ("parallel.rollout_heads", "fsdp", f"{ROLLOUT}.tensor_model_parallel_size=32"),
    ("parallel.rollout_experts", "megatron", f"{ROLLOUT}.expert_parallel_size=8"),
    ("parallel.rollout_pp", "megatron", f"{ROLLOUT}.pipeline_model_parallel_size=2"),
    ("batch.mini", "megatron", f"{ACTOR}.ppo_mini_batch_size=128"),
    ("batch.mini_divides", "megatron", f"{ACTOR}.ppo_mini_batch_size=48"),
    ("batch.ranks", "fsdp", f"{ROLLOUT}.n=1 {ACTOR}.ppo_mini_batch_size=127"),
    ("batch.dies", "fsdp", f"{ROLLOUT}.n=1 data.train_batch_size=510 {ACTOR}.ppo_mini_batch_size=102"),
    ("batch.micro_divides", "fsdp", f"{ACTOR}.ppo_micro_batch_size_per_gpu=3"),
    ("batch.micro_missing", "fsdp", f"{ACTOR}.use_kl_loss=True"),
    ("batch.token_budget", "megatron", f"{ROLLOUT}.log_prob_max_token_len_per_gpu=5119"),
    ("rollout.batched_tokens", "megatron", f"{ROLLOUT}.max_num_batched_tokens=63"),
    ("rollout.batched_tokens", "megatron",
     f"{ROLLOUT}.enable_chunked_prefill=False {ROLLOUT}.max_num_batched_tokens=8192"),
    ("rollout.utilization", "megatron", f"{ROLLOUT}.gpu_memory_utilization=85"),
    ("rollout.model_len", "megatron", f"{ROLLOUT}.max_model_len=10239"),
    ("rollout.graph_sizes", "megatron", SPECULATE),
    ("rollout.options", "megatron", f"{SPECULATE} +{VLLM}.compilation_config.cudagraph_mode=FULL"),
    ("rollout.options", "megatron", f"{SPECULATE} +{VLLM}.async_scheduling=True"),
    ("rollout.options", "megatron", f"{SAM}.history=-1"),
    ("rollout.options", "megatron", f"{SAM}.max_bytes=1024"),
    ("rollout.options", "megatron", f"{SAM}.histroy=1"),
    ("rollout.options", "megatron", f"+{VLLM}.additional_config.hccl_op_expansion_mode.tp=AICPU"),
    ("rollout.options", "fsdp", f"+{VLLM}.additional_config={{enable_static_kernel:True}}"),
    ("rollout.log_probs_needed", "megatron", "algorithm.rollout_correction.bypass_mode=True"),
    ("train.recompute", "megatron", f"{TRANSFORMER}.recompute_num_layers=null"),
    ("train.overlap_weights", "megatron", f"+{TRANSFORMER}.moe_alltoall_overlap_comm=True"),
    ("train.dist_checkpoint", "megatron", f"{MEGATRON}.use_dist_checkpointing=True"),
    ("train.swap_optimizer", "megatron", f"{MEGATRON}.optimizer_offload=True"),
    ("train.saves_nothing", "fsdp", "trainer.save_freq=-1"),
    ("train.schedule_restarts", "megatron", f"{ACTOR}.optim.lr_warmup_steps=10"),
    ("train.schedule_restarts", "megatron", f"{ACTOR}.optim.lr_decay_style=cosine"),
    ("train.sync_memory", "megatron", "actor_rollout_ref.model.path=/data/Qwen3-235B-A22B"),
    ("options.vllm", "megatron", f"+{VLLM}.cuda_graph_sizes=[8]"),  # verl 0.7.1's own mistake
    ("options.vllm", "fsdp", f"+{VLLM}.compilation_config.cudagraph_modes=NONE"),
    ("options.vllm", "fsdp", f"+{VLLM}.compilation_config.pass_config.fuse_norm=True"),
    ("options.vllm", "fsdp", f"+{VLLM}.speculative_config={{num_speculative_token:3}}"),
    ("options.vllm_ascend", "fsdp", f"+{VLLM}.additional_config.enable_npugraphs_ex=True"),
    ("options.transformer", "megatron", f"+{TRANSFORMER}.moe_router_topk_=8"),
    ("options.transformer", "megatron",
     "+actor_rollout_ref.ref.megatron={override_transformer_config:{recompute_num_layer:1}}"),
    ("options.transformer", "megatron", f"trainer.device=cpu +{TRANSFORMER}.nothing_like_it=1"),
    ("options.ddp", "megatron", f"+{MEGATRON}.override_ddp_config.overlap_grads_reduce=True"),
    ("options.optimizer", "megatron", f"+{ACTOR}.optim.override_optimizer_config.adam_epsilon=1e-9"),
    ("options.optimizer", "fsdp", f"{ACTOR}.optim.override_optimizer_config={{foreac:False}}"),
    ("algorithm.gspo_on_policy", "fsdp", f"{ACTOR}.ppo_mini_batch_size=512"),
    ("algorithm.clip_range", "megatron", f"{ACTOR}.clip_ratio_low=3e-4"),
    ("values.name", "megatron", "algorithm.adv_estimator=grpoo"),
    ("values.name", "megatron", f"{ACTOR}.policy_loss.loss_mode=gsop"),
    ("values.name", "megatron", f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=low_var"),
    ("values.name", "megatron", f"{ROLLOUT}.load_format=safetensor"),
    ("values.name", "megatron", f"{ACTOR}.loss_agg_mode=token_mean"),
    ("values.name", "megatron", "trainer.logger=[console,tensorbord]"),
    pytest.param(
        *("values.engine", "megatron", f"+{TRANSFORMER}.moe_zero_memory=level2"), marks=needs_mindspeed
    ),
    ("values.engine", "megatron", f"{TRANSFORMER}.recompute_method=uniformly"),
    ("values.engine", "fsdp", f"{ROLLOUT}.dtype=bf16"),
    ("values.engine", "fsdp", f"{ACTOR}.optim.optimizer=AdamX"),
    ("values.type", "megatron", f"{ACTOR}.use_dynamic_bsz=yess"),
    ("values.type", "megatron", f"{ACTOR}.optim.lr=1e-6x"),
    ("values.range", "megatron", f"{ROLLOUT}.temperature=0"),
    ("values.finite", "megatron", f"{ACTOR}.optim.lr=nan"),
    ("values.finite", "fsdp", f"{ACTOR}.kl_loss_coef=inf"),
    ("values.finite", "fsdp", f"{ROLLOUT}.max_num_seqs=inf"),
    ("values.finite", "fsdp", f"{ACTOR}.clip_ratio_high=nan"),
    ("values.finite", "fsdp", f"{ROLLOUT}.gpu_memory_utilization=nan"),
    ("values.finite", "fsdp", "algorithm.gamma=-inf"),
    ("algorithm.greedy_validation", "fsdp", f"{ROLLOUT}.val_kwargs.n=8"),
    ("algorithm.greedy_validation", "fsdp", f"{ROLLOUT}.val_kwargs={{n:4,do_sample:True}}"),
    ("config.dropped", "fsdp", "+reward_model.overlong_buffer.enable=True"),
    ("config.dropped", "fsdp", "+reward_model.micro_batch_size_per_gpu=8"),
    ("config.dropped", "fsdp", "+reward_model.launch_reward_fn_async=True"),
    ("algorithm.overlong", "fsdp", f"{OVERLONG}.enable=False {OVERLONG}.len=0"),
    ("algorithm.overlong", "fsdp", f"{LIMIT}=4096 {OVERLONG}.len=8192 {OFF}"),
    ("algorithm.overlong", "fsdp", f"{LIMIT}=9000 {OVERLONG}.len=8999 {PAID}"),
    ("algorithm.overlong", "fsdp", f"{LIMIT}=8192 {OVERLONG}.len=0 {PAID}"),
    ("algorithm.overlong", "fsdp", f"{LIMIT}=8192 {OVERLONG}.len=64 {OFF}"
     f" {OVERLONG}.enable=True"),
    ("algorithm.overlong", "fsdp", "reward_model.reward_manager=dapo "
     "+reward_model.reward_kwargs.overlong_buffer_cfg={enable:False,len:0}"),
    ("algorithm.overlong_length", "fsdp", f"{LIMIT}=4096 {OVERLONG}.len=64 {PAID}"),
    ("algorithm.overlong_length", "fsdp", f"{LIMIT}=8192 {OVERLONG}.len=64 {PAID} "
     "reward.reward_manager.name=naive"),
    ("algorithm.dual_clip", "megatron", f"{ACTOR}.clip_ratio_c=0.9"),
    ("algorithm.group_of_one", "megatron", f"{ROLLOUT}.n=1"),
    ("train.resume", "megatron", "trainer.resume_mode=resume_path"),
    ("train.virtual_pipeline", "megatron", f"{MEGATRON}.virtual_pipeline_model_parallel_size=5"),
    ("rollout.bucket", "megatron", f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=256"),
    ("rollout.bucket_full", "fsdp", f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=1000"),
    ("data.unfiltered", "megatron", "data.truncation=error"),
    ("rollout.model_len", "megatron", f"data.max_response_length=40000 {ROLLOUT}.max_model_len=42048"),
    ("env.logger_key", "fsdp", "trainer.device=cpu trainer.logger=[console,wandb]"),
    ("paths.missing", "fsdp", "trainer.device=cpu"),
    ("paths.elsewhere", "fsdp", "trainer.save_freq=-1"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "base", "words"), OVERRIDES, ids=lambda value: str(value)[-40:])
def test_overrides_that_spoil_a_run(rule, base, words, on_base):
    assert rule in checks(linter.lint(on_base(base), None, words.split()), "error", "warning", "info")


VARIABLES = [  # (rule, bash lines)
    (
        "rollout.eplb_slots",
        "export VLLM_ENABLE_EPLB=1 ALL_TO_ALL_RESHARD=0 NNODES=16; SET[trainer.nnodes]=16; "
        "SET[$rollout.data_parallel_size]=32 SET[$rollout.expert_parallel_size]=128",
    ),
    ("env.cpu_affinity", "export CPU_AFFINITY_CONF=1"),
    ("env.cpu_affinity", "export CPU_AFFINITY_CONF=mode:2"),
    ("env.aiv_domains", "export HCCL_OP_EXPANSION_MODE=AIV"),
    (
        "env.aiv_domains",
        "SET[+$rollout.engine_kwargs.vllm.additional_config.hccl_op_expansion_mode]='{tp:AIV,ep:AIV}'",
    ),
    ("env.value", "export HCCL_OP_EXPANSION_MODE=aiv"),
    (
        "env.visible_devices",
        "export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1 NPUS_PER_NODE=8; "
        "export ASCEND_RT_VISIBLE_DEVICES=8,9,10,11,12,13,14,15; SET[trainer.n_gpus_per_node]=8",
    ),
    ("env.visible_devices", "export RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1"),
    ("env.unread", "export VLLM_ASCEND_ENABLE_DENSE_OPTIMIZE=1"),
    ("env.port", "export HCCL_IF_BASE_PORT=65530"),
    ("env.device_connections", "export CUDA_DEVICE_MAX_CONNECTIONS=8"),
    ("rollout.eplb", "export VLLM_ENABLE_EPLB=1 ALL_TO_ALL_RESHARD=1"),
    ("rollout.launch_blocking", "export ASCEND_LAUNCH_BLOCKING=1"),
    (
        "rollout.graph_stride",
        "export VLLM_ASCEND_ENABLE_FLASHCOMM1=1; SET[$rollout.cudagraph_capture_sizes]=[6,64]",
    ),
]


@pytest.mark.parametrize(("rule", "lines"), VARIABLES, ids=lambda value: value[:40])
def test_variables_that_spoil_a_run(rule, lines, on_base):
    assert checks(linter.lint(on_base("megatron", lines))) == {rule}


@pytest.mark.parametrize(
    "lines",
    [
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1",
        "ASCEND_RT_VISIBLE_DEVICES=$(seq -s, 0 15) RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1",
        "ASCEND_RT_VISIBLE_DEVICES=$(seq -s, 16 31)",
    ],
)
def test_dies_may_be_chosen_one_way(lines, on_base):
    assert checks(linter.lint(on_base("megatron", f"export {lines}"))) == set()


def test_what_verl_moves_from_reward_model_is_what_the_rule_knows():
    """verl's own migration: a key it moves changes what is below reward; the rule names the others."""
    from omegaconf import OmegaConf, open_dict

    from verl.experimental.reward_loop import migrate_legacy_reward_impl

    keys = """num_workers=3 reward_manager=dapo enable=True nnodes=2 model.path=/m rollout.name=vllm
        +reward_kwargs.max_resp_len=9 +overlong_buffer.len=9 +launch_reward_fn_async=True +strategy=fsdp
        +max_length=9 reward_loop_source=importlib""".split()
    for word in keys:
        key = f"reward_model.{word.lstrip('+').partition('=')[0]}"
        plain, given = (
            OmegaConf.create(resolve("verl.trainer.main_ppo", words).config)
            for words in ([], [("+" if word[0] == "+" else "") + f"reward_model.{word.lstrip('+')}"])
        )
        for config in (plain, given):
            with open_dict(config):
                migrate_legacy_reward_impl(config)
        assert (plain.reward != given.reward) == bool(
            MIGRATED.fullmatch(key.removeprefix("reward_model."))
        ), key


@pytest.mark.parametrize(
    "words",
    [
        f"{LIMIT}=8192 {OVERLONG}.len=4096 {PAID}",
        f"{LIMIT}=8192 {OVERLONG}.len=0 {OFF}",
        f"{LIMIT}=8192 {OVERLONG}.len=8192 {OFF}",
        f"{OFF} {OVERLONG}.len=0 reward.reward_manager.name=naive",  # whose constructor does not look
        f"{ACTOR}.clip_ratio_high=inf {ACTOR}.grad_clip=inf",
        f"{ROLLOUT}.val_kwargs.n=8 {ROLLOUT}.val_kwargs.do_sample=True {ROLLOUT}.val_kwargs.temperature=1.0",
        "reward_model.reward_manager=dapo reward_model.num_workers=4",
    ],
)
def test_what_runs_is_not_reported(words, on_base):
    found = linter.lint(on_base("fsdp"), None, words.split())
    allowed = {"algorithm.clip_range", "config.duplicate"}
    assert checks(found) <= allowed, [finding.why for finding in found]


def test_what_needs_no_checkpoint_may_save_none(on_base):
    for override in ("trainer.total_training_steps=3", f"{ACTOR}.load_weight=False"):
        found = checks(linter.lint(on_base("megatron"), None, ["trainer.save_freq=-1", override]))
        assert "train.saves_nothing" not in found


def test_a_time_limit_needs_a_checkpoint(on_base, monkeypatch):
    nothing, error = ["trainer.save_freq=-1"], "train.limit_saves_nothing"
    assert error not in checks(linter.lint(on_base("fsdp"), None, nothing), "error")
    monkeypatch.setenv("SAVE_BY", "3600")
    assert error in checks(linter.lint(on_base("fsdp"), None, nothing), "error")
    assert error not in checks(linter.lint(on_base("fsdp"), None, ["trainer.save_freq=5"]), "error")


def test_a_schedule_that_a_resume_keeps(on_base):
    """A constant rate has none; FSDP restores it, Megatron does when asked; no checkpoint, no resume."""
    warmup, kept = "lr_warmup_steps=10", f"{ACTOR}.optim.use_checkpoint_opt_param_scheduler=True"
    fine = [("fsdp", warmup), ("megatron", "lr_warmup_steps=0"), ("megatron", f"{warmup} {kept}")]
    for base, words in [*fine, ("megatron", f"{warmup} trainer.save_freq=-1")]:
        found = linter.lint(on_base(base), None, f"{ACTOR}.optim.{words}".split())
        assert "train.schedule_restarts" not in checks(found, "warning")


def test_checkpoints_need_room(on_base, tmp_path):
    """Three of Qwen3-235B are 10 TB; this machine has less. The folder need not exist yet."""
    local = ["trainer.device=cpu", f"trainer.default_local_dir={tmp_path}/new/checkpoints"]
    keep = ["trainer.max_actor_ckpt_to_keep=2"]
    big, small = ("/data/Qwen3-235B-A22B", "/data/Qwen3-0.6B")
    for model, overrides, is_found in ((big, keep, True), (big, [], False), (small, keep, False)):
        more = [*local, *overrides, f"actor_rollout_ref.model.path={model}"]
        found = [
            f for f in linter.lint(on_base("megatron"), None, more) if f.check == "train.checkpoint_disk"
        ]
        assert bool(found) == is_found
        assert all("9874 GB needed" in finding.why + finding.where for finding in found)


@pytest.mark.parametrize(
    ("base", "key", "words"),
    [
        (
            "fsdp",
            "lora_rank",
            f"{ROLLOUT}.tensor_model_parallel_size=8 actor_rollout_ref.model.path=/d/Qwen3-32B",
        ),
        ("megatron", "lora.rank", "actor_rollout_ref.model.path=/d/Qwen3-235B-A22B"),
    ],
)
def test_the_planner_knows_lora(base, key, words, on_base):
    """verl#3566: a model that does not fit whole does with frozen weights."""
    ranks = [[f"actor_rollout_ref.model.{key}={rank}", *words.split()] for rank in (0, 16)]
    whole, lora = (checks(linter.lint(on_base(base), None, more)) for more in ranks)
    assert "train.memory" in whole and "train.memory" not in lora


def test_a_checkpoint_is_resumed_by_the_engine_that_saved_it(on_base, tmp_path):
    """FSDP by as many dies, 8 here; Megatron by Megatron; a file that says nothing is nobody's."""
    actor = tmp_path / "global_step_5/actor"
    actor.mkdir(parents=True)
    here = ["trainer.device=cpu", "trainer.nnodes=2", "trainer.n_gpus_per_node=4"]
    ways = {
        "auto": [f"trainer.default_local_dir={tmp_path}"],
        "path": ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={actor.parent}"],
        "disable": [f"trainer.default_local_dir={tmp_path}", "trainer.resume_mode=disable"],
    }

    def said(base: str, way: str) -> list[str]:
        found = linter.lint(on_base(base), None, [*here, *ways[way]])
        return [finding.why for finding in found if finding.check == "train.resume_engine"]

    (actor / "dist_ckpt").mkdir()
    assert said("megatron", "auto") == said("fsdp", "disable") == []
    for way in ("auto", "path"):
        (why,) = said("fsdp", way)
        assert "Megatron saved it, this run trains with FSDP on 8 dies" in why
    (actor / "dist_ckpt").rmdir()
    for text, fsdp, megatron in (('{"world_size": 4}', 1, 1), ('{"world_size": 8}', 0, 1), ("{", 0, 0)):
        (actor / "fsdp_config.json").write_text(text)
        assert (len(said("fsdp", "auto")), len(said("megatron", "auto"))) == (fsdp, megatron)


def test_hdp_needs_an_actor_that_follows_plans(on_base):
    whole = f"{ACTOR}.whole_batch_loss=True"
    cp1 = [whole, f"{MEGATRON}.context_parallel_size=1", f"{MEGATRON}.pipeline_model_parallel_size=4"]
    workers = [whole, "trainer.use_legacy_worker_impl=disable"]
    for base, overrides, said in (
        ("fsdp", [], "strategy is fsdp"),
        ("megatron", [], "whole_batch_loss=True"),
        ("megatron", cp1, "context_parallel_size=1"),
        ("megatron", workers, "engine workers"),
        ("megatron", [whole], None),
    ):
        found = linter.lint(on_base(base, "export USE_HDP=1"), None, overrides)
        details = [finding.why for finding in found if finding.check == "train.hdp"]
        assert [said in detail for detail in details] == [True] * (said is not None), (said, details)


def test_a_weight_sync_needs_room_for_a_layer_of_fused_experts(on_base):
    """verl#6691: Megatron-Bridge makes one tensor of a layer's experts; verl's default export does not."""
    large = ["actor_rollout_ref.model.path=/data/Qwen3-235B-A22B"]
    large += [f"{ROLLOUT}.tensor_model_parallel_size=8", f"{ROLLOUT}.data_parallel_size=2"]
    said = {}
    for vanilla in (True, False):
        more = [*large, f"{MEGATRON}.vanilla_mbridge={vanilla}"]
        found = linter.lint(on_base("megatron"), None, more)
        said[vanilla] = [(f.where, f.why) for f in found if f.check == "train.sync_memory"]
    ((where, why),) = said[False]
    assert said[True] == [] and where == f"{MEGATRON}.vanilla_mbridge" and "one tensor" in why


def test_flashcomm_needs_tp(on_base):
    """Found by a rehearsal of one server per die: vllm-ascend's assertion when the model is built."""
    script = on_base("fsdp", "export VLLM_ASCEND_ENABLE_FLASHCOMM1=1")
    one, two = (linter.lint(script, None, [f"{ROLLOUT}.tensor_model_parallel_size={tp}"]) for tp in (1, 2))
    assert "rollout.flashcomm" in checks(one) and "rollout.flashcomm" not in checks(two)


@pytest.mark.parametrize(
    "lines", ["CPU_AFFINITY_CONF=2 CORE_BINDING=1", "CPU_AFFINITY_CONF=1,npu0:3-4", "CPU_AFFINITY_CONF=0"]
)
def test_torch_npu_may_bind_to_ranges(lines, on_base):
    assert checks(linter.lint(on_base("megatron", f"export {lines}"))) == set()


@pytest.mark.parametrize("engines, experts", [(4, 16), (1, 1)])
def test_a_server_of_several_engines_has_the_seats_of_all(engines, experts, on_base):
    for requests in (engines * 64, engines * 64 + 1):
        sizes = {f"{ROLLOUT}.expert_parallel_size": experts, "data.train_batch_size": requests,
                 f"{ACTOR}.ppo_mini_batch_size": requests, f"{ROLLOUT}.n": 1}  # fmt: skip
        found = checks(linter.lint(on_base("megatron"), None, [f"{k}={v}" for k, v in sizes.items()]), "info")
        assert ("rollout.seats" in found) == (requests > engines * 64)


def test_the_environment_script_comes_first(on_base, tmp_path):
    env = tmp_path / "env.sh"
    env.write_text("export ASCEND_LAUNCH_BLOCKING=1\n")
    assert checks(linter.lint(on_base("megatron"), env)) == {"rollout.launch_blocking"}


def test_advice_is_given_where_a_variable_is_missing(on_base):
    """The slow first request of the ROLL FAQ: no cache of compiled operators. Only NPU runs get advice."""
    script = on_base("fsdp", "unset ACL_OP_COMPILER_CACHE_MODE TASK_QUEUE_ENABLE")
    advice = {(finding.check, finding.where) for finding in linter.lint(script) if finding.severity == "info"}
    assert {
        ("env.advised", "$ACL_OP_COMPILER_CACHE_MODE"),
        ("rollout.task_queue_eager", "$TASK_QUEUE_ENABLE"),
    } <= advice
    found = linter.lint(script, None, ["trainer.device=cpu", "trainer.logger=console"])
    assert checks(found, "error", "warning", "info") == {"paths.missing"}  # a CPU run takes place here


def test_the_planner_is_asked(on_base):
    """Out of memory in the update, and 7B models on too few dies, of the two FAQs."""
    large = [f"{ACTOR}.ppo_max_token_len_per_gpu=900000", f"{ROLLOUT}.gpu_memory_utilization=0.1"]
    assert checks(linter.lint(on_base("megatron"), None, large)) == {"train.memory", "rollout.memory"}
    large = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=64"]
    assert checks(linter.lint(on_base("fsdp"), None, large)) == {"train.memory"}
    dense = ["actor_rollout_ref.model.path=Qwen3-8B", f"{ACTOR}.ppo_max_token_len_per_gpu=9000000"]
    dense += [f"{MEGATRON}.expert_model_parallel_size=1", f"{MEGATRON}.tensor_model_parallel_size=2"]
    dense += [f"{MEGATRON}.expert_tensor_parallel_size=null", f"{ROLLOUT}.expert_parallel_size=1"]
    assert "train.memory" in checks(linter.lint(on_base("megatron"), None, dense))  # by default ETP is TP
    whole = [f"{ROLLOUT}.gpu_memory_utilization=1.0"]
    (found,) = (f for f in linter.lint(on_base("megatron"), None, whole) if f.check == "rollout.memory")
    assert "graphs of up to" in str(found) and "fewer cudagraph_capture_sizes" in str(found)
    many = [f"{ROLLOUT}.max_num_seqs=4096", f"{ROLLOUT}.cudagraph_capture_sizes=[4096]"]
    assert "rollout.kv_capacity" in checks(linter.lint(on_base("megatron"), None, many), "info")


RIGHT = [  # names that no file of verl mentions
    ("fsdp", f"+{VLLM}.max-num-partial-prefills=2 +{VLLM}.no_enable_prefix_caching=True"),
    ("fsdp", f"+{VLLM}.api_server_count=1 +{VLLM}.nonesuch=null +{VLLM}.max_num_partial=2"),
    ("fsdp", f"+{VLLM}.compilation_config={{pass_config:{{enable_sp:True}},compile_sizes:[1]}}"),
    ("megatron", f"+{VLLM}.additional_config.enable_npugraph_ex=True"),
    ("fsdp", f"{ACTOR}.optim.override_optimizer_config={{foreach:False,eps:1e-8}}"),
    ("megatron", f"+{TRANSFORMER}.tp_comm_overlap=False +{TRANSFORMER}.q_lora_rank=512"),  # inherited; of MLA
    ("megatron", f"+{MEGATRON}.override_ddp_config.overlap_grad_reduce=True"),
    ("megatron", f"+{ACTOR}.optim.override_optimizer_config.adam_eps=1e-9"),
]


@pytest.mark.parametrize(("base", "words"), RIGHT, ids=lambda value: value[-40:])
def test_options_of_the_frameworks_are_known(base, words, on_base):
    assert checks(linter.lint(on_base(base), None, words.split())) == set()


def test_a_wrong_option_is_named_with_the_nearest(on_base):
    wrong = f"+{TRANSFORMER}.recompute_granularty=full"
    (finding,) = (f for f in linter.lint(on_base("megatron"), None, [wrong]) if f.severity == "error")
    assert (finding.check, finding.where) == ("options.transformer", wrong[1:].partition("=")[0])
    assert finding.fix == f"did you mean {TRANSFORMER}.recompute_granularity?"


@pytest.fixture
def mindspeed(tmp_path, monkeypatch):
    """A function that makes a MindSpeed of this source; before it is called there is none."""
    monkeypatch.setitem(sys.modules, "mindspeed", None)  # if it is installed
    monkeypatch.setattr(pinned, "FRAMEWORKS", tmp_path)

    def forget():
        pinned.sources.cache_clear()
        lint_options.mindspeed_options.cache_clear()

    def make(source: str) -> None:
        features = tmp_path / "mindspeed/mindspeed/features_manager/memory"
        features.mkdir(parents=True)
        (features / "feature.py").write_text(source)
        forget()

    forget()
    yield make
    forget()


def test_options_of_mindspeed_are_those_of_its_sources(mindspeed, on_base):
    script, names = on_base("megatron"), ("swap_attention_x", "ring_depth", "noop_rows", "swap_attentionx")
    words = [f"+{TRANSFORMER}.{name}=1" for name in names]

    def found() -> dict[str, set[str]]:
        hits = [f for f in linter.lint(script, None, words) if f.check.startswith("options.")]
        return {
            check: {f.where.rpartition(".")[2] for f in hits if f.check == check}
            for check in ("options.transformer", "options.unchecked")
        }

    assert found() == {"options.transformer": set(), "options.unchecked": set(names)}
    mindspeed(
        "group.add_argument('--swap-attention-x', action='store_true')\n"
        "if args.ring_depth > 1 or getattr(config, 'noop_rows', 0): pass\n"
    )
    assert found() == {"options.transformer": {"swap_attentionx"}, "options.unchecked": set()}


HEADS = [  # (rule, model, TP, whether it is refused)
    ("parallel.kv_heads", "qwen3-235b-a22b", 4, False),
    ("parallel.kv_heads", "qwen3-235b-a22b", 8, True),  # 64 heads and 4 KV heads
    ("parallel.kv_heads", "qwen3-14b", 5, True),
    ("parallel.rollout_heads", "qwen3-235b-a22b", 8, False),  # each KV head on two dies
    ("parallel.rollout_heads", "qwen3-14b", 8, False),
    ("parallel.rollout_heads", "qwen3-14b", 10, True),  # divides 40 heads, but not 8 KV heads
    ("parallel.rollout_heads", "qwen2.5-7b", 8, True),  # a multiple of 4 KV heads, but not a divisor of 28
]


@pytest.mark.parametrize(("rule", "model", "tp", "refused"), HEADS)
def test_heads_and_tp(rule, model, tp, refused, on_base):
    key = f"{MEGATRON}.tensor_model_parallel_size" if rule == "parallel.kv_heads" else None
    words = [f"{key or f'{ROLLOUT}.tensor_model_parallel_size'}={tp}"]
    found = linter.lint(on_base("megatron"), None, [f"actor_rollout_ref.model.path=/x/{model}", *words])
    assert (rule in checks(found)) is refused


SAM = f"{SPECULATE} +{VLLM}.speculative_config.method=sam"


@pytest.mark.parametrize(("words", "sizes"), [
    ("", (8, 16, 32, 64)),
    (f"{ROLLOUT}.enforce_eager=True", ()),
    (SPECULATE, (8, 16, 32, 64)),  # of 4 tokens per row
    (SAM, (8, 16, 32, 64, 8, 16)),  # and those that 16 rows of one token fill
])  # fmt: skip
def test_the_planner_gets_the_graphs_that_are_captured(words, sizes, on_base):
    requests = 16 if SPECULATE in words else 64
    given = [f"{ROLLOUT}.cudagraph_capture_sizes=[8,16,32,64]", f"{ROLLOUT}.max_num_seqs={requests}"]
    run = dry_run(on_base("megatron"), None, [*given, *words.split()])
    setup = Setup(run, resolve(run.module, run.args), {})
    assert captured_sizes(setup) == sizes


def test_every_rule_is_tried():
    """A rule without a test is a guess."""
    tried = {rule for rule, *_ in [*OVERRIDES, *VARIABLES]}
    tried |= {
        "train.limit_saves_nothing",
        "env.advised",
        "rollout.task_queue_eager",
        "train.memory",
        "rollout.memory",
        "rollout.flashcomm",
        "train.checkpoint_disk",
        "train.resume_engine",
        "rollout.kv_capacity",
        "rollout.seats",
        "options.unchecked",
        "options.idle",  # test_switches.py
        "paths.content",  # test_lint_values.py
        "paths.function",
        *(
            "data.content",
            "data.rows",
            "data.source",
            "paths.weights",
            "paths.tokenizer",
        ),  # test_lint_files.py
        "train.resume_step",
        "env.interface",
    }
    for sample in MISTAKES:
        tried |= set(sample.read_text().splitlines()[0].removeprefix("# finds: ").split())
    assert {rule.id for rule in RULES} <= tried
    assert len({rule.id for rule in RULES}) == len(RULES)
    assert {rule.severity for rule in RULES} == {"error", "warning", "info"}


def test_every_rule_has_a_name_of_its_own():
    """Tracebacks and profiles show it; in its module, no other name may hide the function."""
    found = [rule.find for rule in RULES]
    names = [find.__name__ for find in found]
    assert "_" not in names and len(set(names)) == len(names)
    assert not [find for find in found if vars(sys.modules[find.__module__])[find.__name__] is not find]


def test_the_command_says_what_the_rules_check(capsys):
    with pytest.raises(SystemExit, match="0"):
        linter.main(["--rules"])
    printed = [tuple(line.split(maxsplit=2)) for line in capsys.readouterr().out.splitlines()]
    assert printed == [(rule.id, rule.severity, rule.checks) for rule in RULES]


@pytest.mark.parametrize(
    "script", sorted((ROOT / "internal").glob("train_*_cpu.sh")), ids=lambda path: path.stem
)
def test_our_recipes_are_clean(script, monkeypatch):
    monkeypatch.setenv("NPUS_PER_NODE", "2")
    assert checks(linter.lint(script, environment_script(script))) == set()


def test_a_script_that_ends_early_says_why(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(
        '[ -n "${DATA:-}" ] || { echo "ERROR: set DATA" >&2; exit 1; }\npython3 -m verl.trainer.main_ppo\n'
    )
    (finding,) = linter.lint(script)
    assert finding.check == "script.no_training" and "set DATA" in finding.why
    script.write_text("python3 -m verl.trainer.main_nonesuch\n")
    assert checks(linter.lint(script)) == {"script.unknown_module"}
    script.write_text("python3 -m verl.trainer.main_ppo --config-name=nonesuch\n")
    assert checks(linter.lint(script)) == {"config.name"}


WHOLE = """
data.train_files=/d/t.parquet data.val_files=/d/v.parquet data.train_batch_size=128
data.max_prompt_length=2048 data.max_response_length=8192 algorithm.adv_estimator=grpo
actor_rollout_ref.model.path=/data/Qwen3-8B actor_rollout_ref.actor.use_torch_compile=False
actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10240
actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.n=8 trainer.n_gpus_per_node=16 trainer.nnodes=1 trainer.device=npu
trainer.save_freq=10 trainer.logger=console
""".split()


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A function that lints a script with this start and the overrides of a clean run, then these."""
    monkeypatch.chdir(tmp_path)

    def findings(start: str, *more: str, whole: tuple[str, ...] = tuple(WHOLE)) -> list[Finding]:
        lines = ["export VLLM_ASCEND_ENABLE_NZ=0", " ".join([start, *whole, *more])]
        Path("train.sh").write_text("\n".join(lines) + "\n")
        return linter.lint("train.sh")

    return findings


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("recipe.dapo.main_dapo", "recipe.dapo is not in verl 0.7.1"),
        ("recipe.dapo.main_dapo --config-path $PWD/none --config-name=dapo_trainer", "recipe.dapo is not in"),
        ("recipe.prime.main_prime", "recipe.prime is not in verl 0.7.1"),
        ("verl.trainer.main", "verl.trainer.main is not in verl 0.7.1"),
    ],
)
def test_a_recipe_of_another_package_is_named_in_a_line_and_the_rest_is_linted(module, says, started):
    found = started(f"set -x\nray job submit --no-wait -- python3 -m {module}", "trainer.save_freq=")
    errors = {finding.check: finding for finding in found if finding.severity == "error"}
    assert set(errors) == {"script.unknown_module", "config.empty_value"}
    told = errors["script.unknown_module"]
    assert says in told.why and len(told.why) < 100 and "verl.trainer.main_ppo" in told.fix
    assert ("filter_groups" in told.fix) == ("dapo" in module)


@pytest.mark.parametrize("module", ["their_project.main_ppo", "./their_project/main.py"])
def test_a_module_of_another_project_is_a_warning(module, started):
    """Its configuration is not known: keys of its own, and values that only it sets, are no errors."""
    start = f"python3 -m {module}" if "/" not in module else f"python3 -u {module}"
    given = ("actor_rollout_ref.actor.ppo_mini_batch_size=2048", "+trainer.device=npu", "agent.turns=4")
    found = started(start, whole=given)
    assert checks(found, "error") == set()
    assert "script.foreign_module" in checks(found, "warning")


@pytest.mark.parametrize("package", ["recipe", "verl.experimental"])
def test_another_trainer_may_mean_other_things(package, started):
    """The asynchronous one takes no batch of prompts; a recipe registers estimators of its own."""
    given = (
        "data.train_batch_size=0",
        "algorithm.adv_estimator=mine",
        "rollout.nnodes=1",
        "trainer.save_freq=",
    )
    start = f"python3 -m {package}.fully_async_policy.fully_async_main"
    found = [finding for finding in started(start, *given) if finding.severity == "error"]
    unknown = ["script.unknown_module"] * (package == "recipe")  # it is verl's own since 0.7
    assert [finding.check for finding in found] == [*unknown, "config.empty_value"]
    for finding in found[: len(unknown)]:
        assert finding.fix == "start verl.experimental.fully_async_policy.fully_async_main"


def test_a_configuration_that_is_elsewhere_is_said_in_a_line(started):
    start = 'python3 -m verl.trainer.main_ppo --config-path="/elsewhere/config" --config-name=turns'
    given = ("actor_rollout_ref.actor.ppo_mini_batch_size=2048", "agent.turns=4", "trainer.save_freq=")
    found = started(start, whole=given)
    assert checks(found, "error") == {"config.empty_value"}  # what needs no configuration is found
    (said,) = (finding for finding in found if finding.check == "config.elsewhere")
    assert said.where == "/elsewhere/config/turns" and said.severity == "info"
    both = ("data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=128")
    assert "batch.mini" in checks(started(start, whole=both), "error")  # and what is given whole


def test_a_configuration_that_is_here_is_composed_with_that_of_verl(started, tmp_path):
    """The pattern of verl's multi-turn examples: verl's own, found relative to verl's checkout, plus keys."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config/turns.yaml").write_text(
        "hydra:\n  searchpath:\n    - file://verl/trainer/config\n"
        "defaults:\n  - ppo_trainer\n  - _self_\nagent:\n  turns: 3\ndata:\n  train_batch_size: 64\n"
    )
    start = "python3 -m verl.trainer.main_ppo --config-path=$PWD/config --config-name=turns"
    few = [word for word in WHOLE if not word.startswith("data.train_batch_size")]
    found = started(start, "agent.turns=4", "agent.turn=4", whole=tuple(few))
    assert checks(found, "error") == {"config.unknown_key", "batch.mini"}
    found = started(start.replace("=turns", "=turn"), whole=tuple(few))
    assert checks(found, "error") == {"config.name"}


@pytest.mark.parametrize("path", ["config", "./config", "/other/checkout/verl/trainer/config"])
def test_the_configurations_of_verl_are_found_wherever_they_are(path, started):
    found = started(f"python3 -m verl.trainer.main_ppo --config-path={path} --config-name=ppo_trainer.yaml")
    assert checks(found, "error") == set() and "config.elsewhere" not in checks(found, "info")


def test_other_tasks_are_not_checked(started):
    for start in ("python3 -m verl.model_merger merge", "python3 -m verl.trainer.main_eval"):
        (found,) = started(start, whole=())
        assert (found.severity, found.check) == ("info", "script.supervised")
    found = started("python3 -m verl.trainer.main_ppo", "\npython3 -m verl.model_merger merge")
    assert "script.supervised" not in checks(found, "info")  # the training before it counts


@pytest.mark.parametrize(
    ("word", "paste"),
    [
        ("data.gen_batch_size=256", "+data.gen_batch_size=256"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.seed=7",
         "+actor_rollout_ref.rollout.engine_kwargs.vllm.seed=7"),
        ("reward_model.overlong_buffer.len=512", "+reward.reward_kwargs.overlong_buffer_cfg.len=512"),
    ],
)  # fmt: skip
def test_keys_that_may_be_added_are_ready_to_paste(word, paste, started):
    (found,) = (f for f in started("python3 -m verl.trainer.main_ppo", word) if f.severity == "error")
    assert found.check == "config.unknown_key" and linter.corrections([found]) == paste


@pytest.mark.parametrize(("batch", "seqs", "is_found"), [(128, 1024, 0), (1024, 1024, 1), (1024, 256, 0)])
def test_full_batches_are_those_of_an_engine(batch, seqs, is_found, started):
    """8 engines: 128 prompts x 8 are 128 requests each, which vLLM's default graphs of up to 512 hold."""
    more = [f"data.train_batch_size={batch}", f"actor_rollout_ref.rollout.max_num_seqs={seqs}"]
    found = started("python3 -m verl.trainer.main_ppo", *more)
    assert ("rollout.graph_sizes" in checks(found)) == bool(is_found)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("README.md", "# A title\n\n```bash\npython3 -m verl.trainer.main_ppo\n```\n"),
        ("train.sh", "if true; then\npython3 -m verl.trainer.main_ppo\n"),
        ("train", "#!/usr/bin/env python3\nimport verl\n"),
        ("train.sh", "\x7fELF\0\0"),
    ],
)
def test_what_is_no_bash_script_is_refused(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    (found,) = linter.lint(tmp_path / name)
    assert (found.severity, found.check) == ("error", "script.not_bash")


def test_a_placeholder_is_reported_once_and_is_given(started):
    """Hydra cannot read <...>; a rule that asks for the path must not call it unset."""
    where = "actor_rollout_ref.actor.megatron.dist_checkpointing_path"
    more = ["actor_rollout_ref.actor.megatron.use_dist_checkpointing=True", f"'{where}=<path to weights>'"]
    found = started("python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer", *more)
    about = [f.check for f in found if f.severity == "error" and f.where == where]
    assert about == ["script.placeholder"]
    found = started("python3 -m verl.trainer.main_ppo", "'trainer.<x=<y>'")
    assert "config.syntax" in checks(found, "error")


def test_a_process_may_be_ended_by_its_parent(started):
    assert "script.kill_by_name" not in checks(started("pkill -P $pid\npython3 -m verl.trainer.main_ppo"))
    assert "script.kill_by_name" in checks(started("pkill -9 -f ray\npython3 -m verl.trainer.main_ppo"))


# The dry run.


def test_nothing_runs(tmp_path):
    """Commands that change things are recorded instead, however they are reached."""
    precious, log = tmp_path / "precious", tmp_path / "train.log"
    precious.write_text("x")
    log.write_text("kept")
    script = tmp_path / "train.sh"
    script.write_text(f"""
        set -x
        export PATH=/usr/bin:/bin:$PATH
        clean() {{ rm -rf {precious}; }}
        clean; (rm {precious}); x=$(rm {precious}); env rm {precious}; nohup rm {precious} &
        bash -c 'PATH=/bin:/usr/bin; rm {precious}'
        sed -i s/x/y/ {precious}; tee {precious} < /dev/null
        kill -9 $PPID; touch {tmp_path}/new; mkdir {tmp_path}/newdir
        echo lost > {log}; date &>> {log}
        sleep 60; if [[ b > a ]]; then export COMPARED="a > b"; fi
        nohup python3 -u -m verl.trainer.main_ppo "a=$(echo '1  2')" 'b=[1, 2]' "$@" > {log} 2>&1 &
        wait
    """)
    run = dry_run(script, None, ["c=3 4"])
    assert (run.module, run.args) == ("verl.trainer.main_ppo", ("a=1  2", "b=[1, 2]", "c=3 4"))
    assert run.env["COMPARED"] == "a > b" and run.unset == ()
    assert (precious.read_text(), log.read_text()) == ("x", "kept")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "train.log", "train.sh"]


@pytest.mark.parametrize(
    "call",
    [
        "ray job submit --runtime-env=x.yaml -- python3 -m",
        "exec python -m",
        "CUDA=1 python -m",
        "env A=1 timeout 9 python -m",
        "numactl -N 0 python3 -X dev -m",
        "DRY_RUN=1 train",
    ],
)
def test_the_training_command_is_found_however_it_is_started(call, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(
        f'. {ROOT}/internal/common.sh\nexport SEEN=yes\n{call} verl.trainer.main_ppo a=1 "$@"\n'
    )
    run = dry_run(script, None, ["b=2"])
    assert (run.module, run.args, run.env["SEEN"]) == ("verl.trainer.main_ppo", ("a=1", "b=2"), "yes")


def test_unset_variables_are_named_with_their_lines(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(
        'a=$((8 / later))\nlater=2\n[ -z "$asked" ] || b=1\npython -m verl.trainer.main_ppo x=$never $1 $@\n'
    )
    assert dry_run(script).unset == tuple(
        (f"{script}:{line}", name) for line, name in ((1, "later"), (3, "asked"), (4, "never"))
    )
    assert {"script.used_before_set", "script.never_set"} <= checks(linter.lint(script))
    assert not [f for f in linter.lint(script) if "asked" in f.why]


def test_only_a_module_that_is_run_counts(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("python -m verl.trainer.main_ppo a=1\nrm verl.log\npip list verl.x\n")
    assert dry_run(script).args == ("a=1",)


@pytest.mark.parametrize(
    "value", ["<HEAD_IP>", "your_hf_weights", "xx/data/x.parquet", "['xx/y']", "/path/to/x", "x.x.x.x"]
)
def test_placeholders(value):
    assert PLACEHOLDER.search(value)


@pytest.mark.parametrize("value", ["xxl/model", "/data/xx", "[console,file]", "a=b", "192.0.2.1", "1e-6"])
def test_values_that_are_no_placeholders(value):
    assert not PLACEHOLDER.search(value)


# Composing.


def test_the_configuration_is_the_one_hydra_composes():
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    words = [
        "data.train_batch_size=8",
        f"+{ROLLOUT}.enable_sleep_mode=False",
        "~trainer.esi_redundant_time",
        f"++{ACTOR}.clip_ratio_low=0.1",
        "trainer.logger=[console,file]",
        "actor@actor_rollout_ref.actor=dp_actor",
    ]
    with initialize_config_dir(str(package() / "trainer/config"), version_base=None):
        expected = OmegaConf.to_container(compose("ppo_trainer", words), resolve=True)
    resolved = resolve("verl.trainer.main_ppo", [*words, "hydra.run.dir=x"])
    assert resolved.config == expected and resolved.findings == []


def test_nearest_names():
    def fix(word: str) -> str:
        (finding,) = resolve("verl.trainer.main_ppo", [word]).findings
        return finding.fix

    assert f"{ACTOR}.ppo_mini_batch_size" in fix(f"{ACTOR}.ppo_mini_batchsize=1")
    assert f"{ACTOR}.optim.clip_grad" in fix(f"{ACTOR}.clip_grad=1")
    assert f"+{ROLLOUT}.engine_kwargs.vllm.seed" in fix(f"{ROLLOUT}.engine_kwargs.vllm.seed=1")
    assert f"{ROLLOUT}.max_model_len?" in fix(f"+{ROLLOUT}.max_model_length=1")


def test_geometry_is_read_from_the_checkpoint_if_there_is_one(tiny, tmp_path):
    config = json.loads((tiny / "model/config.json").read_text())
    model = checkpoint(str(tiny / "model"))
    assert (model.layers, model.kv_heads) == (config["num_hidden_layers"], config["num_key_value_heads"])
    assert checkpoint("/data/Qwen3-235B-A22B-hf") == Model.named("qwen3-235b-a22b")
    assert checkpoint("/data/Qwen25-3B-Instruct") == Model.named("qwen2.5-3b")
    assert checkpoint("/data/other") is None
    other = tmp_path / "qwen3-8b"  # what is in the directory counts, not its name
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config | {"model_type": "other", "num_hidden_layers": 7}))
    assert checkpoint(str(other)).layers == 7 and checkpoint(str(other), ("qwen3",)) is None
    (other / "config.json").write_text("{}")
    assert checkpoint(str(other)) is None


@pytest.mark.parametrize("aiv", [False, True])
@pytest.mark.parametrize("model", ["qwen3-235b-a22b", "qwen3-32b"])
def test_the_graph_limit_is_that_of_vllm_ascend(model, aiv, monkeypatch):
    """Against the function itself, cut out of its file: importing it needs torch_npu."""
    source = (ROOT / "frameworks/vllm_ascend/vllm_ascend/utils.py").read_text()
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "update_aclgraph_sizes"]
    tree.body[0].args.args[0].annotation = None
    kept, geometry = [], Model.named(model)
    names = {
        "os": os,
        "math": math,
        "logger": logging.getLogger("upstream"),
        "is_moe_model": lambda config: geometry.experts > 0,
        "update_cudagraph_capture_sizes": lambda config, sizes: kept.append(len(sizes)),
    }
    exec(compile(tree, "upstream", "exec"), names)
    monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", "AIV" if aiv else "")
    for tp, dp, ep in [(4, 32, True), (4, 32, False), (8, 1, False), (1, 1, False)]:
        parallel = SimpleNamespace(
            data_parallel_size=dp,
            tensor_parallel_size=tp,
            enable_expert_parallel=ep,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        )
        compilation = SimpleNamespace(cudagraph_capture_sizes=list(range(1, 100)))
        config = SimpleNamespace(
            compilation_config=compilation,
            parallel_config=parallel,
            speculative_config=None,
            additional_config={},
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(num_hidden_layers=geometry.layers), architectures=["x"]
            ),
        )
        with contextlib.suppress(TypeError):  # it logs the length of sizes that our recorder does not set
            names["update_aclgraph_sizes"](config)
        assert piecewise_limit(geometry.layers, geometry.experts > 0, tp, dp, ep, aiv) == kept[-1]


# The command and the table.


def test_the_command_fails_on_errors_and_prints_json(tmp_path):
    sample = version(next(path for path in MISTAKES if path.stem == "cp_too_large"), "#-", "#+", tmp_path)
    command = [sys.executable, "-X", "importtime", "-m", "ascend_rl.lint", sample]
    command += ["trainer.test_freq=-1", "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert [entry["check"] for entry in json.loads(result.stdout)] == ["parallel.world", "paths.elsewhere"]
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "ascend_rl.lint.findings" in imported and not imported & {"torch", "verl", "vllm", "megatron"}


def test_a_clean_run_exits_0(on_base, capsys):
    assert linter.main([str(on_base("megatron"))]) == 0
    assert "0 errors" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        linter.main(["nonesuch.sh"])
    assert "nonesuch.sh" in capsys.readouterr().err


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_tuning_guide_is_up_to_date(language):
    name = "docs/tuning.md" if language == "en" else f"docs/tuning.{language}.md"
    assert (ROOT / name).read_text(encoding="utf-8") == markdown(language), (
        f"run: python -m ascend_rl.lint.tuning, see {name}"
    )
    for entry in table():
        assert all(
            set(text) == set(LANGUAGES) for text in (entry.when, entry.what, entry.why, entry.conflicts)
        )


def test_the_table_agrees_with_the_pinned_sources():
    """vLLM's and vllm-ascend's own variables are read there, except those the table calls unread."""

    def readers(name: str) -> bool:
        return any(
            subprocess.run(
                ["git", "grep", "-qwE", rf"(getenv|environ).*{name}|\"{name}\":", "--", "*.py"],
                cwd=ROOT / "frameworks" / tree,
                check=False,
            ).returncode
            == 0
            for tree in ("vllm", "vllm_ascend")
        )

    theirs = (entry for entry in table() if "ours" not in entry.source)
    names = {entry.name: entry.unread for entry in theirs if entry.name.startswith("VLLM_")}
    assert {name: readers(name) for name in names} == {name: unread is None for name, unread in names.items()}


def test_the_keys_of_the_table_exist():
    resolved = [
        resolve("verl.trainer.main_ppo", [f"--config-name={name}"]).config
        for name in ("ppo_trainer", "ppo_megatron_trainer")
    ]
    from ascend_rl.lint.verl_config import keys

    known = {key for config in resolved for key in keys(config)}
    for entry in table():
        key = entry.name.replace("...", "actor_rollout_ref.", 1)
        free = re.match(r"(.*\.(?:vllm|override_transformer_config))\..*", key)
        assert entry.variable or (free[1] if free else key) in known, key


@pytest.mark.parametrize("name", ["docs/preflight.md", "docs/preflight.zh.md"])
def test_the_documents_name_every_area_of_rules(name):
    rows = re.findall(r"^\| (`\w+`.*?) \|", (ROOT / name).read_text(encoding="utf-8"), re.M)
    assert {rule.id.partition(".")[0] for rule in RULES} <= set(re.findall(r"`(\w+)`", " ".join(rows)))
