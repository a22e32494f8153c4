"""What docs/stacks.md says of the second stack is what its plug-ins, patches and tests are."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from ascend_rl.glue.cann9_1.options import MANAGER

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/stacks.md").read_text()
GLUE = ROOT / "ascend_rl/glue/cann9_1"


def test_every_patch_of_the_first_stack_has_its_place():
    """Ported or not, and once; listed by framework."""
    rows, rest = PAGE.partition("Not ported yet")[::2]
    rest = rest.partition("## What is wrong")[0]
    named = []
    for text in [row.split("|")[2] for row in rows.splitlines() if row.startswith("| ")] + [rest]:
        for framework, names in re.findall(
            r"(verl|vllm|vllm_ascend|megatron|mindspeed|roll):? ((?:`\w+`[,\s]*)+)", text
        ):
            named += [f"{framework} {name}" for name in re.findall(r"\w+", names)]
    found = [f"{path.parent.name} {path.stem.split('-')[-1]}" for path in ROOT.glob("patches/*/*.patch")]
    assert sorted(named) == sorted(found)


def test_every_hook_and_plugin_is_listed():
    """Each is named in the table of features, and nothing else is."""
    found = set()
    for path in GLUE.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            decorated = [ast.unparse(each) for each in getattr(node, "decorator_list", [])]
            if any(".after(" in each or ".register(" in each for each in decorated):
                found.add(node.name)
    table = PAGE.partition("| feature |")[2].partition("Not ported")[0]
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[-2:][0])}
    assert found <= named and named - found <= {"SamDrafter", "custom_class", "mixed_precision", "register"}


@pytest.mark.parametrize("script", ["quickstart.sh", "build_project.sh", "run_tests.sh"])
def test_an_unknown_stack_is_refused(script):
    command = ["bash", ROOT / script, *(["--target", "cpu"] if script == "build_project.sh" else [])]
    result = subprocess.run(command, env=os.environ | {"STACK": "cann7"}, capture_output=True, text=True)
    assert (
        result.returncode == 1
        and "STACK=cann7: there is no such stack, only cann8.5 and cann9.1" in result.stderr
    )


def test_the_tool_of_patches_refuses_it_too():
    command = ["python3", ROOT / "patches/sources.py", "list"]
    result = subprocess.run(command, env=os.environ | {"STACK": "cann7"}, capture_output=True, text=True)
    assert result.returncode == 1 and "there is no such stack, only cann8.5, cann9.1" in result.stderr


def test_a_recipe_says_the_same_to_both_stacks_but_for_what_is_listed():
    """Keys that verl 0.9.1 lacks are gone, FSDP is FSDP2, SAM a custom class; one process stores a step."""

    def arguments(stack: str, **variables: str) -> set[str] | str:
        script = """
. internal/common.sh
. <(sed -n '/^settle()/,/^# What the layouts need/p' internal/recipe.sh)
OVERRIDES=(actor_rollout_ref.rollout.rollout_rebalance.enable=True)
ARGS=(actor_rollout_ref.actor.strategy=fsdp actor_rollout_ref.ref.load_weight=True a.b=1
      actor_rollout_ref.actor.whole_batch_loss=True actor_rollout_ref.ref.megatron.grad_offload=True
      +x.speculative_config.method=sam actor_rollout_ref.rollout.data_rebalance=True)
[ ! -f "$STACK_DIR/recipe.sh" ] || { . "$STACK_DIR/recipe.sh"; stack; }
settle
printf '%s\n' "${ARGS[@]}" "${OVERRIDES[@]}"
"""
        env = os.environ | {"STACK": stack} | variables
        result = subprocess.run(["bash", "-c", script], env=env, cwd=ROOT, capture_output=True, text=True)
        return set(result.stdout.split()) if result.returncode == 0 else result.stderr

    assert len(arguments("cann8.5", USE_HDP="1")) == 8
    assert arguments("cann9.1", USE_HDP="0") == {
        "actor_rollout_ref.actor.strategy=fsdp2",
        "a.b=1",
        "+x.speculative_config.method=custom_class",
        "+x.speculative_config.model=ascend_rl.glue.cann9_1.sam.SamDrafter",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"+actor_rollout_ref.rollout.agent.agent_loop_manager_class={MANAGER}",
        "+actor_rollout_ref.rollout.custom.data_rebalance=True",
        "+actor_rollout_ref.rollout.custom.rollout_rebalance.enable=True",
    }


def test_the_recipes_of_235b_read_hugging_face_weights_on_the_second_stack():
    def dry_run(name: str, **variables: str) -> subprocess.CompletedProcess:
        environment = {
            "STACK": "cann9.1",
            "DRY_RUN": "1",
            "ALL_TO_ALL_RESHARD": "1",
            "USE_ALLTOALL_OVERLAP": "1",
        } | variables
        command = ["bash", f"internal/train_grpo_qwen3_235b_128die_{name}.sh"]
        return subprocess.run(command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True)

    done = dry_run("true_weight")
    run = json.loads(done.stdout)
    words = dict(word.lstrip("+").partition("=")[::2] for word in run["args"])
    megatron = "actor_rollout_ref.actor.megatron"
    override = f"{megatron}.override_transformer_config"
    added = {
        f"{megatron}.use_mbridge": "True",
        f"{megatron}.vanilla_mbridge": "True",
        f"{override}.moe_alltoall_overlap_comm": "True",
        f"{override}.moe_zero_memory": "level1",
        f"{override}.bias_activation_fusion": "True",
        f"{override}.use_distributed_optimizer": "True",
    }
    assert words | added == words
    gone = (
        "pipeline_num_transformer_layers",
        "dist_checkpointing",
    )
    assert not [key for key in words if any(name in key for name in gone)]
    assert run["env"]["ALL_TO_ALL_RESHARD"] == run["env"]["USE_ALLTOALL_OVERLAP"] == "1"
    alone = json.loads(dry_run("true_weight", USE_ALLTOALL_OVERLAP="0").stdout)["args"]
    assert f"{override}.recompute_granularity=full" in alone
    assert not [word for word in alone if "moe_zero_memory" in word or "moe_alltoall_overlap_comm" in word]
    without = json.loads(dry_run("random_init").stdout)["args"]
    assert {
        f"+actor_rollout_ref.{part}.megatron.override_mcore_model_config.load_weight=False"
        for part in ("actor", "ref")
    } <= set(without)
