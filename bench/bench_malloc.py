"""Many short rehearsals under allocators that look for misuse of memory: does any end in malloc?

Usage:    python bench/bench_malloc.py [--runs N] [--recipe NAME] [--environment NAME]
Example:  python bench/bench_malloc.py --runs 5        # under each of 3 allocators: 15 x 2 minutes
          JEMALLOC=~/libjemalloc.so.2 python bench/bench_malloc.py

A training step of GSPO 32B (FSDP2) once ended inside malloc (docs/recipes.md). What corrupts memory shows
there later, or never, depending on the allocator. Each run is one training step of a rehearsal
(docs/rehearsal.md) with its checkpoint:
  glibc               as it is, but with what is allocated or freed filled with garbage (MALLOC_PERTURB_)
  glibc, checked      libc_malloc_debug.so, which ends a process immediately for what is freed twice, was
                      never allocated, or has been written beyond its end (MALLOC_CHECK_=3)
  jemalloc            filled with garbage, ends at its first warning (MALLOC_CONF=junk:true,abort:true)
A run counts if training processes were seen (Ray may not start on a busy machine), and fails if any process
with torch was seen without the allocator. Signals are looked for in all logs. Ctrl-C ends it with what was
measured. The logs of a run that failed, or does not count, are kept and named.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from glob import glob
from pathlib import Path

import psutil
from bars import ROOT, finish, parser_of

from ascend_rl.launch.supervise import descendants
from ascend_rl.preflight.node_facts import environment_of

# What says that a process did end so; Ray also guesses at "SIGSEGV or SIGBUS" when it knows nothing.
SIGNS = re.compile(
    r"\*\*\* SIG(?:SEGV|ABRT|BUS|ILL|FPE)|Segmentation fault|core dumped|double free|corrupted|munmap_chunk"
    r"|<jemalloc>|malloc\w*\(\)|free\(\)|realloc\(\)|cannot be preloaded"
)
TRAINER = "ray::WorkerDict"


def first(*patterns: str) -> str:
    """The first file that fits; the last pattern if there is no such file, which the run then reports."""
    return next((file for pattern in patterns for file in sorted(glob(pattern))), patterns[-1])


def allocators() -> dict[str, dict[str, str]]:
    ray = f"{ROOT}/.venv/lib/python3*/site-packages/ray/core/libjemalloc.so"
    jemalloc = first(os.environ.get("JEMALLOC", ""), "/usr/lib/*-linux-gnu/libjemalloc.so.2", ray)
    checked = first("/lib/*-linux-gnu/libc_malloc_debug.so.0", "/lib64/libc_malloc_debug.so.0")
    return {
        "glibc": {"MALLOC_PERTURB_": "165"},
        "glibc, checked": {"LD_PRELOAD": checked, "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "165"},
        "jemalloc": {"LD_PRELOAD": jemalloc, "MALLOC_CONF": "junk:true,abort:true"},
    }


def started_with(pid: int) -> dict[str, str]:
    """The environment of a process; of a fork that has a title in its place, what it was forked with."""
    found = environment_of(pid)
    return found if "PATH" in found else started_with(psutil.Process(pid).ppid())


def has(pid: int, variables: dict[str, str]) -> bool | None:
    """Whether a process runs under these variables; None if it has no torch."""
    try:
        maps, environment = Path(f"/proc/{pid}/maps").read_text(), started_with(pid)
    except (OSError, psutil.NoSuchProcess):
        return None
    if "libtorch_cpu" not in maps:
        return None
    library = os.path.realpath(variables.get("LD_PRELOAD", "/"))
    return library in maps and all(
        environment.get(name) == value for name, value in variables.items() if name != "LD_PRELOAD"
    )


def rehearse(recipe: str, environment: str, variables: dict[str, str], output: Path) -> dict:
    """Exit code, seconds, trainers seen, processes with torch, those without the allocator, signs."""
    own = {"OUTPUT_DIR": str(output), "LOG_DIR": str(output / "logs"), "RUN_DEADLINE_S": "2400"}
    own |= {"SMOKE": "1", "STEPS": "1", "SKIP_PREFLIGHT": "1", "SKIP_REPORT": "1", "VERBOSE": "1"}
    begin, seen, trainers = time.monotonic(), {}, set()
    said = output.with_name(f"{output.name}.log")  # beside it: a rehearsal wants a directory of its own
    with said.open("w") as console:
        process = subprocess.Popen(
            ["bash", "ray_start_npu.sh", f"internal/train_{recipe}.sh", f"internal/{environment}_env.sh"],
            cwd=ROOT,
            env=os.environ | own | variables,
            stdout=console,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                for pid, name in descendants(process.pid).items():
                    if pid not in seen and (found := has(pid, variables)) is not None:
                        seen[pid] = found
                    if name == TRAINER:  # comes later
                        trainers.add(pid)
                time.sleep(2)
        finally:
            process.terminate()  # the launcher ends all that it started
            process.wait()
    files = (file for file in output.rglob("*") if file.is_file() and file.suffix in (".log", ".err", ".out"))
    text = "\n".join(file.read_text(errors="replace") for file in (said, *files))
    return {
        "exit": process.returncode,
        "seconds": round(time.monotonic() - begin),
        "trainers": len(trainers),
        "processes": len(seen),
        "without": sum(not found for found in seen.values()),
        "signs": sorted(set(SIGNS.findall(text))),
    }


def main() -> int:
    parser = parser_of(__doc__, "once, the smallest recipe, under glibc")
    parser.add_argument("--runs", type=int, default=5, help="under each allocator (default %(default)s)")
    parser.add_argument("--recipe", default="gspo_qwen3_32b_64die_true_weight", help="default %(default)s")
    parser.add_argument("--environment", default="qwen3_32b", help="default %(default)s")
    options = parser.parse_args()
    tried = dict([*allocators().items()][: 1 if options.quick else None])
    if options.quick:
        options.runs, options.recipe, options.environment = 1, "gspo_qwen2_5_3b_8die_fsdp", "qwen2_5_3b"
    directory = Path(tempfile.mkdtemp(prefix="malloc-"))
    runs: list[dict] = []
    print(f"{'allocator':<16}{'run':>4}{'exit':>6}{'s':>6}{'processes':>11}  signs", flush=True)
    try:
        for number in range(options.runs):
            for name, variables in tried.items():
                output = directory / f"{name.replace(', ', '_')}_{number}"
                run = rehearse(options.recipe, options.environment, variables, output)
                bad = bool(run["exit"] or run["signs"] or run["without"])
                runs.append({"allocator": name, "bad": bad} | run)
                print(
                    f"{name:<16}{number + 1:>4}{run['exit']:>6}{run['seconds']:>6}{run['processes']:>11}  "
                    f"{', '.join(run['signs']) or '-'}"
                    + "; training did not begin" * (not run["trainers"])
                    + f"; {run['without']} processes without the allocator" * bool(run["without"])
                    + f"; see {output}" * bad,
                    flush=True,
                )
                if not bad:
                    shutil.rmtree(output)
    except KeyboardInterrupt:
        print("interrupted")
    if not any(run["bad"] for run in runs):
        shutil.rmtree(directory)
    met = []
    for name in tried:
        of = [run for run in runs if run["allocator"] == name and (run["trainers"] or run["signs"])]
        bad = sum(run["bad"] for run in of)
        met.append((f"{name}: of {len(of)} runs, failed", bad, "", "0", bool(of) and not bad))
    return finish("malloc", met, recipe=options.recipe, allocators=tried, runs=runs)


if __name__ == "__main__":
    sys.exit(main())
