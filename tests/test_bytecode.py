"""build_project.sh compiles what a run imports: nothing twice, and nothing is left to compile."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import install
import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parent.parent
# Importing as ever, and what it took: the sources that were compiled, the number of full garbage collections.
IMPORT = """
import gc, importlib, json, sys
from importlib.machinery import SourceFileLoader
compiled, source_to_code = [], SourceFileLoader.source_to_code
def recorded(self, data, path, *args, **kwargs):
    compiled.append(path)
    return source_to_code(self, data, path, *args, **kwargs)
SourceFileLoader.source_to_code = recorded
for name in sys.argv[1:]:
    importlib.import_module(name)
sources = [path for path in compiled if path.endswith(".py")]
print(json.dumps([sources, gc.get_stats()[2]["collections"]]))
"""
# Numbers of calls that numba compiled.
CALL = """
import numpy as np
from numba.core import event
with event.install_recorder("numba:compile") as recorder:
    from ascend_rl.experts.eplb import balance, rebalance_table
    from ascend_rl.hdp.hdp import plan
    from ascend_rl.speculation.sam import SamDrafter
    SamDrafter(4, max_bytes=1 << 25).propose("a", np.arange(9), 3)
    table = balance(np.ones((3, 16), np.int32), ranks=8, slots=3)
    rebalance_table(table, np.arange(72.0).reshape(3, 8, 3))
    plan(list(range(1, 50)), cp=4, dp=2, cap_tokens=100)
print(len(recorder.buffer))
"""
RUN = (
    "verl.trainer.main_ppo",
    "verl.workers.fsdp_workers",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "verl.experimental.agent_loop",
    "verl.experimental.reward_loop",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "transformers.models.qwen3.modeling_qwen3",
    "megatron.core.models.gpt",
    "ascend_rl.launch.launch",
    "ascend_rl.launch.launch_node",
    "ascend_rl.preflight.preflight",
    "ascend_rl.recipe.report",
    "ascend_rl.recipe.tiny",
)


def compiled_for(*modules: str, path: Path | None = None) -> list[str]:
    """Sources that a new process compiles when it imports these modules, with ``path`` in front."""
    return imported(*modules, path=path)[0]


def imported(*modules: str, path: Path | None = None) -> tuple[list[str], int]:
    """The sources compiled, and the number of full garbage collections."""
    found = subprocess.run(
        [sys.executable, "-c", IMPORT, *modules],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"} | ({"PYTHONPATH": str(path)} if path else {}),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    generated = "_remote_module_non_scriptable.py"  # by torch, in each process
    compiled, collections = json.loads(found.stdout.splitlines()[-1])
    return [source for source in compiled if Path(source).name != generated], collections


@pytest.mark.parametrize("env", ({"PYTHONDONTWRITEBYTECODE": "1"}, {"SOURCE_DATE_EPOCH": "0"}), ids=str)
def test_what_is_stale_is_compiled_and_nothing_else(tmp_path, monkeypatch, env):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    package = tmp_path / "toy_package"
    (package / "tests").mkdir(parents=True)
    for name in ("__init__", "module", "tests/__init__"):
        (package / f"{name}.py").write_text("value = 1\n")
    (package / "template.py").write_text("class {{ name }}:\n")
    assert install.compile_modules([package]) >= 2
    assert compiled_for("toy_package.module", path=tmp_path) == []
    (package / "template.py").unlink()
    assert install.compile_modules([package]) == 0
    os.utime(package / "module.py", (0, 0))
    assert compiled_for("toy_package.module", path=tmp_path) == [str(package / "module.py")]
    assert install.compile_modules([package]) == 1
    assert compiled_for("toy_package.module", path=tmp_path) == []
    assert not (package / "tests/__pycache__").exists()


def test_a_run_compiles_nothing_and_collects_little():
    """Else each of its processes does so again: fifteen CPU seconds in a rollout server, and two."""
    compiled, collections = imported(*RUN)
    assert compiled == [], "run build_project.sh after changing or installing modules"
    assert collections == 0


def test_numba_compiled_at_build():
    run = subprocess.run([sys.executable, "-c", CALL], check=True, stdout=subprocess.PIPE, text=True, cwd="/")
    assert run.stdout.split() == ["0"], "run build_project.sh after changing a module"


def test_of_a_copied_tree_only_what_differs_is_compiled(root, tree_without):
    (patch,) = root.glob("patches/verl/*-rollout_rebalance.patch")
    variant = tree_without("verl", ["rollout_rebalance"])
    changed = {str(variant / name) for name in re.findall(r"^\+\+\+ b/(.*\.py)$", patch.read_text(), re.M)}
    before = {name: Path(name.replace(str(variant), f"{root}/frameworks/verl")) for name in changed}
    assert all(Path(name).read_bytes() != original.read_bytes() for name, original in before.items())
    compiled = compiled_for("verl.trainer.main_ppo", "verl.workers.rollout.replica", path=variant)
    assert compiled and set(compiled) <= changed
