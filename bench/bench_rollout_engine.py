"""Tokens per second of a rollout as verl runs it, with each of its switches on, and with all of them.

Usage:    python bench/bench_rollout_engine.py [--devices npu cpu] [--servers 2] [--switches sam gc]
Example:  python bench/bench_rollout_engine.py          # the software NPU, 10 minutes on 2 idle cores
verl's AgentLoopManager, agent loop worker, balancer and vLLMHttpServer, with AsyncLLM, an engine core and a
worker process (mp) each; only the trainer is missing. 16 prompts with 8 samples on the tiny Qwen3, whose
lengths are given, since a tiny model has none of its own: log-normal with the spreads of the published runs
(docs/rollout_rebalance.md), 1/64 as long. Each epoch has lengths of its own, which drift with the prompt;
those of the epoch before are what data_rebalance knows.
The servers of the baseline stay up; next to them start those of one switch after another, and rollouts of the
same epochs alternate. A ratio is that of tokens/s over these epochs. What each switch did is counted in the
same rollouts: one that did nothing is a missed bar. Seconds are the wall clock's, and mostly those of the
host's work: two cores compute for all servers, and no row is the speed of an NPU. Needs data/tiny.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from bars import ROOT, bar, canvas, finish, parser_of, save, tiny_model

PROMPTS, SAMPLES, EPOCHS = 16, 8, 2
SEATS, GRAPHS, DRAFTS = 64, (1, 2, 4, 8, 16, 32, 64), 3
MEDIAN, LONGEST = 6025 / 64, 32768 // 64  # tokens
SPREAD, DRIFT, OF_SAMPLES = 0.564, 0.15, 0.110  # of the logarithm: prompts, from epoch to epoch, samples
VLLM = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
ENVIRONMENT = {  # as ray_start_npu.sh makes it for a rehearsal of a recipe, and for a CPU
    "npu": ". internal/common.sh; . internal/smoke_env.sh; smoke_environment; . internal/npu_env.sh",
    "cpu": ". internal/cpu_env.sh",
}


@dataclass(frozen=True)
class Switch:
    """What a switch sets: options and variables of the servers, or what the driver does; and its traces."""

    options: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    moves: bool = False
    placed: bool = False
    counts: tuple[str, ...] = ()  # more than none, if it did anything
    devices: tuple[str, ...] = ("npu", "cpu")


SWITCHES = {
    "rollout_rebalance": Switch(moves=True, counts=("moves",)),
    "data_rebalance": Switch(placed=True, counts=("placed",)),
    "sam": Switch(
        (
            f"{VLLM}.speculative_config.method=sam",
            f"{VLLM}.speculative_config.num_speculative_tokens={DRAFTS}",
        ),
        counts=("drafted",),
    ),
    "gc": Switch(variables={"ROLLOUT_DISABLE_GC": "1"}, counts=("gc between",)),
    "async": Switch((f"{VLLM}.async_scheduling=True",), counts=("ahead",), devices=("npu",)),
    "no_graphs": Switch(("actor_rollout_ref.rollout.enforce_eager=True",), devices=("npu",)),
}
COLUMNS = (
    "steps",
    "busiest",
    "in graphs",
    "moves",
    "placed",
    "drafted",
    "accepted",
    "ahead",
    "gc within",
    "gc between",
)


def together(names: list[str]) -> Switch:
    """Several switches as one."""
    parts = [SWITCHES[name] for name in names]
    return Switch(
        sum((part.options for part in parts), ()),
        {key: value for part in parts for key, value in part.variables.items()},
        any(part.moves for part in parts),
        any(part.placed for part in parts),
        sum((part.counts for part in parts), ()),
    )


def rows_of(switches: list[str], device: str) -> dict[str, Switch]:
    """What is compared with the baseline: each switch, then all that go together.

    SAM and asynchronous scheduling exclude each other.

    >>> [*rows_of(["sam", "async", "gc", "no_graphs"], "npu")]
    ['sam', 'async', 'gc', 'no_graphs', 'all but async', 'all but sam']
    >>> [*rows_of(["sam", "async", "gc", "no_graphs"], "cpu")]
    ['sam', 'gc', 'all']
    """
    rows = {name: SWITCHES[name] for name in switches if device in SWITCHES[name].devices}
    on = [name for name in rows if name != "no_graphs"]
    if {"sam", "async"} <= rows.keys():
        for left in ("async", "sam"):
            rows[f"all but {left}"] = together([name for name in on if name != left])
    elif len(on) > 1:
        rows["all"] = together(on)
    return rows


def lengths(epochs: int) -> np.ndarray:
    """[epochs, requests] tokens; the samples of a prompt are next to each other."""
    rng = np.random.default_rng(0)
    drawn = np.log(MEDIAN) + SPREAD * rng.standard_normal(PROMPTS)[:, None]
    drawn = drawn + DRIFT * rng.standard_normal((epochs, PROMPTS, 1))
    drawn = drawn + OF_SAMPLES * rng.standard_normal((epochs, PROMPTS, SAMPLES))
    return np.exp(drawn).round().clip(1, LONGEST).astype(int).reshape(epochs, -1)


# In a server.


def watch(server) -> None:
    """Note requests with the statistics of each step, for `seen`."""
    stats, server.seen = server.engine.stats, []
    record = stats.record

    def record_and_note(outputs) -> None:
        record(outputs)
        if found := outputs.scheduler_stats:
            server.seen.append((time.monotonic(), found.num_running_reqs, found.num_waiting_reqs))

    stats.record = record_and_note


def seen(server) -> list[tuple[float, int, int]]:
    found, server.seen = server.seen, []
    return found


def stop(server) -> None:
    server.engine.shutdown()


# On a device.


class Rollouts:
    """The servers of one switch, and verl's manager before them."""

    def __init__(self, switch: Switch, device: str, servers: int, directory: Path):
        from live_servers import Servers, configuration

        rollout = "actor_rollout_ref.rollout"
        config = configuration(
            ROOT / "data/tiny/model",
            directory,
            f"{rollout}.enforce_eager={device == 'cpu'}",
            f"{rollout}.cudagraph_capture_sizes={[*GRAPHS] if device == 'npu' else 'null'}".replace(" ", ""),
            f"{rollout}.engine_kwargs.vllm.distributed_executor_backend=mp",
            f"{rollout}.engine_kwargs.vllm.num_gpu_blocks_override={8 * SEATS}",
            f"{rollout}.max_num_seqs={SEATS}",
            f"{rollout}.response_length={LONGEST}",
            f"{rollout}.max_model_len={LONGEST + 64}",
            f"{rollout}.n_gpus_per_node=1",
            f"{rollout}.use_tqdm=False",
            f"{rollout}.data_rebalance=True",
            f"{rollout}.rollout_rebalance.enable=True",
            f"{rollout}.rollout_rebalance.check_interval_s=0.2",
            *switch.options,
        )
        of_this = type("Servers", (Servers,), {
            "engines": (1,) * servers,
            "devices": tuple(map(str, range(servers))),
            "environment": switch.variables,
        })  # fmt: skip
        self.switch, self.manager = switch, of_this.create(config)
        self.ask(watch)

    def ask(self, function) -> list:
        """What ``function(server)`` returns in each server."""

        async def ask():
            handles = self.manager.server_handles
            return await asyncio.gather(*(server.__ray_call__.remote(function) for server in handles))

        return asyncio.run(ask())

    def run(self, tokens: np.ndarray, moves: bool, placed: bool) -> dict:
        """One rollout: seconds, what was counted, and of each server (s, running, waiting) by step."""
        from live_servers import batch

        from ascend_rl.process.counts import VARIABLE, counted

        requests = batch(
            [{"temperature": 1.0, "ignore_eos": True, "max_tokens": int(count)} for count in tokens], SAMPLES
        )
        manager, counts = self.manager, Path(os.environ[VARIABLE])
        manager.rollout_config.rollout_rebalance.enable = moves
        generate = manager.generate_sequences if placed else type(manager).generate_sequences.__get__(manager)
        self.ask(seen)
        before, began = counted(counts), time.monotonic()
        output = generate(requests)
        seconds = time.monotonic() - began
        assert output.batch["response_mask"].sum(1).tolist() == tokens.tolist()
        did = {name: times - before[name] for name, times in counted(counts).items()}
        timing, by_server = output.meta_info["timing"], self.ask(seen)
        return {
            "tokens": int(tokens.sum()),
            "seconds": seconds,
            "steps": sum(map(len, by_server)),
            "busiest": max(map(len, by_server)),
            "in graphs": timing.get("rollout/graph_steps", 0),
            "moves": did["rollout_rebalance"],
            "placed": did["data_rebalance"],
            "drafted": timing.get("rollout/drafted", 0),
            "accepted": timing.get("rollout/accepted", 0),
            "ahead": did["scheduled_ahead"],
            "gc within": did["gc_within"],
            "gc between": did["gc_between"],
            "running": [[(at - began, *counts) for at, *counts in found] for found in by_server],
        }

    def stop(self) -> None:
        import ray

        self.ask(stop)
        manager = self.manager
        for actor in (*manager.server_handles, *manager.agent_loop_workers, manager.global_load_balancer):
            ray.kill(actor)


def measure(device: str, servers: int, switches: list[str], epochs: int) -> list[dict]:
    """The rows of a device, the baseline first; an epoch that is not measured precedes the others."""
    import psutil
    import ray

    from ascend_rl.launch import warm_start
    from ascend_rl.process.counts import VARIABLE

    drawn, rows = lengths(1 + epochs), rows_of(switches, device)
    plain = Switch()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        os.environ[VARIABLE] = str(directory / "counts")
        os.environ["VLLM_SLEEP_WHEN_IDLE"] = "1"  # else servers that wait for their turn take a core each
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests/patched"), os.environ["PYTHONPATH"]])
        # All processes of Ray and vLLM are forks of one, as in a run on a CPU.
        program = warm_start.start(directory, warm_start.MODULES)
        ray.init("local", num_cpus=32, include_dashboard=False, log_to_driver=False,
                 runtime_env={"py_executable": str(program)})  # fmt: skip

        def started(switch: Switch) -> Rollouts:
            began = time.monotonic()
            made = Rollouts(switch, device, servers, directory)
            made.run(drawn[0], moves=False, placed=True)
            print(f"  servers up in {time.monotonic() - began:.0f} s", flush=True)
            return made

        baseline, found = started(plain), {"baseline": []}
        for name, switch in rows.items():
            own = started(switch) if switch.options or switch.variables else baseline
            found[name], paired = [], []
            for tokens in drawn[1:]:
                paired.append(baseline.run(tokens, False, False))
                found[name].append(own.run(tokens, switch.moves, switch.placed))
            found["baseline"] += paired
            ratios = [speed([one]) / speed([other]) for one, other in zip(found[name], paired, strict=True)]
            found[name].append((speed(found[name]) / speed(paired), *ratios))
            print(f"  {name}: {found[name][-1][0]:.2f}", flush=True)
            if own is not baseline:
                own.stop()
        baseline.stop()
        ray.shutdown()
        for process in psutil.Process().children():  # what forked them
            process.kill()
    found["baseline"].append((1.0, 1.0))
    return [row(name, runs, *ratios) for name, (*runs, ratios) in found.items()]


def speed(runs: list[dict]) -> float:
    return sum(run["tokens"] for run in runs) / sum(run["seconds"] for run in runs)


def row(name: str, runs: list[dict], ratio: float, *of_epochs: float) -> dict:
    """A row of the table: counts are means of a rollout."""
    counts = {column: float(np.mean([run[column] for run in runs])) for column in COLUMNS}
    return {
        "name": name,
        "tokens/s": speed(runs),
        "ratio": ratio,
        "of epochs": of_epochs,
        **counts,
        "running": runs[-1]["running"],
    }


def show(device: str, rows: list[dict]) -> None:
    print(f"{device:<18} {'tokens/s':>8} {'ratio':>5} {'of epochs':>12}", *(f"{c:>10}" for c in COLUMNS))
    for found in rows:
        spread = f"{min(found['of epochs']):.2f} to {max(found['of epochs']):.2f}"
        counts = (f"{found[column]:>10.0f}" for column in COLUMNS)
        print(f"{found['name']:<18} {found['tokens/s']:>8.0f} {found['ratio']:>5.2f} {spread:>12}", *counts)


def picture(name: str, devices: dict[str, list[dict]]) -> None:
    """Running requests of each server over the last rollout of each row, three panels per line."""
    lines = [-(-len(rows) // 3) for rows in devices.values()]
    figure, panels = canvas(sum(lines), 3, figsize=(9, 1.9 * sum(lines)), squeeze=False, sharey=True)
    for panel in panels.flat:
        panel.axis("off")
    for (device, rows), first in zip(devices.items(), np.cumsum([0, *lines]), strict=False):
        end = max(at for found in rows for server in found["running"] for at, *_ in server)
        for panel, found in zip(panels[first:].flat, rows, strict=False):
            panel.axis("on")
            for number, server in enumerate(found["running"]):
                times, running, _ = zip(*server, strict=True)
                panel.step(times, running, where="post", label=f"server {number}", linewidth=1)
            panel.set(xlim=(0, end), ylim=(0, SEATS + 1))
            panel.set_title(f"{device}: {found['name']}", fontsize=8)
        panels[first, 0].set_ylabel("running requests", fontsize=8)
        panels[first, 0].legend(fontsize=7)
    for panel in panels[-1]:
        panel.set_xlabel("s")
    save(figure, name)


# From the shell.


def environment(device: str, servers: int) -> dict[str, str]:
    """The variables that a run on the device has."""
    ours = os.environ | {"NPUS_PER_NODE": str(servers), "ROOT": str(ROOT)}
    command = ["bash", "-c", f"set -a; {ENVIRONMENT[device]}; env -0"]
    made = subprocess.run(command, cwd=ROOT, env=ours, check=True, capture_output=True, text=True).stdout
    found = dict(entry.split("=", 1) for entry in made.split("\0") if "=" in entry)
    return {"PYTHONPATH": str(ROOT)} | found | {"VLLM_LOGGING_LEVEL": "WARNING", "VERL_LOGGING_LEVEL": "WARN"}


def main() -> int:
    parser = parser_of(__doc__, "of the switches only sam, one server, one epoch")
    parser.add_argument("--devices", nargs="+", choices=("npu", "cpu"), default=["npu"], help="(npu)")
    parser.add_argument("--servers", type=int, default=2, help="of 2.5 GB each, twice; 1 to 4 (2)")
    parser.add_argument("--switches", nargs="+", choices=SWITCHES, default=[*SWITCHES], help="(all)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/rollout_engine", metavar="STEM",
                        help="of STEM.json and STEM.png (bench/results/rollout_engine)")  # fmt: skip
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)  # in the process of a device
    arguments = parser.parse_args()
    if not 1 <= arguments.servers <= 4:
        parser.error("--servers must be 1 to 4")
    if arguments.quick:
        arguments.switches, arguments.servers = ["sam"], 1
    if arguments.here:
        found = measure(
            arguments.devices[0], arguments.servers, arguments.switches, 1 if arguments.quick else EPOCHS
        )
        arguments.here.write_text(json.dumps(found))
        return 0

    tiny_model()
    devices = {}
    for device in arguments.devices:
        print(f"{device}: {arguments.servers} servers, {PROMPTS} x {SAMPLES} requests", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            answer = Path(directory, "rows.json")
            command = [sys.executable, __file__, "--here", str(answer), "--devices", device]
            command += ["--servers", str(arguments.servers), "--switches", *arguments.switches]
            command += ["--quick"] * arguments.quick
            subprocess.run(command, env=environment(device, arguments.servers), check=True)
            devices[device] = json.loads(answer.read_text())
    for device, rows in devices.items():
        show(device, rows)
    bars = [
        bar(f"{device}, {found['name']}: {count}", found[count], "a rollout", "> 0")
        for device, rows in devices.items()
        for found in rows[1:]
        for count in rows_of(arguments.switches, device)[found["name"]].counts
    ]
    out = str(arguments.out.absolute())
    picture(out, devices)
    return finish(out, bars, servers=arguments.servers, devices=devices)


if __name__ == "__main__":
    sys.exit(main())
