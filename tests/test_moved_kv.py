"""Files of KV: what one cache gives is what another gets; all else is refused, and nothing stays behind."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ascend_rl.rollout import moved_kv
from ascend_rl.rollout.moved_kv import HEADER_BYTES, PARAMETER, Depot, block_views, read, write
from ascend_rl.rollout.request_mover import MovableRequests

MODEL = {"model": "m", "block_size": 4}


def cache(kind: str, blocks: int, dtype, seed: int) -> dict:
    """By layer, as vLLM's backends lay it out: for CPUs one tensor, for NPUs keys and values."""
    torch.manual_seed(seed)

    def part(*shape):
        return torch.randint(-100, 100, shape).to(dtype)

    layers = [f"layers.{i}" for i in range(3)]
    if kind == "one":
        return {name: part(2, blocks, 2, 4, 8) for name in layers}
    if kind == "heads_first":  # the strides of another order than the shape's
        return {name: part(2, blocks, 4, 2, 8).transpose(2, 3) for name in layers}
    return {name: (part(blocks, 4, 2, 8), part(blocks, 4, 1, 3)) for name in layers}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("kind", ["one", "heads_first", "two"])
def test_the_blocks_of_one_cache_arrive_in_another(tmp_path, kind, dtype):
    """Against copies slot by slot; the target is of another size and needs only the last blocks."""
    source, target, before = (cache(kind, *rest) for rest in ((17, dtype, 0), *[(29, dtype, 1)] * 2))
    rng = random.Random(0)
    for number in range(20):
        count = rng.randint(1, 9)
        given, blocks = rng.sample(range(17), count), rng.sample(range(29), count)
        skip = rng.randrange(count)
        write(tmp_path / f"{number}.kv", block_views(source, 17), given, count * 4)
        read(tmp_path / f"{number}.kv", block_views(target, 29), blocks[skip:], skip)
        for layer in source:
            for a, b in zip(given[skip:], blocks[skip:], strict=True):
                for from_, to in zip(source[layer], before[layer], strict=True):
                    to[b] = from_[a]
    for layer in source:
        for found, expected in zip(target[layer], before[layer], strict=True):
            assert torch.equal(found, expected)


def saved(source: Depot, name="movable/x/0", weights=1, tokens=10) -> str:
    source.expect(name, weights)
    directory = source.directory / moved_kv.place(name)
    for rank in range(source.workers):
        write(
            directory / f"{rank}.kv", block_views(cache("one", 8, torch.float32, rank), 8), [1, 3, 5], tokens
        )
    return asyncio.run(source.saved(name, 1))


@pytest.fixture
def depots(tmp_path, monkeypatch):
    """A source and a target of two workers each; at the end nothing is left of what the test did."""
    monkeypatch.setattr(moved_kv, "PIECE_BYTES", 1000)  # a file has several, and a last one that is shorter
    depots = [Depot(tmp_path / "kv", name, MODEL, 2) for name in ("source", "target")]
    yield depots
    (tmp_path / "kv").mkdir(exist_ok=True)
    left = list((tmp_path / "kv").rglob("*.kv")) + list((tmp_path / "kv").rglob("*.part"))
    for depot in depots:
        depot.clear()
    assert not list((tmp_path / "kv").iterdir())
    assert not left, "clear() should not have been needed"


def test_a_target_takes_what_was_saved_once(depots):
    source, target = depots
    given = saved(source)
    found = asyncio.run(target.take(given, 1))[PARAMETER]
    assert found["tokens"] == 10 and len(list(Path(found["directory"]).glob("*.kv"))) == 2
    assert asyncio.run(target.take(given, 1)) is None
    moved_kv._remove(found["directory"])


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


DAMAGE = {
    "a bit of the data": lambda d: flip(d / "1.kv", -1),
    "the header": lambda d: flip(d / "0.kv", 0),
    "zeros": lambda d: (d / "0.kv").write_bytes((d / "0.kv").read_bytes()[:-64] + bytes(64)),
    "cut": lambda d: os.truncate(d / "1.kv", (d / "1.kv").stat().st_size - 8),
    "cut within a word": lambda d: os.truncate(d / "1.kv", (d / "1.kv").stat().st_size - 3),
    "empty": lambda d: os.truncate(d / "0.kv", 0),
    "no header but null": lambda d: (d / "0.kv").write_bytes(b"null".ljust(HEADER_BYTES)),
    "missing": lambda d: (d / "1.kv").unlink(),
    "not described": lambda d: (d / "about.json").unlink(),
    "gone": moved_kv._remove,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_is_damaged_is_refused_and_removed(depots, damage):
    source, target = depots
    damage(Path(given := saved(source)))
    assert asyncio.run(target.take(given, 1)) is None


def test_ranks_that_saved_unequal_lengths_are_refused(depots):
    source, target = depots
    directory = Path(saved(source))
    parts = block_views(cache("one", 8, torch.float32, 0), 8)
    write(directory / "1.kv", parts, [1, 3, 5], 11)
    assert asyncio.run(target.take(str(directory), 1)) is None


@pytest.mark.parametrize("unlike", [{"weights": 2}, {"model": "other"}, {"block_size": 8}])
def test_kv_of_other_weights_or_another_engine_is_refused(depots, unlike):
    source, target = depots
    weights = unlike.get("weights", 1)
    target.about |= {key: value for key, value in unlike.items() if key in MODEL}
    assert asyncio.run(target.take(saved(source), weights)) is None


def test_a_cache_of_another_layout_is_not_written_to(tmp_path):
    write(tmp_path / "0.kv", block_views(cache("one", 8, torch.float32, 0), 8), [1], 4)
    target = block_views(cache("one", 8, torch.float16, 0), 8)
    with pytest.raises(ValueError, match="another layout"):
        read(tmp_path / "0.kv", target, [1], 0)


def test_without_enough_room_nothing_is_written(tmp_path, monkeypatch):
    """Half of what is free may be taken; if the system refuses, that is known before a page is touched."""
    parts, file = block_views(cache("one", 8, torch.float32, 0), 8), tmp_path / "0.kv"
    write(file, parts, [1, 2], 8)
    size = file.stat().st_size
    file.unlink()
    free = [2 * size - 1]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result([1, 1, *free * 3, 0, 0, 0, 0, 255]))
    with pytest.raises(OSError, match="more than half"):
        write(file, parts, [1, 2], 8)
    free[0] += 1
    write(file, parts, [1, 2], 8)
    file.unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, limits[1]))
    try:
        with pytest.raises(OSError, match="large"):
            write(file, parts, [1, 2], 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not file.exists()


def test_nobody_waits_for_what_does_not_come(depots):
    """Given up by a worker: at once. Not saved in time: removed, so that it is not saved later either."""
    source, _ = depots
    source.expect("movable/x/0", 1)
    moved_kv._remove(source.directory / "movable-x-0")
    assert asyncio.run(asyncio.wait_for(source.saved("movable/x/0", 1000), 10)) is None
    source.expect("movable/y/0", 1)
    assert asyncio.run(source.saved("movable/y/0", 0.05)) is None
    assert not (source.directory / "movable-y-0").exists()


OWNER = """
import json, sys, time
from ascend_rl.rollout.moved_kv import Depot
depot = Depot(sys.argv[1], "owner", {}, 1)
depot.expect("movable/x/0", None)
(depot.directory / "movable-x-0/0.kv").write_bytes(bytes(1000))
print("ready", flush=True)
time.sleep(1000)
"""


def test_what_a_killed_server_leaves_is_removed_by_the_next_or_by_another(tmp_path):
    other = Depot(tmp_path, "other", {}, 1)
    for clear in (other.clear, lambda: Depot(tmp_path, "next", {}, 1)):
        command = [sys.executable, "-c", OWNER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout.readline() == "ready\n"
            clear()
            assert len(list(tmp_path.glob("*-owner/movable-x-0/0.kv"))) == 1, "it is alive"
            owner.send_signal(signal.SIGKILL)
        clear()
        assert not list(tmp_path.iterdir())


def test_a_lock_is_one_that_network_file_systems_pass_on(depots):
    """On a regular file that is open for writing: they turn it into one on the server's file."""
    source, _ = depots
    source._own()
    lock = source.directory / "lock"
    locks = Path("/proc/locks").read_text().splitlines()
    (line,) = [line for line in locks if f":{lock.stat().st_ino} " in line]
    assert lock.is_file() and line.split()[1:5] == ["FLOCK", "ADVISORY", "WRITE", str(os.getpid())]


def test_a_server_of_another_host_is_taken_for_dead_after_a_day(depots):
    """Whose lock may look free from here."""
    source, target = depots
    other = source.directory.with_name("ascend-rl-kv-0123456789ab-source")
    (other / "movable-x-0").mkdir(parents=True)
    target.clear()
    assert (other / "movable-x-0").exists()
    os.utime(other, (1, time.time() - 25 * 3600))
    target.clear()
    assert not other.exists()


class Connector:
    """Of vLLM's base class what the scheduler's side needs."""

    def __init__(self, vllm_config, role, kv_cache_config):
        pass


class Scheduling(moved_kv.MovedKV, Connector):
    def __init__(self, depot: Depot):
        transfer = SimpleNamespace(kv_connector_extra_config={"directory": str(depot.directory)})
        cache_config = SimpleNamespace(block_size=4)
        super().__init__(SimpleNamespace(kv_transfer_config=transfer, cache_config=cache_config), None)

    def end(self, name: str, tokens: int, kv=None) -> None:
        request = asked(name, kv, num_computed_tokens=tokens)
        assert self.request_finished(request, list(range(50, 75))) == (False, None)

    def admit(self, request, known: int) -> int:
        """Admit a request, with ``known`` tokens in the prefix cache; the tokens that come from elsewhere."""
        tokens, later = self.get_num_new_matched_tokens(request, known)
        assert not later
        blocks = SimpleNamespace(get_block_ids=lambda: (list(range(50, 75)),))
        self.update_state_after_alloc(request, blocks, tokens)
        return tokens


def asked(name: str, kv=None, **more) -> SimpleNamespace:
    """A request of 99 tokens, as vLLM's scheduler knows it."""
    given = {
        "request_id": name,
        "kv_transfer_params": kv,
        "num_tokens": 99,
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**given | more)


def taken(depot: Depot, tokens: int, name="taken-movable-x-0") -> dict:
    (depot.directory / name).mkdir(parents=True, exist_ok=True)
    return {PARAMETER: {"directory": str(depot.directory / name), "tokens": tokens}}


def test_the_scheduler_orders_the_blocks_that_its_prefix_cache_lacks(depots):
    """Once, from the first block that is not known to the one with the last token, less the newest token."""
    _, target = depots
    for tokens, known, own in itertools.product([1, 4, 8, 9, 12], [0, 4, 8, 12], [9, 10, 12, 13, 99]):
        scheduling, kv = Scheduling(target), taken(target, tokens)
        directory, wanted = kv[PARAMETER]["directory"], min(tokens, own - 1)
        loaded = scheduling.admit(request := asked("movable/x/1", kv, num_tokens=own), known)
        assert loaded == max(0, wanted - known)
        orders = scheduling.build_connector_meta(None)
        if loaded:
            needed = [50 + block for block in range(known // 4, (wanted + 3) // 4)]
            assert orders == moved_kv.Orders(loads=[(directory, needed, known // 4)])
        else:
            assert orders == moved_kv.Orders()
        assert Path(directory).exists() == bool(loaded), "what is not needed is removed"
        assert scheduling.admit(request, 0) == 0, "after a preemption there is nothing to load"
        assert scheduling.build_connector_meta(None) == moved_kv.Orders()
        scheduling.end("movable/x/1", 0, kv)
        assert not scheduling.admitted
        target.clear()
        moved_kv._remove(target.directory)


def test_a_request_that_ends_after_it_was_admitted_removes_nothing(depots):
    """Its workers do, and are about to load."""
    _, target = depots
    scheduling, kv = Scheduling(target), taken(target, 9)
    assert scheduling.admit(asked("movable/x/1", kv), 0) == 9
    scheduling.end("movable/x/1", 10, kv)
    assert Path(kv[PARAMETER]["directory"]).exists()
    assert len(scheduling.build_connector_meta(None).loads) == 1
    moved_kv._remove(kv[PARAMETER]["directory"])


def test_parameters_of_another_form_mean_no_kv(depots):
    scheduling = Scheduling(depots[1])
    forms = [
        None,
        5,
        {},
        *({PARAMETER: of} for of in (None, 3, {}, {"tokens": 9}, {"directory": 7, "tokens": 9})),
    ]
    for form in forms:
        assert scheduling.admit(asked("movable/x/1", form), 0) == 0
        scheduling.end("movable/x/1", 0, form)
    assert scheduling.build_connector_meta(None) == moved_kv.Orders() and not scheduling.admitted


@pytest.mark.parametrize("name", ["other", "movable-y-0", "taken-x/below"])
def test_a_request_can_name_no_directory_but_what_its_server_took(depots, name):
    """Whoever may send requests could else have any directory removed, and read KV of others."""
    _, target = depots
    scheduling, kv = Scheduling(target), taken(target, 9, name)
    for request in (
        asked("movable/x/1", kv),
        asked("movable/z/1", taken(target, 9), skip_reading_prefix_cache=True),
    ):
        assert scheduling.admit(request, 0) == 0
        scheduling.end(request.request_id, 0, kv)
    for tokens in (0, -9):
        assert scheduling.admit(asked("movable/x/1", taken(target, tokens)), 0) == 0
    assert Path(kv[PARAMETER]["directory"]).exists()
    assert scheduling.build_connector_meta(None) == moved_kv.Orders()


def test_a_block_with_its_first_token_alone_is_saved(depots):
    source, _ = depots
    scheduling, saves = Scheduling(source), []
    for tokens in (1, 4, 5, 8):
        source.expect(f"movable/{tokens}/0", 1)
        scheduling.end(f"movable/{tokens}/0", tokens)
        saves += [(blocks, count) for _, blocks, count in scheduling.build_connector_meta(None).saves]
    assert saves == [([50], 1), ([50], 4), ([50, 51], 5), ([50, 51], 8)]


def test_the_scheduler_orders_saves_of_what_is_expected(depots):
    """Whole blocks up to the last computed token; nothing for a request without KV, of which nobody waits."""
    source, _ = depots
    scheduling = Scheduling(source)
    for name in ("movable/a/0", "movable/b/0"):
        source.expect(name, 1)
    scheduling.end("movable/a/0", 9)
    scheduling.end("movable/b/0", 0)
    expected = [(str(source.directory / "movable-a-0"), [50, 51, 52], 9)]
    assert scheduling.build_connector_meta(None) == moved_kv.Orders(saves=expected)
    assert scheduling.build_connector_meta(None) == moved_kv.Orders()
    assert asyncio.run(asyncio.wait_for(source.saved("movable/b/0", 1000), 10)) is None


def test_nobody_waits_for_a_request_that_had_just_ended(depots):
    source, _ = depots
    source.expect("movable/other/0", 1)
    Scheduling(source).end("movable/a/0", 9)
    source.expect("movable/a/0", 1)
    assert asyncio.run(asyncio.wait_for(source.saved("movable/a/0", 1000), 10)) is None
    assert not (source.directory / "movable-a-0").exists()


def test_kv_of_a_request_that_ends_unadmitted_is_removed(depots):
    source, target = depots
    kv = asyncio.run(target.take(saved(source), 1))
    Scheduling(target).end("movable/x/1", 0, kv)
    assert not Path(kv[PARAMETER]["directory"]).exists()


def test_a_server_waits_for_no_lock(tmp_path):
    """Another of the same name, as long as it lives, keeps the directory; its KV is not mixed with ours."""
    first, second = Depot(tmp_path, "x", {}, 1), Depot(tmp_path, "x", {}, 1)
    first.expect("movable/a/0", None)
    second.expect("movable/b/0", None)
    assert [path.name for path in first.directory.iterdir() if path.is_dir()] == ["movable-a-0"]
    second.clear()
    assert (first.directory / "movable-a-0").exists(), "it is alive"
    first.clear()
    second.expect("movable/b/0", None)
    assert [path.name for path in second.directory.iterdir() if path.is_dir()] == ["movable-b-0"]
    second.clear()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_another_user_takes_no_kv(tmp_path):
    """/dev/shm is anybody's to write to, and the name can be guessed."""
    depot = Depot(tmp_path, "x", {}, 1)
    depot.directory.mkdir(mode=0o777)
    os.chown(depot.directory, 54321, 54321)
    depot.expect("movable/a/0", None)
    assert depot.lock is None and not list(depot.directory.iterdir())


def test_a_directory_is_described_by_what_its_engine_shares(depots):
    source, _ = depots
    source.expect("movable/x/0", 7)
    about = json.loads((source.directory / "movable-x-0/about.json").read_text())
    assert about == MODEL | {"weights": 7}


def test_a_request_keeps_what_it_brings_besides(depots):
    source, target = depots
    server = MovableRequests()
    server.kv_depot, server.global_steps = target, 1
    params = asyncio.run(
        server.with_moved_kv({"extra_args": {"sam_history": [(1, b"")]}, "top_k": 1}, saved(source))
    )
    assert params["top_k"] == 1 and params["extra_args"]["sam_history"] == [(1, b"")]
    given = params["extra_args"]["kv_transfer_params"][PARAMETER]
    assert given["tokens"] == 10
    moved_kv._remove(given["directory"])
    assert asyncio.run(server.end_moves()) == {"movable-x-0": 10}
    unusable = {"extra_args": {"sam_history": []}}
    assert asyncio.run(server.with_moved_kv(unusable, "/nowhere")) is unusable
