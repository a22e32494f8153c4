"""Start a run as a user starts one, and see what it wrote and what it left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ascend_rl.launch.supervise import SharedMemory, descendants

ROOT = Path(__file__).resolve().parents[2]
# For what hangs; on a loaded machine a run takes ten times as long as on an idle one.
PATIENCE_S = 2400
# Greedy responses, one a prompt, one request at a time: all that is random is the order of the prompts. The
# advantages are relative to the batch. The rollout's probabilities are 1 then and the trainer's are not, so
# the gate at the first step needs GAP_LIMIT=0.
REPEATABLE = [
    "actor_rollout_ref.rollout.n=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.top_k=1",
    "actor_rollout_ref.rollout.max_num_seqs=1",
    "algorithm.adv_estimator=reinforce_plus_plus",
    "trainer.val_before_train=False",
]
SAME = ("actor/pg_loss", "actor/grad_norm", "actor/lr", "critic/rewards/mean", "response_length/mean")
# For runs about something else than what the launcher checks before and shows after.
BRIEF = {"SKIP_PREFLIGHT": 1, "SKIP_REPORT": 1}
MEGATRON = {"environment": "cpu_megatron_env.sh", "NPUS_PER_NODE": 2}


def launch(
    script: str,
    output: Path,
    *overrides: str,
    environment: str = "cpu_env.sh",
    inside: Sequence[str] = (),
    **variables,
) -> subprocess.Popen:
    """Start ray_start_npu.sh, by the command ``inside``, on a script of internal/; see `finish`."""
    limits = {"OUTPUT_DIR": output, "RUN_DEADLINE_S": PATIENCE_S, "VERBOSE": 1}
    with console(output).open("w") as file:
        return subprocess.Popen(
            [
                *inside,
                "bash",
                "ray_start_npu.sh",
                f"internal/{script}",
                f"internal/{environment}",
                *overrides,
            ],
            cwd=ROOT,
            env=os.environ | {name: str(value) for name, value in (limits | variables).items()},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def console(output: Path) -> Path:
    return output.with_suffix(".console")


def named(process: subprocess.Popen, name: str) -> list[int]:
    """The pids below a process whose names begin with `name`."""
    return [pid for pid, its_name in descendants(process.pid).items() if its_name.startswith(name)]


def titles(pids: Iterable[int]) -> str:
    """What processes call themselves; Ray's actors, what they do."""
    text = b""
    for pid in pids:
        with contextlib.suppress(OSError):
            text += Path(f"/proc/{pid}/cmdline").read_bytes()
    return text.decode(errors="replace")


def finish(process: subprocess.Popen, output: Path) -> str:
    """Wait for the end and return what the user saw."""
    process.wait(timeout=PATIENCE_S + 300)
    return console(output).read_text()


def metrics(output: Path) -> list[dict]:
    return [json.loads(line)["data"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def training(output: Path) -> list[dict]:
    """The metrics of the training steps."""
    return [row for row in metrics(output) if "actor/pg_loss" in row]


def losses(path: Path) -> dict[int, list[float]]:
    """Step -> what is the same in a repeated run (SAME), of a start's metrics.jsonl, if it is there."""
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError):  # half a line; a validation
                row = json.loads(line)
                found[row["step"]] = [row["data"][key] for key in SAME]
    return found


def environments() -> dict[int, bytes]:
    """The environment of every process one may look at."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = (entry / "environ").read_bytes()
    return found


@contextlib.contextmanager
def nothing_left_of(outputs: Path):
    """Runs inside, whose OUTPUT_DIR is below `outputs`, end, and with them their shared memory and TMPDIR.

    Other runs on this machine do not disturb.
    """
    shm, places = SharedMemory(), set(Path(tempfile.gettempdir()).glob("ascend-rl-*"))

    def left() -> list:
        blocks = set(os.listdir("/dev/shm")) - shm.seen
        directories = set(Path(tempfile.gettempdir()).glob("ascend-rl-*")) - places
        alive = environments()
        return [
            *(blocks - shm.used_by(alive)),
            *(d for d in directories if not any(str(d).encode() in text for text in alive.values())),
        ]

    yield
    mark = f"OUTPUT_DIR={outputs}".encode()
    assert not [pid for pid, environment in environments().items() if mark in environment]
    # What others make and take away meanwhile is gone at the next look.
    deadline = time.monotonic() + 5
    while left() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left()


def run_benchmark(name: str, *arguments: object, statuses: Sequence[int] = (0, 1)) -> None:
    """Run bench/bench_``name``.py --quick, which must store its bars.

    Status 1 is a bar that was missed, which a busy machine may do, unless nothing was measured.
    """
    started = time.time()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, ROOT / f"bench/bench_{name}.py", "--quick", *map(str, arguments)]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    said = ran.stdout[-3000:] + ran.stderr[-3000:]
    assert ran.returncode in statuses and "Traceback" not in ran.stderr, said
    results = [file for file in ROOT.glob("bench/results/*.json") if file.stat().st_mtime >= started]
    assert any(json.loads(file.read_text())["bars"] for file in results), said


def stopped_and_resumed(
    folder: Path, script: str = "train_gspo_qwen3_tiny_cpu.sh", *overrides: str, **variables
) -> dict[int, list[float]]:
    """SIGTERM after step 2 of 9, long before a save is due: the step that is being trained is saved, and the
    same command continues after it. Returns the losses of both starts."""
    output, metrics = folder / "run", folder / "run/metrics.jsonl"
    saving = ["trainer.save_freq=100", "trainer.resume_mode=auto", "trainer.test_freq=-1"]
    given = [*REPEATABLE, *saving, *overrides]
    limits = BRIEF | {"STEPS": 9, "GAP_LIMIT": 0, "SAVE_GRACE_S": PATIENCE_S} | variables
    process = launch(script, output, *given, **limits)
    deadline = time.monotonic() + PATIENCE_S
    while 2 not in losses(metrics):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    text = finish(process, output)
    before = losses(metrics)
    last = max(before)
    assert f"saved at step {last}: the same command resumes" in text, text[-3000:]
    saved = [path.name for path in output.glob("checkpoints/*_step_*")]
    assert process.returncode == 75 and 3 <= last < 9 and saved == [f"global_step_{last}"]
    process = launch(script, output, *given, **limits)
    assert finish(process, output) and process.returncode == 0
    after = losses(metrics)
    assert min(after) == last + 1 and max(after) == 9 and len(before | after) == 9
    return before | after
