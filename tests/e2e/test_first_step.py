"""What ray_start_npu.sh shows on a terminal, and its gate of the first step, with real Ray."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import termios
from pathlib import Path

import pytest
import torch

from ascend_rl.launch import first_step
from ascend_rl.settings.metrics import GAP_MEAN, LOG_GAP

pytestmark = [pytest.mark.timeout(600)]

# A recipe whose trainer is over at once: verl's own comparison of log-probs and its own metrics file.
RECIPE = """
echo "[12:00:00] the recipe starts" >&2
echo "a line for the log"
mkdir -p "$OUTPUT_DIR/hydra/.hydra"
cat > "$OUTPUT_DIR/hydra/.hydra/config.yaml" <<EOF
actor_rollout_ref:
  rollout: {dtype: $DTYPE}
  actor: {strategy: megatron, megatron: {dtype: $DTYPE}}
EOF
printf 'Training Progress:   0%%|          | 0/3 [00:00<?, ?it/s]\\n'
cat > "$OUTPUT_DIR/run.py" <<EOF
import os, sys, time
import torch
from verl import DataProto
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.tracking import FileLogger

logger = FileLogger("a", "b")
torch.manual_seed(0)
trained = torch.log_softmax(4 * torch.randn(8, 16, 32), -1)[..., 0]
rolled_out = trained + float(sys.argv[1]) * torch.randn(trained.shape)
mask = torch.ones(8, 16, dtype=torch.long)
batch = {"responses": mask, "old_log_probs": trained, "rollout_log_probs": rolled_out, "response_mask": mask}
seen = {"critic/rewards/mean": 0.25, "response_length/mean": 16.0}
seen |= {"perf/throughput": 99.0, "timing_s/step": 1.0}
for step in 1, 2, 3:
    logger.log(calculate_debug_metrics(DataProto.from_dict(tensors=batch)) | seen, step)
    print(f"Training Progress:  {step * 33}%|###       | {step}/3 [00:01<00:01, 1.00s/it]", flush=True)
    time.sleep(float(sys.argv[2]))
EOF
python "$OUTPUT_DIR/run.py" "$NOISE" "$PAUSE"
echo "received SIGTERM. Draining for up to 30.0 seconds"
"""


@pytest.fixture
def launched(root, tmp_path):
    recipe = tmp_path / "train_short.sh"
    recipe.write_text(RECIPE)

    def launch(noise: float, pause_s: float, dtype: str = "bfloat16", **how) -> subprocess.Popen:
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | how
        variables = {"OUTPUT_DIR": tmp_path / "run", "LOG_DIR": tmp_path / "logs", "SKIP_PREFLIGHT": 1}
        variables |= {"NOISE": noise, "PAUSE": pause_s, "DTYPE": dtype, "RUN_DEADLINE_S": 300}
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        return subprocess.Popen(["bash", "ray_start_npu.sh", recipe], cwd=root, env=environment, **how)

    return launch


@pytest.mark.long
def test_a_terminal_shows_a_line_and_then_the_report(launched, tmp_path):
    """80 columns: nothing of Ray's, nothing longer than a line, and the picture's path as the last words."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    process = launched(0.001, 1, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while True:
            shown += os.read(ours, 1000)
    os.close(ours)
    assert process.wait(300) == 0, shown.decode()
    lines = [line.strip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[K", "", shown.decode()))]
    run = tmp_path / "run"
    paths = [line for line in lines if str(tmp_path) in line]
    assert paths[0].startswith("starting Ray") and paths[1:] == [
        str(run / "report.png"),
        str(run / "report.json"),
    ]
    assert all(len(line) < 80 for line in lines if line not in paths and not line.startswith("[")), lines
    assert any(line.startswith("step 3/3  reward 0.25  length 16  gap ") for line in lines)
    assert "[12:00:00] the recipe starts" in lines and "a line for the log" not in lines
    assert any("rollout and trainer agree: probability gap" in line for line in lines)
    assert lines.index(next(line for line in lines if line.startswith("training steps"))) > len(lines) - 30
    whole = "\n".join(lines)
    assert not re.search(r"Traceback|acl|Draining|Next steps|usage_lib|Training Progress", whole)
    log = (run / "train.log").read_text()
    assert "a line for the log" in log and "Draining" in log and (run / "report.png").stat().st_size > 10_000


@pytest.mark.long
def test_a_rollout_of_another_model_ends_the_run_at_its_first_step(launched, tmp_path):
    """Log-probs that differ by 3 on average; without a terminal the output is a few lines."""
    process = launched(3, 60)
    text = process.communicate()[0]
    assert process.returncode == 1, text
    assert "ERROR: rollout and trainer do not agree at the first step: probability gap" in text
    assert "(limit 0.05)" in text and "Likely causes" in text and "GAP_LIMIT=" in text
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) < 3  # it ended before its last step
    assert len(text.splitlines()) < 60 and "\r" not in text
    assert not (tmp_path / "run/report.json").exists()


# The judge.


@pytest.mark.parametrize(
    ("dtypes", "gap", "agree"),
    [
        (("float32", "float32"), 3e-7, True),
        (("float32", "float32"), 2e-4, False),  # what bfloat16 on one side only would look like
        (("bfloat16", "float32"), 2e-4, True),
        (("bfloat16", "bfloat16"), 6e-3, True),
        (("bfloat16", "bfloat16"), 0.06, False),
        (("bfloat16", "bfloat16"), None, False),  # verl's NaN
    ],
)
@pytest.mark.parametrize("strategy", ["megatron", "fsdp"])
def test_the_limit_is_that_of_the_dtype(tmp_path, dtypes, gap, agree, strategy):
    actor = {"strategy": strategy, "megatron": {"dtype": dtypes[1]}, "fsdp_config": {"dtype": dtypes[1]}}
    (tmp_path / "hydra/.hydra").mkdir(parents=True)
    config = {"actor_rollout_ref": {"rollout": {"dtype": dtypes[0]}, "actor": actor}}
    (tmp_path / "hydra/.hydra/config.yaml").write_text(json.dumps(config))
    said: list[str] = []
    why = first_step.gate("", tmp_path, said.append)({GAP_MEAN: gap})
    assert (not why, len(said)) == (agree, int(agree))


@pytest.mark.parametrize(("top_p", "top_k", "agree"), [(1, -1, False), (0.9, -1, True), (1, 50, True)])
def test_truncated_sampling_is_no_other_model(tmp_path, top_p, top_k, agree):
    """The log-probs of a vocabulary of 1000, of which the sampler keeps top_p or top_k, and of all."""
    rollout = {"dtype": "float32", "top_p": top_p, "top_k": top_k}
    actor = {"strategy": "megatron", "megatron": {"dtype": "float32"}}
    (tmp_path / "config.yaml").write_text(
        json.dumps({"actor_rollout_ref": {"rollout": rollout, "actor": actor}})
    )
    whole = torch.softmax(4 * torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)), -1)
    kept, _ = whole.sort(-1, descending=True)
    before = kept.cumsum(-1) - kept
    keep = (before < 0.9) if top_k < 0 else (torch.arange(1000) < top_k)
    share = (kept * keep).sum(-1, keepdim=True)
    sampled = kept * keep / share
    gap = (sampled * (sampled - kept).abs()).sum(-1).mean().item()  # over the tokens that are sampled
    assert gap > 1e-3
    limit = first_step.limit_for(tmp_path / "config.yaml")
    assert first_step.judge({GAP_MEAN: gap}, limit)[0] == agree
    assert not first_step.judge({LOG_GAP: 2.0}, limit)[0]  # nats: another model


def test_the_limit_can_be_set_and_switched_off():
    row = {GAP_MEAN: 0.06}
    said: list[str] = []
    assert [
        bool(first_step.gate(text, Path("/none"), said.append)(row)) for text in ("", "0.1", "0.01", "0")
    ] == [
        True,
        False,
        True,
        False,
    ]
    assert len(said) == 1  # switched off it says nothing


def test_log_probs_are_taken_where_the_trainer_computes_none_before_the_update():
    assert first_step.judge({LOG_GAP: 2.5}, 0.05)[0] is False
    assert first_step.judge({LOG_GAP: 0.08}, 0.05)[0] is True
    assert first_step.judge({LOG_GAP: 2.5, GAP_MEAN: 0.004}, 0.02)[0] is True
    agree, sentence = first_step.judge({}, 0.02)
    assert agree and "calculate_log_probs=True" in sentence
