"""What the config linter catches, and what it calls wrong although it is right.

    python bench/bench_preflight.py [--quick]

1. False errors: verl's 23 official NPU scripts and its other Qwen3 examples that use vLLM, at the pinned tag,
   as they are. Errors that were looked up in the sources and are true stand in TRUE with the reason; any
   other error counts as false. Bar: 0.
2. Caught: HELD_BACK, configurations with one mistake each. They were written after the rules, without running
   them, and no rule was changed for one of them that it missed; those are marked. A mistake is caught if an
   error names the key or the variable to change. Bar: 95 percent.

verl's examples are not in its wheel: they come from git, by the URL of frameworks.lock.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from bars import ROOT, bar, finish, parser_of

from ascend_rl.lint.findings import Finding
from ascend_rl.lint.lint import lint
from ascend_rl.preflight.node_facts import load_lock

SAMPLES = ROOT / "tests/samples/lint"

# Errors of published scripts that are true: (check, text in where, reason).
TRUE = (
    (
        "options.vllm",
        "disable_mm_preprocessor_cache",
        "vLLM 0.13.0 has no such option: its parser ends the server",
    ),
    (
        "train.torch_compile",
        "use_torch_compile",
        "needed on NPUs: the recipes of the practice set it to False",
    ),
    ("train.flash_attn", "use_flash_attn", "written for GPUs; MindSpeed needs it"),
    ("config.syntax", "qwen3_4b_grpo", "a stray } in the name of the experiment: Hydra refuses the word"),
    (
        "script.continuation",
        "run_qwen3_vl-30b-megatron.sh",
        "a comment within continued lines ends the command",
    ),
    ("rollout.routing_replay", "routing_replay", "vLLM 0.13.0 has no enable_return_routed_experts"),
    ("config.empty_value", "", "router_replay/run_qwen30_a3b leaves model and data empty, to be filled in"),
    (
        "algorithm.gspo_aggregation_unset",
        "loss_agg_mode",
        "the patched verl honours it, the released one does not",
    ),
)
# What the cluster manager of some scripts sets.
MANAGED = {
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_GPUS_PER_NODE": "8",
    "ARNOLD_WORKER_NUM": "2",
    "ARNOLD_WORKER_GPU": "8",
    "HDFS_ROOT": "/hdfs",
    "DATA_ROOT": "/data",
}

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.actor.megatron"
T, V = f"+{M}.override_transformer_config", f"+{R}.engine_kwargs.vllm"
HELD_BACK = (  # (clean run, what is changed, what the error must name)
    ("megatron", "algorithm.adv_estimator=ppo", "adv_estimator"),
    ("fsdp", "algorithm.adv_estimator=reinforce++", "adv_estimator"),
    ("fsdp", f"{A}.policy_loss.loss_mode=GSPO", "loss_mode"),
    ("megatron", f"{A}.policy_loss.loss_mode=clip-cov", "loss_mode"),
    ("megatron", f"{A}.use_kl_loss=True {A}.kl_loss_type=kl3", "kl_loss_type"),
    ("megatron", "algorithm.use_kl_in_reward=True algorithm.kl_penalty=lowvar", "kl_penalty"),
    ("megatron", "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptiv", "kl_ctrl.type"),
    ("megatron", f"{A}.loss_agg_mode=seq-mean", "loss_agg_mode"),
    ("megatron", f"{R}.load_format=megatron", "load_format"),
    ("fsdp", f"{R}.load_format=dummy_dtensor", "load_format"),
    ("fsdp", f"{R}.dtype=fp16", "dtype"),
    ("fsdp", f"{R}.quantization=int8", "quantization"),
    ("fsdp", f"{R}.logprobs_mode=raw", "logprobs_mode"),
    ("fsdp", f"{R}.name=vllm_ascend", "rollout.name"),
    ("fsdp", "trainer.resume_mode=latest", "resume_mode"),
    ("fsdp", "trainer.resume_mode=resume_path trainer.resume_from_path=/data/ckpt", "resume_from_path"),
    ("fsdp", "trainer.logger=[console,tensorboardx]", "logger"),
    ("fsdp", "trainer.device=ascend", "device"),
    ("megatron", f"{T}.recompute_granularity=all", "recompute_granularity"),
    ("megatron", f"{T}.moe_zero_memory=1", "moe_zero_memory"),
    ("megatron", f"{T}.context_parallel_algo=ring", "context_parallel_algo"),
    ("megatron", f"{T}.moe_token_dispatcher_type=all2all", "moe_token_dispatcher_type"),  # missed
    ("megatron", f"{M}.dtype=bf16", "megatron.dtype"),
    ("megatron", f"{A}.optim.optimizer=adamw", "optim.optimizer"),
    ("megatron", f"{A}.optim.lr_decay_style=cosin", "lr_decay_style"),
    ("fsdp", f"{A}.optim.lr_scheduler_type=linear", "lr_scheduler_type"),
    ("fsdp", f"{A}.optim.optimizer=Adamw", "optim.optimizer"),
    ("fsdp", f"{A}.strategy=fsdp3", "strategy"),
    ("fsdp", f"{A}.fsdp_config.param_offload=ture", "param_offload"),
    ("fsdp", f"{A}.optim.lr=1e_6", "optim.lr"),
    ("fsdp", f"{R}.temperature=-1", "temperature"),
    ("fsdp", f"{R}.top_p=0", "top_p"),
    ("fsdp", f"{R}.top_k=-2", "top_k"),
    ("fsdp", f"{A}.ppo_epochs=0", "ppo_epochs"),
    ("fsdp", f"{A}.policy_loss.loss_mode=vanilla {A}.clip_ratio_c=0.2", "clip_ratio_c"),
    ("fsdp", f"algorithm.adv_estimator=rloo {R}.n=1", "rollout.n"),
    ("megatron", f"{M}.virtual_pipeline_model_parallel_size=7", "virtual_pipeline"),
    ("megatron", f"{R}.checkpoint_engine.update_weights_bucket_megabytes=512", "bucket"),
    ("fsdp", f"data.max_response_length=32768 {R}.max_model_len=16384", "max_model_len"),
    ("megatron", f"data.max_response_length=65536 {R}.max_model_len=67584", "max_model_len"),
    ("fsdp", "trainer.nnodes=2.5", "nnodes"),
    ("fsdp", f"{R}.multi_turn.enable=True {R}.multi_turn.format=qwen", "multi_turn.format"),
    ("fsdp", "reward.reward_manager.name=math", "reward_manager"),
    ("megatron", f"{A}.router_replay.mode=r2", "router_replay"),
    ("fsdp", f"{V}.max_logprob=5", "max_logprob"),  # missed, and no mistake: argparse completes it
    ("fsdp", f"{V}.scheduling_policy=lifo", "scheduling_policy"),
    ("fsdp", f"{V}.kv_cache_dtype=int8", "kv_cache_dtype"),
    ("megatron", f"{V}.speculative_config={{method:ngram,num_speculative_tokens:0}}", "speculative"),
    ("fsdp", "data.truncation=cut", "truncation"),
    ("fsdp", "actor_rollout_ref.model.path=MODELS/nonexistent", "model.path"),
    ("fsdp", "actor_rollout_ref.model.path=MODELS/model data.train_files=MODELS/trian.parquet", "files"),
    ("fsdp", "reward.custom_reward_function.path=REWARD reward.custom_reward_function.name=score", "name"),
    ("fsdp", "reward.custom_reward_function.path=MODELS/rewards.py", "path"),
    ("megatron", "export HCCL_IF_BASE_PORT=70000", "HCCL_IF_BASE_PORT"),
    ("megatron", "export HCCL_NPU_SOCKET_PORT_RANGE=60050-60000", "HCCL_NPU_SOCKET_PORT_RANGE"),
    ("megatron", "export HCCL_SOCKET_IFNAME=enp999s0", "HCCL_SOCKET_IFNAME"),
    ("fsdp", "HERE trainer.logger=[console,swanlab]", "logger"),
    ("fsdp", f"{A}.entropy_coeff=high", "entropy_coeff"),
    ("fsdp", f"{R}.val_kwargs.n=0", "val_kwargs.n"),
    ("megatron", f"{R}.checkpoint_engine.backend=hccl", "checkpoint_engine.backend"),
)  # fmt: skip


def examples() -> Path:
    """A work tree of verl at the pinned tag."""
    pin = load_lock()["verl"]
    target = Path(tempfile.mkdtemp(prefix="bench_preflight_")) / "verl"
    command = ["git", "clone", "-q", "--depth", "1", "--branch", pin["tag"], pin["url"], str(target)]
    subprocess.run(command, check=True, env=os.environ | {"GIT_ADVICE": "0"}, stderr=subprocess.DEVNULL)
    return target


def chosen(tree: Path) -> list[Path]:
    """The official NPU scripts, then the other Qwen3 examples with vLLM."""
    scripts = sorted(tree.glob("examples/**/*.sh"))
    npu = [path for path in scripts if "npu" in path.name]
    others = []
    for path in scripts:
        text = path.read_text()
        other_engine = (
            re.search(r"sglang|trtllm|sft_trainer", path.name + text) and "rollout.name=vllm" not in text
        )
        if path not in npu and re.search("qwen3", path.name + text, re.I) and not other_engine:
            others.append(path)
    return npu + others


def true(finding: Finding) -> bool:
    return any(finding.check == check and text in finding.where for check, text, _ in TRUE)


def false_errors(tree: Path) -> tuple[int, int, list[tuple[str, Finding]]]:
    """Scripts, true errors, and the false ones with their scripts."""
    before, scripts, sure, wrong = os.getcwd(), chosen(tree), 0, []
    os.environ.update({name: value for name, value in MANAGED.items() if name not in os.environ})
    os.chdir(tree)
    try:
        for path in scripts:
            for finding in lint(path.relative_to(tree)):
                if finding.severity == "error" and true(finding):
                    sure += 1
                elif finding.severity == "error":
                    wrong.append((str(path.relative_to(tree)), finding))
    finally:
        os.chdir(before)
        for name in MANAGED:
            os.environ.pop(name, None)
    return len(scripts), sure, wrong


def caught(base: str, words: str, named: str, directory: Path) -> Finding | None:
    """The error that names what is wrong, if there is one."""
    (directory / "model").mkdir(exist_ok=True)
    (directory / "train.parquet").touch()
    reward = ROOT / "ascend_rl/recipe/math_reward.py"
    words = words.replace("MODELS", str(directory)).replace("REWARD", str(reward))
    here, words = words.startswith("HERE "), words.removeprefix("HERE ")
    bash, overrides = (words, []) if words.startswith("export ") else ("", words.split())
    script = directory / "train.bash"
    script.write_text(f'. "{SAMPLES}/{base}.bash"\n{bash}\nrun "$@"\n')
    here = here or "IFNAME" in bash
    found = [
        f for f in lint(script, None, overrides, here=here) if f.severity == "error" and named in f.where
    ]
    return found[0] if found else None


def main() -> int:
    parser = parser_of(__doc__, "every fourth configuration, no published scripts")
    arguments = parser.parse_args()
    rows, held = [], HELD_BACK[:: 4 if arguments.quick else 1]
    with tempfile.TemporaryDirectory() as directory:
        for base, words, named in held:
            finding = caught(base, words, named, Path(directory))
            said = f"{finding.check}: {finding.override or finding.fix}" if finding else "MISSED"
            rows.append({"base": base, "changed": words, "finding": finding and finding.check})
            print(
                f"{words.replace('actor_rollout_ref.', '...')[:62]:<62}  {said.replace(directory, '')[:100]}"
            )
    share = 100 * sum(row["finding"] is not None for row in rows) / len(rows)
    results = [bar("caught, held back", share, f"% of {len(rows)}", ">= 95 %")]
    if not arguments.quick:
        scripts, sure, wrong = false_errors(examples())
        for script, finding in wrong:
            print(f"false error in {script}: {finding.check} {finding.where}: {finding.why[:120]}")
        print(f"\n{scripts} published scripts: {sure} true errors, which TRUE explains, {len(wrong)} false")
        results.append(("false errors", len(wrong), f"in {scripts} scripts", "0", not wrong))
    return finish("preflight", results, configurations=rows)


if __name__ == "__main__":
    sys.exit(main())
