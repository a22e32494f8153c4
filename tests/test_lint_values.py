"""lint/values.py, machine.py, pinned.py: paths and machines, and names that the pinned frameworks accept.

The names are compared with what verl itself has after it is imported, so a reader of sources that reads too
little or too much is found. The rules about single values are tried in test_lint.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from mindspeed_tree import needs_mindspeed

from ascend_rl.lint import lint as linter
from ascend_rl.lint import pinned
from ascend_rl.lint import values as lint_values

ROOT = Path(__file__).resolve().parent.parent
FSDP = ROOT / "tests/samples/lint/fsdp.bash"
ACTOR = "actor_rollout_ref.actor"


def errors(script: Path, *words: str, **more) -> dict[str, list]:
    found: dict[str, list] = {}
    for finding in linter.lint(script, None, words, **more):
        if finding.severity == "error":
            found.setdefault(finding.check, []).append(finding)
    return found


@pytest.fixture
def train(tmp_path) -> Path:
    script = tmp_path / "train.bash"
    script.write_text(f'. "{FSDP}"\nrun "$@"\n')
    return script


def test_the_names_are_those_that_verl_itself_accepts():
    """Registries of the imported verl equal what was read from its sources."""
    code = """
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, kl_penalty_forward
from verl.utils.tracking import Tracking
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
import torch
def accepts(name):
    try: return kl_penalty_forward(torch.zeros(1), torch.zeros(1), name) is not None
    except NotImplementedError: return False
kl = [n for n in "kl k1 abs mse k2 low_var_kl k3 full k3+ kl_loss".split() if accepts(n)]
estimators = [str(getattr(n, "value", n)) for n in ADV_ESTIMATOR_REGISTRY]
print(estimators, "|", list(POLICY_LOSS_REGISTRY), "|", kl, "|",
      Tracking.supported_backend, "|", list(ToolParser._registry), "|", list(REWARD_MANAGER))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    keys = (
        "algorithm.adv_estimator",
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        "actor_rollout_ref.actor.kl_loss_type",
        "trainer.logger",
        "actor_rollout_ref.rollout.multi_turn.format",
        "reward.reward_manager.name",
    )
    for key, names in zip(keys, said.splitlines()[-1].split(" | "), strict=True):
        read = set(lint_values.NAMES[key]()) - {"tracking"}
        assert read == set(re.findall(r"'([^']+)'", names)), key


def test_every_source_of_names_yields_some():
    assert all(known() for known in lint_values.NAMES.values())
    assert "dummy" in lint_values._load_formats() and "safetensors" in lint_values._load_formats()
    checked = pinned.checked(lint_values._megatron())["TransformerConfig"]
    assert set(checked["recompute_granularity"]) == {"full", "selective"}


@needs_mindspeed
def test_mindspeeds_sources_yield_names():
    assert pinned.choices(pinned.sources("mindspeed", "**/*.py"))["moe_zero_memory"]


def test_a_name_of_ones_own_is_left_alone(train):
    word = "algorithm.adv_estimator=my_own"
    assert "values.name" in errors(train, word)
    assert "values.name" not in errors(train, word, "actor_rollout_ref.model.external_lib=my_package")


def test_the_correction_can_be_pasted(train):
    """Each override that is offered removes the finding that offers it."""
    spoiled = {
        "values.name": "algorithm.adv_estimator=gropo",
        "values.range": "actor_rollout_ref.rollout.top_p=1.5",
        "algorithm.group_of_one": "actor_rollout_ref.rollout.n=1",
        "values.type": "actor_rollout_ref.rollout.enforce_eager=Ture",
        "values.engine": "actor_rollout_ref.rollout.logprobs_mode=processed_logprob",
        "algorithm.dual_clip": f"{ACTOR}.policy_loss.loss_mode=vanilla {ACTOR}.clip_ratio_c=1.0",
        "train.resume": "trainer.resume_mode=resume_path",
        "rollout.bucket": "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=100",
    }
    for check, words in spoiled.items():
        (finding, *_) = errors(train, *words.split())[check]
        assert finding.override, check
        assert check not in errors(train, *words.split(), finding.override), finding.override


def test_missing_inputs_are_errors_where_the_run_takes_place(train, tmp_path, tiny):
    """Elsewhere nobody can know, unless other inputs or the directory of the missing one are there."""
    assert "paths.missing" not in errors(train)
    assert {f.where for f in errors(train, here=True)["paths.missing"]} == {"actor_rollout_ref.model.path"}
    model = f"actor_rollout_ref.model.path={tiny}/model"
    absent = "data.train_files=/nonexistent/train.parquet"
    assert [f.where for f in errors(train, model, absent)["paths.missing"]] == ["data.train_files"]
    (tmp_path / "train.parquet").touch()
    (finding,) = errors(train, f"data.train_files={tmp_path}/trian.parquet")["paths.missing"]
    assert finding.override == f"data.train_files={tmp_path}/train.parquet"
    assert "paths.missing" not in errors(
        train, "data.train_files=hdfs://x/y", "actor_rollout_ref.model.path=Qwen/Qwen3-8B"
    )


def test_what_is_at_a_path_is_looked_at(train, tmp_path, tiny):
    (tmp_path / "empty").mkdir()
    (tmp_path / "data.txt").touch()
    found = errors(
        train, f"actor_rollout_ref.model.path={tmp_path}/empty", f"data.train_files={tmp_path}/data.txt"
    )
    assert [f.where for f in found["paths.content"]] == ["actor_rollout_ref.model.path", "data.train_files"]
    (finding,) = errors(train, f"actor_rollout_ref.model.path={tiny}")["paths.content"]
    assert finding.override == f"actor_rollout_ref.model.path={tiny}/model"


def test_the_reward_function_is_looked_up(train, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("def compute_score(**_):\n    return 0.0\n")
    words = [
        f"reward.custom_reward_function.path={file}",
        "reward.custom_reward_function.name=compute_scores",
    ]
    (finding,) = errors(train, *words)["paths.function"]
    assert finding.override == "reward.custom_reward_function.name=compute_score"
    assert "paths.function" not in errors(train, words[0], finding.override)
    file.write_text("def compute_score(:\n")
    assert "paths.function" in errors(train, words[0], finding.override)


def test_an_interface_that_does_not_exist(train, monkeypatch):
    assert "env.interface" not in errors(train, here=True)
    monkeypatch.setenv("HCCL_SOCKET_IFNAME", "eth99")
    (finding,) = errors(train)["env.interface"]
    name, _, value = finding.override.removeprefix("export ").partition("=")
    monkeypatch.setenv(name, value)
    assert "env.interface" not in errors(train)


def test_an_official_script_is_read_through(tmp_path):
    """CANN's set_env.sh, a limit that cannot be raised, and fine-tuning are no errors of a script."""
    script = tmp_path / "train.sh"
    start = "python3 -m verl.trainer.main_ppo trainer.nnodes=1\n"
    script.write_text(
        "set -xeuo pipefail\nsource /usr/local/Ascend/ascend-toolkit/set_env.sh\nulimit -n 99999999999\n"
        + start
    )
    assert "script.no_training" not in errors(script)
    script.write_text("set -e\nsource /nonexistent/settings.sh\n" + start)
    assert "script.no_training" not in errors(script)  # a cluster has it: the rest is read
    script.write_text("set -e\nsource /usr/local/Ascend/ascend-toolkit/set_env.sh\nfalse\n" + start)
    assert "script.no_training" in errors(script)  # errexit is back on
    script.write_text('[ $# -ge 2 ] || exit 1\ntorchrun -m verl.trainer.sft_trainer "$@"\n')
    assert errors(script) == {}


def test_a_name_that_is_only_refused_is_none_that_is_accepted(tmp_path):
    code = """
def build(config):
    if config.kind == "good":
        return 1
    if config.kind == "refused":
        raise ValueError
def other(config):
    assert config.kind in ("elsewhere",)
"""
    (file := tmp_path / "code.py").write_text(code)
    assert pinned.compared("config.kind", (file,)) == ("good", "elsewhere")
    assert pinned.compared("config.kind", (file,), "build") == ("good",)
