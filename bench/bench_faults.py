"""Faults in a real training run under `--restarts`: what each costs, and whether the result is the same.

Usage:    python bench/bench_faults.py [--model dense|fsdp2|moe] [--faults NAME@PHASE ...] [--list]
          python bench/bench_faults.py --kills 50 --seed 0
Example:  python bench/bench_faults.py --faults worker@save hang_engine@rollout
          python bench/bench_faults.py                      # 12 minutes on 2 idle cores
One run of a tiny model that saves in every step: each start does one step, and in its next one the next fault
comes. A fault that ends the run is a row too; another run takes the faults after it. With --kills these are
random processes, killed at random times. Phases are seen from outside: in the titles of Ray's processes and
in metrics.jsonl. Responses are greedy and requests go one by one, so that the run can be compared with one
that nothing happened to.

Columns: seconds until the launcher noticed, and until the first training step after that was done; steps
trained again, with the one in which the fault came; orphans: processes of the failed start that are alive
then, at the end of the run also shared memory and temporary files; whether the result is the same: the losses
of all steps, and the greedy answers to held-out prompts after the first step that follows the fault. A file
counts as lost if it was there at a fault and is not whole at the end; partial checkpoints do not.
Bars: the run survives every fault and ends with the same answers, without orphans and lost files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from bars import ROOT, bar, finish, parser_of
from runs import MEGATRON, PATIENCE_S, REPEATABLE, console, environments, launch, losses, named, titles

from ascend_rl.launch.supervise import SharedMemory, descendants
from ascend_rl.process.logs import parts
from ascend_rl.weights.checkpoints import TRACKER

KILL_WITHIN_S = 1.5  # of the first step of a start
STALL_S, SERVER_S = 60, 30
SPARE = 5  # restarts after failures that are no fault of ours
ANSWERS = 32  # held-out prompts
DISK_BYTES = 1 << 30
ACTOR = "actor_rollout_ref.actor"
LAUNCHES = {
    "dense": ("train_gspo_qwen3_tiny_cpu.sh", [], {}),
    "fsdp2": ("train_gspo_qwen3_tiny_cpu.sh", [f"{ACTOR}.strategy=fsdp2"], {"NPUS_PER_NODE": 2}),
    "moe": ("train_gspo_qwen3_moe_tiny_cpu.sh", [], MEGATRON),
}
OVERRIDES = [
    *REPEATABLE,
    "data.train_batch_size=32",
    f"data.val_max_samples={ANSWERS}",
    "data.seed=1",  # without it each start takes other held-out prompts
    "trainer.test_freq=1",
    "trainer.save_freq=1",
    "trainer.resume_mode=auto",
]
VICTIMS = {  # names as in /proc/PID/comm
    "worker": "ray::WorkerDict",
    "engine": "VLLM::EngineCor",
    "server": "ray::vLLMHttpSe",
    "agent": "ray::RolloutWor",
    "reward": "ray::RewardLoop",
    "runner": "ray::TaskRunner",
    "raylet": "raylet",
    "gcs": "gcs_server",
}
PHASES = {  # who does what then, as Ray's titles say
    "start": "WorkerDict.actor_rollout_init_model",
    "rollout": "RolloutWorker.generate_sequences",
    "update": "WorkerDict.actor_rollout_update_actor",
    "save": "WorkerDict.actor_rollout_save_checkpoint",
    "sync": "WorkerDict.actor_rollout_update_weights",
}
FAULTS = [
    *("worker@update", "hang_engine@rollout", "disk_of_checkpoints@update", "engine@rollout", "runner@save"),
    *("raylet@rollout", "gcs@update", "worker@save", "worker@sync", "worker@start", "agent@rollout"),
    *("server@rollout", "engine@sync", "runner@update", "worker@rollout", "reward@rollout"),
    *("hang_worker@update", "disk_of_store@update", "disk_of_log@update"),
]
QUICK = ["engine@rollout", "worker@update"]  # of fsdp2: in place, and from the last checkpoint
IN_PLACE = "it restarts at the next weight sync"  # a vLLM server, without the rest of the run
COLUMNS = ("noticed_s", "again_s", "steps_again", "orphans")


class Failed(Exception):
    """Why a run did not continue."""


# What a run says to somebody outside.


def last_error(output: Path) -> str:
    said = [line for line in console(output).read_text().splitlines() if re.search("(ERROR|Error): ", line)]
    return (said or ["no error was printed"])[-1][:1000]


def answers_of(output: Path) -> Path:
    """Where verl writes its validation: not among the logs, as a full disk there would end the run."""
    return output.with_suffix(".answers")


def answers(output: Path, step: int) -> dict[str, str]:
    """The greedy answers of the validation after a step."""
    lines = (answers_of(output) / f"{step}.jsonl").read_text().splitlines()
    return {row["input"]: row["output"] for row in map(json.loads, lines)}


def different(output: Path, quiet: Path, step: int) -> str:
    """How a start's losses, and its answers after a step, differ from those of the run without faults."""
    expected = losses(quiet / "metrics.jsonl")
    for trained, values in losses(output / "metrics.jsonl").items():
        if any(abs(a - b) > 1e-5 * abs(b) + 1e-7 for a, b in zip(values, expected[trained], strict=True)):
            return f"other losses in step {trained}"
    given, wanted = answers(output, step), answers(quiet, step)
    equal = sum(given.get(prompt) == answer for prompt, answer in wanted.items())
    return "" if equal == len(wanted) == ANSWERS else f"{equal} of {ANSWERS} answers after step {step}"


def alive(processes: dict[int, str]) -> int:
    """How many processes, with when they began, are alive."""
    return sum(bool(when) and born(pid) == when for pid, when in processes.items())


def born(pid: int) -> str:
    """When a living process began, "" for others: a pid alone may be used again."""
    with contextlib.suppress(OSError):
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    return ""


class Files:
    """What files held when they were looked at: a run may append to them and rename them, and no more."""

    def __init__(self, *roots: Path):
        self.roots, self.seen = roots, {}

    def present(self) -> dict[tuple[int, int], Path]:
        found = {}
        for path in (path for root in self.roots for path in root.rglob("*")):
            with contextlib.suppress(OSError):
                inside = {parent.suffix for parent in path.parents}
                if path.is_file() and path.name not in (TRACKER, "ballast") and ".partial" not in inside:
                    found[path.stat().st_dev, path.stat().st_ino] = path
        return found

    def look(self) -> None:
        for key, path in self.present().items():
            with contextlib.suppress(OSError):
                data = path.read_bytes()
                self.seen[key] = (path, len(data), hashlib.sha256(data).digest())

    def lost(self) -> list[str]:
        """Those that are no file's beginning any more, under any name in their directory."""
        present, missing = self.present(), []
        for key, (path, size, digest) in self.seen.items():
            places = [present[key]] if key in present else []
            for place in places + [other for other in present.values() if other.parent == path.parent]:
                if hashlib.sha256(place.read_bytes()[:size]).digest() == digest:
                    break
            else:
                missing.append(str(path))
        return missing


class Disk:
    """A small file system that can be filled; `close` leaves what was on it in its place."""

    def __init__(self, place: Path):
        self.place, self.ballast = place, place / "ballast"
        place.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
        made = subprocess.run(mount, capture_output=True, text=True)
        if made.returncode:
            raise SystemExit(
                f"no file system can be mounted here, choose other faults: {made.stderr.strip()}"
            )

    def fill(self) -> None:
        with self.ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass

    def close(self) -> None:
        kept = self.place.with_name(f"{self.place.name}.kept")
        shutil.copytree(self.place, kept)
        subprocess.run(["umount", str(self.place)], check=True)
        self.place.rmdir()
        kept.rename(self.place)


class Run:
    """A training run that things happen to.

    Args:
        model: key of LAUNCHES.
        output: OUTPUT_DIR; checkpoints are beside it, so that each may have a disk of its own.
        restarts, steps: of the run.
        disks: which of "disk_of_log", "disk_of_checkpoints" and "disk_of_store" (/dev/shm, which has Ray's
            object store) shall be small ones.
    """

    def __init__(self, model: str, output: Path, restarts: int, steps: int, disks: Iterable[str] = ()):
        script, overrides, how = LAUNCHES[model]
        self.output, self.checkpoints = output, output.with_suffix(".checkpoints")
        self.metrics, logs = output / "metrics.jsonl", output.with_suffix(".logs")
        store = output.with_suffix(".store")
        places = {"disk_of_log": output, "disk_of_checkpoints": self.checkpoints, "disk_of_store": store}
        self.disks = {name: Disk(places[name]) for name in disks}
        own_shm = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(store)]
        self.tmp, self.shm = Path(tempfile.mkdtemp(prefix="f-", dir="/tmp")), SharedMemory()
        self.files = Files(output, self.checkpoints, logs)
        self.of_start: dict[int, str] = {}  # pid -> when it began, as in self.victim
        self.victim: dict[int, str] = {}
        environment = {"STEPS": steps, "RESTARTS": restarts, "GAP_LIMIT": 0}
        environment |= {"STALL_DEADLINE_S": STALL_S, "SERVER_DEADLINE_S": SERVER_S}
        self.process = launch(
            script,
            output,
            *OVERRIDES,
            *overrides,
            f"++trainer.validation_data_dir={answers_of(output)}",
            f"trainer.default_local_dir={self.checkpoints}",
            inside=own_shm if "disk_of_store" in self.disks else (),
            **how | environment | {"TMPDIR": self.tmp, "LOG_DIR": logs, "SKIP_REPORT": 1},
        )

    def until(self, what: Callable[[], object], name: str, nap_s: float = 0.05):
        """Wait for something that is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := what()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"no {name} before the end: {last_error(self.output)}")
            time.sleep(nap_s)
        return found

    def reach(self, phase: str) -> None:
        """Wait for a phase of the present step, or of the start; "0.7 s" is a time, not a phase."""
        if phase == "start":
            self.until(lambda: PHASES[phase] in titles(descendants(self.process.pid)), phase)
        elif phase in PHASES:
            pids = [pid for victim in ("worker", "agent") for pid in named(self.process, VICTIMS[victim])]
            self.until(lambda: PHASES[phase] in titles(pids), phase, 0.001)
        else:
            time.sleep(float(phase.split()[0]))

    def hit(self, victim: str, number: int) -> None:
        """Send a signal to the first process of a name, and look at what is there."""
        pids = self.until(lambda: named(self.process, VICTIMS[victim]), f"process of {victim}", 0.001)
        self.victim = {min(pids): born(min(pids))}
        os.kill(min(pids), number)
        self.look()

    def look(self) -> None:
        self.of_start = {pid: born(pid) for pid in descendants(self.process.pid)}
        self.files.look()

    def said(self, text: str) -> int:
        """How often the run said something."""
        return console(self.output).read_text().count(text)

    def failures(self) -> int:
        """How often the run said that it, or a vLLM server, restarts."""
        return self.said("follows and continues from the last checkpoint") + self.said(IN_PLACE)

    def noticed(self, failures: int) -> float:
        """Wait until there is one failure more; returns when."""
        self.until(lambda: self.failures() > failures, "notice of the fault")
        return time.monotonic()

    def goes_on(self, before: int, after: float = math.inf) -> tuple[int, bool]:
        """Wait for a step of a start that is not among those before, or one of this start after ``after``.

        Returns:
            Which step it is, and whether it is one of this start.
        """

        def step():
            again = len(parts(self.metrics)) >= before
            done = [step for step in losses(self.metrics) if again or step > after]
            return done and (min(done), not again)

        return self.until(step, "step", 0.01)

    def end(self) -> dict:
        """Wait for the end, and see what is left."""
        try:
            status = self.process.wait(PATIENCE_S)
        except BaseException:
            self.process.terminate()
            raise
        mark, until = f"OUTPUT_DIR={self.output}\0".encode(), time.monotonic() + 5
        while True:
            everyone = environments()
            left = [f"process {pid}" for pid, text in everyone.items() if mark in text + b"\0"]
            left += set(os.listdir("/dev/shm")) - self.shm.seen - self.shm.used_by(everyone)
            left += os.listdir(self.tmp)
            if store := self.disks.get("disk_of_store"):
                left += os.listdir(store.place)
            if not left or time.monotonic() > until:
                break
            time.sleep(0.5)
        shutil.rmtree(self.tmp, ignore_errors=True)
        lost = self.files.lost()
        for disk in self.disks.values():
            disk.close()
        return {"status": status, "orphans": left, "lost": lost}


def strike(run: Run, fault: str, quiet: Path) -> dict:
    """Let one fault happen to a run; returns its row of the table."""
    what, phase = fault.split("@")
    run.goes_on(0)
    if phase == "start":
        failures = run.failures()
        run.hit(what, signal.SIGKILL)
        run.noticed(failures)
    run.reach(phase)
    failures, before = run.failures(), len(parts(run.metrics)) + bool(losses(run.metrics))
    before_it = run.said(IN_PLACE)  # it may be noticed while the signal is sent
    began, newest = time.monotonic(), losses(run.metrics) or losses(parts(run.metrics)[-1])
    step = 1 + max(newest)
    row = {"fault": what, "phase": phase, "step": step}
    if disk := run.disks.get(what):
        disk.fill()
        run.look()
    else:
        hangs = what.startswith("hang_")
        run.hit(what.removeprefix("hang_"), signal.SIGSTOP if hangs else signal.SIGKILL)
    if what == "disk_of_log":
        run.until((run.checkpoints / f"global_step_{step + 2}").exists, "later step")
        disk.ballast.unlink()
        return row | {"noticed_s": None, "again_s": 0.0, "steps_again": 0, "orphans": 0, "wrong": ""}
    row["noticed_s"] = run.noticed(failures) - began
    may_go_on = run.said(IN_PLACE) > before_it  # unless it was the last server
    if disk:
        disk.ballast.unlink()
    first, in_place = run.goes_on(before, step - 1 if may_go_on else math.inf)
    row |= {"again_s": time.monotonic() - began, "steps_again": 0 if in_place else max(0, step + 1 - first)}
    left = alive(run.victim if in_place else run.of_start)
    return row | {"orphans": left, "wrong": different(run.output, quiet, first)}


def at_random(count: int, seed: int) -> list[str]:
    """Faults of --kills: any process, at any time from the second step of a start on."""
    rng = random.Random(seed)
    return [f"{rng.choice(list(VICTIMS))}@{rng.uniform(0, KILL_WITHIN_S):.2f} s" for _ in range(count)]


def undisturbed(model: str, output: Path, steps: int) -> int:
    """Make a run that nothing happens to, unless there is one; returns how many answers training changes."""
    if not (answers_of(output) / f"{steps}.jsonl").exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(output, ignore_errors=True)
        if (ends := Run(model, output, restarts=2, steps=steps).end())["status"]:
            raise SystemExit(
                f"the run without a fault failed: {ends}; {last_error(output)}; see {console(output)}"
            )
    first, last = answers(output, 1), answers(output, steps)
    return sum(first[prompt] != last[prompt] for prompt in last)


def line(row: dict) -> str:
    """A row of the table in the documentation."""
    numbers = [row[key] for key in COLUMNS]
    cells = ["-" if number is None else f"{number:.0f}" for number in numbers]
    return " | ".join(["", row["fault"], row["phase"], *cells, row["wrong"] or "yes", ""]).strip()


def measure(model: str, outputs: Path, faults: list[str], quiet: Path, steps: int) -> tuple[list, dict]:
    """One run with faults, one after another, until one of them ends it; returns rows and the run's end."""
    disks = {what for what, _, _ in (fault.partition("@") for fault in faults) if what.startswith("disk_")}
    run = Run(model, outputs / f"run_{time.strftime('%H%M%S')}", len(faults) + SPARE, steps, disks)
    table, problem, interrupted = [], "", False
    try:
        for fault in faults:
            table.append(strike(run, fault, quiet))
            print(line(table[-1]), flush=True)
    except (Failed, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        problem = str(error) or "interrupted"
        what, phase = fault.split("@")
        table.append({"fault": what, "phase": phase, "wrong": problem} | dict.fromkeys(COLUMNS))
        print(line(table[-1]), flush=True)
        run.process.terminate()
    ends = run.end()
    ends["wrong"] = problem or (different(run.output, quiet, steps) if not ends["status"] else "it failed")
    noticed = sum(row["noticed_s"] is not None for row in table)
    ends |= {"failures_without_a_fault": max(0, run.failures() - noticed), "interrupted": interrupted}
    print(f"the end: status {ends['status']} {ends['wrong']}")
    print(
        *(f"left: {each}" for each in ends["orphans"]), *(f"lost: {each}" for each in ends["lost"]), sep="\n"
    )
    return table, ends


def main() -> int:
    parser = parser_of(__doc__, f"with fsdp2 {' and '.join(QUICK)}")
    parser.add_argument("--model", choices=LAUNCHES, default="dense")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS, metavar="NAME@PHASE")
    parser.add_argument("--list", action="store_true", help="print the faults")
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="N random kills instead")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.quick:
        args.model, args.faults = "fsdp2", QUICK
    if args.list:
        print(*FAULTS, sep="\n")
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):  # either ends the run, and what was measured is kept
        signal.signal(number, signal.default_int_handler)
    name = "fault_kills" if args.kills else "faults"
    faults = at_random(args.kills, args.seed) if args.kills else args.faults
    outputs = ROOT / f"outputs/bench_{name}_{args.model}"
    if args.quick:
        shutil.rmtree(outputs, ignore_errors=True)  # also the run without a fault: of other code, perhaps
    steps = (3 if args.kills else 2) * len(faults) + 6
    quiet = outputs / f"none_{steps}"
    for old in set(outputs.glob("*")) - set(outputs.glob("none_*")):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    changed = undisturbed(args.model, quiet, steps)
    print(f"{args.model}, {steps} steps without a fault: {changed} of {ANSWERS} answers change", flush=True)
    print("| fault | phase | noticed, s | trains again, s | steps again | orphans | same |", flush=True)
    table, ends = [], []
    while len(table) < len(faults) and not (ends and ends[-1]["interrupted"]):
        rows_of_run, end = measure(args.model, outputs, faults[len(table) :], quiet, steps)
        table += rows_of_run
        ends.append(end)
    survived = sum(not row["wrong"] for row in table)
    orphans = sum(row["orphans"] or 0 for row in table) + sum(len(end["orphans"]) for end in ends)
    lost = sum(len(end["lost"]) for end in ends)
    good = sum(not end["status"] and not end["wrong"] for end in ends)
    bars = [
        bar("answers that training changes", changed, "", "> 0"),
        ("faults survived with the same result", survived, "", f">= {len(faults)}", survived >= len(faults)),
        ("runs that end well, with the same answers", good, "", str(len(ends)), good == len(ends)),
        ("orphans", orphans, "", "0", not orphans),
        ("files lost", lost, "", "0", not lost),
    ]
    settings = {
        "model": args.model,
        "seed": args.seed,
        "steps": steps,
        "stall_deadline_s": STALL_S,
        "server_deadline_s": SERVER_S,
    }
    return finish(name, bars, **settings, ends=ends, faults=table)


if __name__ == "__main__":
    sys.exit(main())
