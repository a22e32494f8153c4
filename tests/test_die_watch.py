"""launch/die_watch.py: readings by the stand-ins, weeks with and without a fault, a run on two hosts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_launcher import Hosts, need_netns

from ascend_rl.host.die_reading import FIGURES, Reader
from ascend_rl.launch.die_watch import ADVICE, AGAIN, DAY_S, Book, DieWatch, Judge
from ascend_rl.process import progress
from ascend_rl.process.die_metrics import by_die
from ascend_rl.process.logs import records
from ascend_rl.rollout.engine_stats import step_metrics

DIES, MINUTE_S = 16, 60.0


def stand_ins(root: Path, machine: str = "a3_healthy", **more: object) -> dict[str, str]:
    """Variables with which npu-smi and hccn_tool print what they print on a machine."""
    places = {
        "PATH": f"{root}/tests/stubs/bin:{os.environ['PATH']}",
        "NPU_SAMPLES": root / "tests/samples" / machine,
    }
    return {name: str(value) for name, value in (places | more).items()}


# Readings.


def test_a_reading_has_what_the_tools_print(root):
    reader = Reader(stand_ins(root), lambda: {3: "19"})
    dies = by_die(reader.read())
    assert reader.calls == 1 + 8 + 4 * DIES
    link = {"link": "UP", "vnic_link": "UP", "link_ups": 2, "link_downs": 1, "packet_errors": 0}
    ecc = dict.fromkeys(("single_bit", "double_bit", "isolated_pages", "pages_to_isolate"), 0)
    of_3 = {"npu": 1, "chip": 1, "rank": "19", "health": "OK", "temperature_c": 35.0, "hbm_used_mb": 2896}
    assert dies[3] == of_3 | ecc | link and len(dies) == DIES
    assert dies[2]["power_w"] == 166.2 and "rank" not in dies[2]


def test_what_a_tool_does_not_print_is_absent_and_not_asked_again(root):
    reader = Reader(stand_ins(root, "a2_busy"))  # no vnic, and a link_stat without "down"
    row = reader.read()
    assert row.keys() == {"time", "die", *FIGURES} - {"rank", "error", "vnic_link", "link_downs"}
    assert row["single_bit"] == [3] * 8 and row["packet_errors"] == [7] * 8 and row["power_w"][7] == 98.3
    asked = reader.calls
    reader.read()
    assert (asked, reader.calls - asked) == (1 + 8 + 4 * 8, 1 + 8 + 3 * 8)

    row = Reader(stand_ins(root, "a3_faulty", ASCEND_RT_VISIBLE_DEVICES="3, 4")).read()
    assert row["die"] == [3, 4] and row["link"] == ["UP", "DOWN"] and "single_bit" not in row
    assert row["error"] == [
        "80E01801 node type=HBM, sensor type=Ecc, event state=multi bit ecc error",
        None,
    ]
    row = Reader(stand_ins(root, "no_driver")).read()
    assert row.keys() == {"time", "failed"} and "dcmi" in row["failed"]


def test_the_stand_ins_play_a_week(root, tmp_path):
    week = {
        "temperature": ("temperature_c", 97.0),
        "health": ("health", "Alarm"),
        "single_bit": ("single_bit", 400),
        "double_bit": ("double_bit", 2),
        "pages_to_isolate": ("pages_to_isolate", 1),
        "link": ("link", "DOWN"),
        "downs": ("link_downs", 5),
        "bad_packets": ("packet_errors", 55),
    }
    lines = [f"{n} {n} {name} {value}" for n, (name, (_, value)) in enumerate(week.items(), 2)]
    (tmp_path / "week").write_text(
        "\n".join(["# as it happens", *lines, "11 12 gone 1", ""]).replace(".0", "")
    )
    reader = Reader(stand_ins(root, NPU_WEEK=tmp_path / "week"))
    first = by_die(reader.read())
    for n, (name, value) in enumerate(week.values(), 2):
        now = by_die(reader.read())
        changed = {(die, name) for die in now for name in now[die] if now[die][name] != first[die].get(name)}
        assert changed == {(i, figure) for i, (figure, _) in enumerate(week.values(), 2) if i <= n}
        assert now[n][name] == value
    reader.read()
    assert 12 in now and 12 not in by_die(reader.read())


def test_a_driver_that_hangs_costs_one_deadline(root, tmp_path, monkeypatch):
    monkeypatch.setattr("ascend_rl.host.npu_tools.run.__defaults__", (None, 1.0))
    began = time.monotonic()
    row = Reader(stand_ins(root, NPU_SMI_HANGS=tmp_path / "pid")).read()
    assert "did not answer within 1 s" in row["failed"] and time.monotonic() - began < 60


# Judgements.


def week_of(rng: random.Random, every_s: float = 30 * MINUTE_S):
    """Readings of a healthy node: load comes and goes, HBM corrects an error now and then."""
    counts = [dict.fromkeys(("single_bit", "packet_errors"), rng.randrange(50)) for _ in range(DIES)]
    for i in range(int(7 * DAY_S / every_s)):
        load = rng.choice([0, 0, 25])
        for die in counts:
            die["single_bit"] += rng.random() < 0.03
            die["packet_errors"] += rng.randrange(3)
        yield {
            "time": i * every_s,
            "die": [*range(DIES)],
            "npu": [die // 2 for die in range(DIES)],
            "chip": [die % 2 for die in range(DIES)],
            "health": ["OK"] * DIES,
            "temperature_c": [40.0 + load + rng.randrange(15) for _ in range(DIES)],
            **{name: [die[name] for die in counts] for name in counts[0]},
            **{name: [1] * DIES for name in ("double_bit", "isolated_pages", "pages_to_isolate")},
            "link": ["UP" if die else "DOWN" for die in range(DIES)],
            **{name: [2] * DIES for name in ("link_ups", "link_downs")},
        }


def changed(row: dict, die: int, **figures) -> dict:
    now = dict(row)
    for name, value in figures.items():
        now[name] = [value(old) if callable(value) else value for old in row[name]]
        now[name] = [
            new if i == die else old for i, (new, old) in enumerate(zip(now[name], row[name], strict=True))
        ]
    return now


def without(row: dict, die: int) -> dict:
    lists = {name: each for name, each in row.items() if name != "time"}
    return {"time": row["time"]} | {name: each[:die] + each[die + 1 :] for name, each in lists.items()}


FAULTS = {  # reason: what a die's figures are from then on
    "health": {"health": "Alarm"},
    "temperature": {"temperature_c": 93.0},
    "single_bit": {"single_bit": lambda old: old + 500},
    "double_bit": {"double_bit": lambda old: old + 1, "pages_to_isolate": lambda old: old + 1},
    "link": {"link": "DOWN", "link_downs": lambda old: old + 1},
    "packet_errors": {"packet_errors": lambda old: old + 20_000},
    "gone": None,
}


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_week_gives_no_warning(seed):
    judge = Judge()
    assert [judge.take(row) for row in week_of(random.Random(seed))].count([]) == 7 * 24 * 2


@pytest.mark.parametrize("reason", FAULTS)
@pytest.mark.parametrize("seed", range(3))
def test_a_fault_gives_one_warning_for_its_die(reason, seed):
    rng = random.Random(seed)
    die, begin, judge, said = rng.randrange(1, DIES), rng.randrange(1, 330), Judge(), []
    for n, row in enumerate(week_of(rng)):
        if n >= begin:
            row = changed(row, die, **FAULTS[reason]) if FAULTS[reason] else without(row, die)
        said += [(n, text) for text in judge.take(row)]
    [(when, text)] = said
    assert text.startswith(f"die {die} (NPU {die // 2} chip {die % 2}) ") and text.endswith(ADVICE[reason])
    assert when == begin + (reason == "gone")


def row_of(n: int, **figures) -> dict:
    """A reading of one die."""
    return {"time": n * MINUTE_S, "die": [0]} | {name: [value] for name, value in figures.items()}


@pytest.mark.parametrize(
    "name", ["temperature_c", "single_bit", "double_bit", "link_downs", "packet_errors", "health"]
)
def test_a_fault_that_grows_is_told_again_when_it_is_much_worse(name):
    """Not at every reading: as often as its size doubles, or is ten times as large."""
    worse = {
        "temperature_c": ([80.0 + i / 10 for i in range(300)], 3),  # from 85: 5 over 80, 10, 20
        "single_bit": (range(0, 99_000, 100), 3),  # 100, 1000, 10_000
        "double_bit": (range(100), 7),  # 1, 2, 4 ... 64
        "link_downs": (range(100), 7),
        "packet_errors": (range(0, 1_100_000, 1000), 4),
        "health": (["OK", "Warning", "Warning", "Alarm", "Alarm", "Critical", "OK", "Critical"], 3),
    }
    values, times = worse[name]
    judge = Judge()
    assert sum(len(judge.take(row_of(n, **{name: value}))) for n, value in enumerate(values)) == times
    assert AGAIN.keys() <= worse.keys()


def test_counters_that_start_again_and_figures_that_are_missing(root):
    judge = Judge()
    values = [100, None, 110, 0, 5, 12]  # a driver was reset
    assert [judge.take(row_of(n, single_bit=v)) for n, v in enumerate(values)][:-1] == [[]] * 5
    assert judge.growth.grown[0]["single_bit"] == 10 + 12
    assert judge.take(row_of(9, single_bit=14))[0].startswith(
        "die 0 (NPU None chip None) has single-bit errors of HBM: 24"
    )


def test_a_link_that_is_down_from_the_start_is_not_used():
    judge = Judge()
    assert judge.take(row_of(0, link="DOWN", vnic_link="UP")) == judge.take(row_of(1, link="DOWN")) == []
    [text] = judge.take(row_of(2, link="DOWN", vnic_link="DOWN"))
    assert "has link losses: 1 since the start, and is down" in text
    judge = Judge()
    for link, ups in (("DOWN", 2), ("UP", 3)):  # it comes up
        assert judge.take(row_of(0, link=link, link_ups=ups, link_downs=1)) == []
    [text] = judge.take(row_of(1, link="UP", link_ups=4, link_downs=2))  # lost between two readings
    assert "has link losses: 1 since the start: look at" in text


def test_readings_that_fail_once_are_no_warning():
    judge = Judge()
    failed = {"failed": "`npu-smi info` did not answer within 10 s"}
    rows = [row_of(0), failed | {"time": 1.0}, row_of(2), *({"time": 3.0 + i} | failed for i in range(9))]
    told = [judge.take(row) for row in rows]
    assert [len(each) for each in told] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert told[4][0].startswith(
        "there are no readings: `npu-smi info` did not answer within 10 s: the driver may"
    )


def test_dies_with_the_same_reason_are_one_warning():
    judge = Judge()
    row = {"time": 0.0, "die": [*range(8)], "npu": [0] * 8, "chip": [0] * 8, "rank": ["7"] * 8}
    [text] = judge.take(row | {"temperature_c": [90.0] * 6 + [50.0] * 2})
    assert (
        text.count("is at 90 C") == 4
        and "die 3 (NPU 0 chip 0, rank 7)" in text
        and "; and 2 more dies" in text
    )


# The head's book, and a node's thread.


def test_a_book_is_one_line_a_reading_and_survives_what_is_none(tmp_path):
    told: list[str] = []
    book = Book(tmp_path / "dies.jsonl", told.append)
    for row in (
        row_of(0, health="OK"),
        "nonsense",
        {"die": [1]},
        row_of(1, health=[]),
        row_of(2, health="Alarm"),
    ):
        book.take("10.0.0.1", row)
    book.take("10.0.0.2", row_of(0, health="OK"))
    book.close()
    book.thread.join(60)
    found = records(tmp_path / "dies.jsonl")
    assert [(row["node"], row["health"], row.get("warnings")) for row in found] == [
        ("10.0.0.1", ["OK"], None),
        ("10.0.0.1", ["Alarm"], told),
        ("10.0.0.2", ["OK"], None),
    ]
    assert told[0].startswith("node 10.0.0.1: die 0 ") and len(told) == 1
    book = Book(tmp_path / "no/such/dies.jsonl", told.append)  # what cannot be written is told all the same
    book.take("10.0.0.3", row_of(0, health="Alarm"))
    book.close()
    book.thread.join(60)
    assert told[1].startswith("node 10.0.0.3: ")


def test_the_metrics_of_a_step_have_what_the_head_wrote_since_the_last_one(tmp_path, monkeypatch):
    """Two nodes over a week, step by step as the trainer asks, against sums over the readings themselves."""
    file, rng = tmp_path / "dies.jsonl", random.Random(4)
    weeks = {node: [*week_of(random.Random(node))] for node in (1, 2)}
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    assert step_metrics({}, {}) == {}  # no node has npu-smi
    book = Book(file, lambda warning: None)
    written, seen = 0, 0
    while written < len(weeks[1]):
        new = weeks[1][written : written + rng.randrange(60)]
        for row in new:
            book.take("10.0.0.1", row)
            book.take("10.0.0.2", weeks[2][written])
            written += 1
        while len(records(file)) < 2 * written:  # the book writes in its own thread
            time.sleep(0.01)
        with file.open("a") as half:
            half.write('{"node": "10.0.0.1", "time"')  # as while the head writes
        found = step_metrics({}, {})
        file.write_bytes(file.read_bytes()[: -len('{"node": "10.0.0.1", "time"')])
        assert bool(found) == bool(new)
        rows = [row for week in weeks.values() for row in week[seen:written]]
        if rows:
            assert found["dies/temperature_c/max"] == max(max(row["temperature_c"]) for row in rows)
            for name in ("single_bit", "packet_errors", "double_bit", "link_downs"):
                grown = [sum(week[written - 1][name]) - sum(week[0][name]) for week in weeks.values()]
                assert found[f"dies/{name}"] == sum(grown), name
            assert "dies/power_w/mean" not in found  # not in these readings
        seen = written
    book.close()


def test_nothing_is_read_without_npu_smi_or_with_0(root, tmp_path):
    rows: list[dict] = []
    before = threading.active_count()
    DieWatch(60, rows.append, env={"PATH": str(tmp_path)}).start()
    DieWatch(0, rows.append, env=stand_ins(root)).start()
    assert threading.active_count() == before and rows == []
    watch = DieWatch(0.01, rows.append, env=stand_ins(root, "a2_busy"))
    watch.start()
    while len(rows) < 2:
        time.sleep(0.05)
    watch.stop()
    last = len(rows)
    time.sleep(1)
    assert len(rows) <= last + 1  # one that had ended when it was stopped


def test_the_command_prints_a_reading_and_its_cost(root):
    command = [sys.executable, "-m", "ascend_rl.launch.die_watch"]
    env = os.environ | stand_ins(root)
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0 and "16 dies in " in found.stdout and " by 73 calls; " in found.stdout
    assert found.stdout.splitlines()[0].split()[:4] == ["die", "npu", "chip", "health"]
    env |= stand_ins(root, "no_driver")
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert found.returncode == 1 and "ERROR: `npu-smi info` shows no table" in found.stderr


def test_a_worker_says_its_rank_and_die(tmp_path, monkeypatch):
    monkeypatch.setenv(progress.FILE, str(tmp_path / "progress"))
    for rank, dies in (("4", "1"), ("5", "0,1"), ("6", ""), ("", "3")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", dies)
        progress.name_rank()
    assert progress.rank_of_die(str(tmp_path / "progress")) == {1: "4"}
    assert progress.ranks(str(tmp_path / "progress")) == {os.getpid(): ""}


# A run on two hosts: two workers on each say who they are, then wait for the test.
TRAINING = """
import os, ray, sys, time
ray.init(log_to_driver=True)
@ray.remote(num_cpus=0, resources={"NPU": 1}, scheduling_strategy="SPREAD")
class WorkerDict:
    def begin(self, rank):
        from ascend_rl.host.core_binding import bind_trainer
        os.environ["RANK"] = str(rank)
        bind_trainer()
        return ray.util.get_node_ip_address(), os.environ["ASCEND_RT_VISIBLE_DEVICES"], rank
workers = [WorkerDict.remote() for _ in range(4)]
print("PLACES", ray.get([w.begin.remote(rank) for rank, w in enumerate(workers)]), flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.1)
"""


@pytest.mark.weekly
def test_a_run_on_two_hosts_names_the_die(root, tmp_path):
    need_netns()
    (tmp_path / "train.py").write_text(TRAINING)
    h = Hosts(root, tmp_path, 2)
    weeks = {host: tmp_path / f"week{host}" for host in (1, 2)}
    try:
        launches = {}
        for host, script in ((1, f"python {tmp_path}/train.py {tmp_path}/go"), (2, "")):
            weeks[host].touch()
            env = stand_ins(root, NPU_WEEK=weeks[host], NPUS_PER_NODE=2, WATCH_DIES_S=1)
            flags = ["--alert", f"cat >>{tmp_path}/got"] if host == 1 else []
            launches[host] = h.launch(host, script, *flags, **env)
        head, worker = launches.values()
        text = head.until("PLACES [")
        places = eval(text.partition("PLACES ")[2].partition("\n")[0])
        [rank] = [rank for address, die, rank in places if (address, die) == (h.address(2), "1")]

        def readings() -> dict[str, int]:
            found = [row["node"] for row in records(tmp_path / "out/dies.jsonl")]
            return {h.address(host): found.count(h.address(host)) for host in (1, 2)}

        def wait(more: int) -> None:
            until, before = time.monotonic() + 300, readings()
            while any(now < before[node] + more for node, now in readings().items()):
                assert time.monotonic() < until, (before, readings(), head.text())
                time.sleep(0.2)

        wait(2)
        assert "WARNING" not in head.text(), head.text()
        said = {}
        for figure, sentence in (
            ("temperature 97", "is at 97 C, the median of its node at 36 C"),
            ("single_bit 400", "has single-bit errors of HBM: 400 since the start"),
            ("downs 3", "has link losses: 2 since the start"),
            ("double_bit 1", "has double-bit errors of HBM: 1 since the start, isolated pages: 0"),
            ("health Alarm", "has health Alarm: if"),
        ):
            with weeks[2].open("a") as week:
                week.write(f"0 1 {figure}\n")
            said[figure] = f"WARNING: node {h.address(2)}: die 1 (NPU 0 chip 1, rank {rank}) {sentence}"
            head.until(said[figure])
        wait(3)
        (tmp_path / "go").touch()
        assert head.end()[0] == 0 and worker.end()[0] == 0
        warnings = [line for line in head.text().splitlines() if "WARNING: node" in line]
        assert len(warnings) == len(said), warnings
        assert "WARNING: node" not in worker.text()

        got = [json.loads(line) for line in (tmp_path / "got").read_text().splitlines()]
        assert [record["kind"] for record in got] == ["die"] * len(said) + ["end"]
        for record, sentence in zip(got, said.values(), strict=False):
            assert record["message"].startswith(sentence.removeprefix("WARNING: "))
        rows = records(tmp_path / "out/dies.jsonl")
        assert min(readings().values()) >= 5
        assert {row["node"] for row in rows if "warnings" in row} == {h.address(2)}
        assert all(max(row["temperature_c"]) < 40 for row in rows if row["node"] == h.address(1))
        assert not [row for row in rows if "failed" in row]
    finally:
        h.close()
