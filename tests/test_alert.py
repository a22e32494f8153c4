"""ALERT: each kind once, by a run of the launcher; a command that fails or hangs delays and ends nothing."""

from __future__ import annotations

import json
import os
import subprocess
import time

import pytest

from ascend_rl.launch import alert
from ascend_rl.launch.alert import Alerts
from ascend_rl.settings.metrics import GAP_MEAN, REWARD


def test_a_command_gets_a_record(tmp_path):
    said: list[str] = []
    alerts = Alerts(f"cat >>{tmp_path}/got; echo noise", tmp_path, said.append)
    alerts.send("end", 7, 'status 1: "quoted" $HOME')
    alerts.wait()
    record = json.loads((tmp_path / "got").read_text())
    assert record.pop("time").startswith("20")
    told = {"kind": "end", "step": 7, "message": 'status 1: "quoted" $HOME', "output_dir": str(tmp_path)}
    assert record == told and said == []


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("exit 3", "ALERT ended with status 3"),
        ("no-such-command", "ALERT ended with status 127"),
        ("sleep 600 & sleep 600", "ALERT did not end within 2 s"),
        ("kill -9 $BASHPID", "ALERT ended with status 137"),
    ],
)
def test_a_command_that_fails_or_hangs_is_one_warning(tmp_path, monkeypatch, command, why):
    monkeypatch.setattr(alert, "DEADLINE_S", 2.0)
    said: list[str] = []
    alerts = Alerts(command, tmp_path, said.append)
    began = time.monotonic()
    alerts.send("stall", 3, "x" * 300_000)  # more than a pipe holds
    assert time.monotonic() - began < 1.5
    alerts.wait()
    assert said == [f"WARNING: the alert 'stall' may be lost: {why}"]
    assert not subprocess.run(
        ["pgrep", "-fx", "sleep 600", "-P", str(os.getpid())], capture_output=True
    ).stdout


def test_steps_without_a_number_or_with_a_gap_are_told_once(tmp_path):
    sent: list[tuple] = []
    alerts = Alerts("true", tmp_path, limit=lambda: 0.05)
    alerts.send = lambda *given: sent.append(given)
    for step, (grad, gap) in enumerate([(1.0, 0.01), (None, 0.01), (float("nan"), 0.5), (None, 0.6)], 1):
        alerts.stepped(step, {REWARD: 0.5, "actor/grad_norm": grad, GAP_MEAN: gap})
    assert [entry[:2] for entry in sent] == [("nan", 2), ("gap", 3)]
    assert (
        sent[0][2] == "no numbers: actor/grad_norm"
        and "do not agree at step 3: probability gap" in sent[1][2]
    )


# The first start fails; the second has a NaN, then a gap, then hangs.
ROW = f"""{{"step": %s, "data": {{"{REWARD}": 0.5, "actor/grad_norm": %s, "{GAP_MEAN}": %s}}}}"""
SCRIPT = f"""
row() {{
    printf '{ROW}\\n' "$@" >>"$OUTPUT_DIR/metrics.jsonl"
    printf 'Training Progress: |#| %s/9 [00:05<02:00]\\n' $1
    sleep 1
}}
if mkdir "$OUTPUT_DIR/first"; then exit 7; fi
row 1 0.1 0.001; row 2 null 0.001; row 3 0.1 0.9; sleep 600
"""


@pytest.mark.long
def test_a_run_tells_each_kind(root, tmp_path):
    (tmp_path / "train_it.sh").write_text(SCRIPT)
    given = {
        "OUTPUT_DIR": tmp_path / "out", "LOG_DIR": tmp_path / "logs", "SKIP_PREFLIGHT": 1, "RAY_NUM_CPUS": 0,
        "RAY_OBJECT_STORE": 80000000, "STALL_DEADLINE_S": 10, "RESTARTS": 1,
    }  # fmt: skip
    command = ["bash", "ray_start_npu.sh", "--alert", f"cat >>{tmp_path}/got", str(tmp_path / "train_it.sh")]
    result = subprocess.run(
        command, cwd=root, env=os.environ | {name: str(value) for name, value in given.items()},
        capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert result.returncode == 124, result.stdout + result.stderr
    got = [json.loads(line) for line in (tmp_path / "got").read_text().splitlines()]
    found = {(record["kind"], record["step"]): record["message"] for record in got}
    assert found.keys() == {("restart", 0), ("nan", 2), ("gap", 3), ("stall", 3), ("end", 3)}, got
    assert found["restart", 0] == "status 7"
    assert found["stall", 3].startswith("no progress for 10 s after step 3 of 9")
    assert found["end", 3] == found["stall", 3]
    assert {record["output_dir"] for record in got} == {str(tmp_path / "out")}
