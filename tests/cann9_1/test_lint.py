"""The linter reads this stack's sources: what verl 0.9.1's own NPU scripts say is no error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ascend_rl.lint.dry_run import environment_script
from ascend_rl.lint.lint import lint
from ascend_rl.settings import stack

SAMPLES = Path(__file__).resolve().parents[1] / "samples/lint"


@pytest.mark.parametrize(
    "base, changes, errors",
    [
        ("megatron", "unset 'SET[$transformer.use_flash_attn]'", []),  # verl sets it
        ("megatron", "SET[$transformer.use_flash_attn]=False", ["train.flash_attn"]),
        ("megatron", "SET[$megatron.grad_offload]=True", ["config.unknown_key"]),  # a key of verl 0.9.0
        ("megatron", "SET[$megatron.router_replay.mode]=R3", []),
        ("megatron", "SET[$megatron.dtype]=float32 SET[actor_rollout_ref.ref.megatron.dtype]=float32", []),
        ("fsdp", "SET[+reward.reward_kwargs.max_resp_len]=8192", []),  # verl asks for it
        ("fsdp", "SET[+reward.reward_kwarg.max_resp_len]=8192", ["config.unknown_field"]),
        ("fsdp", "SET[$actor.use_torch_compile]=True", []),  # as verl's profiling scripts
        ("fsdp", "SET[$actor.strategy]=fsdp3", ["values.name"]),
    ],
)
def test_values_of_this_stack(tmp_path, base, changes, errors):
    script = tmp_path / "train.sh"
    script.write_text(f'set -eu\n. {SAMPLES}/{base}.bash\n{changes}\nrun "$@"\n')
    command = [sys.executable, "-m", "ascend_rl.lint", "--json", str(script)]
    printed = subprocess.run(command, capture_output=True, text=True).stdout
    assert [each["check"] for each in json.loads(printed) if each["severity"] == "error"] == errors


def test_names_are_found_in_the_sources_of_this_stack():
    from ascend_rl.lint.values import NAMES

    assert [key for key, known in NAMES.items() if not known()] == []


def test_what_plug_ins_read_is_known(tmp_path):
    script, where = tmp_path / "train.sh", "actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config"
    names = (
        "hccl_op_expansion_mode graphs_by_rank sam_decoding bs_threshold_for_spec_decode enable_npugraph_ex"
    )
    names += (
        " enable_static_kernel dynamic_eplb eplb_policy_type init_redundancy_expert weight_prefetch_config"
    )
    given = ",".join(f"{name}:1" for name in [*names.split(), "graph_by_rank"])
    script.write_text(f'set -eu\n. {SAMPLES}/fsdp.bash\nSET[+{where}]="{{{given}}}"\nrun "$@"\n')
    wrong = [found.where for found in lint(script) if found.check == "options.vllm_ascend"]
    assert wrong == [f"{where}.graph_by_rank"]


@pytest.mark.parametrize("script", stack.recipes(), ids=lambda path: path.stem)
def test_the_linter_has_nothing_against_a_recipe(script, monkeypatch):
    if "tiny" in script.stem:
        monkeypatch.setenv("NPUS_PER_NODE", "2")
    else:
        for variable in ("MODEL_PATH", "DIST_CKPT_PATH", "OUTPUT_DIR"):
            monkeypatch.setenv(variable, f"/shared/{variable.lower()}")
    serious = {found.check for found in lint(script, environment_script(script)) if found.severity != "info"}
    assert serious == ({"train.saves_nothing"} if "engine_workers" in script.stem else set())
