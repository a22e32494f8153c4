"""The rollout's progress: its counts against what was generated, and the line a user sees at a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import random
import re
import subprocess
import sys
import termios
import textwrap
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from ascend_rl.rollout import rollout_progress


def output(tokens: int, finish_reason: str | None = None):
    """The fields of vLLM's RequestOutput that are read."""
    sample = SimpleNamespace(token_ids=list(range(tokens)), finish_reason=finish_reason)
    return SimpleNamespace(outputs=[sample], finished=finish_reason is not None)


async def request(lengths: list[int], reason: str, rng: random.Random):
    for length in lengths[:-1]:
        await asyncio.sleep(0.001 * rng.random())
        yield output(length)
    yield output(lengths[-1], reason)


def test_counts_are_those_of_the_requests_at_every_moment():
    rng, requests = random.Random(0), rollout_progress.Requests()
    lengths = [sorted(rng.sample(range(1, 200), rng.randint(1, 20))) for _ in range(40)]
    reasons = [rng.choice(["stop", "length", "abort"]) for _ in lengths]
    seen = [0] * len(lengths)
    state = ["waiting"] * len(lengths)

    async def one(i: int) -> None:
        async for out in requests.watch(request(lengths[i], reasons[i], rng)):
            seen[i] = len(out.outputs[0].token_ids)
            state[i] = "over" if out.finished else "running"
            counts = requests.counts()
            assert counts["tokens"] == sum(seen) and counts["longest"] == max(seen)
            assert counts["done"] == sum(
                s == "over" and r != "abort" for s, r in zip(state, reasons, strict=True)
            )

    async def everything() -> None:
        await asyncio.gather(*map(one, range(len(lengths))))

    asyncio.run(everything())
    assert requests.counts() == {
        "done": sum(reason != "abort" for reason in reasons), "running": 0, "waiting": 0,
        "tokens": sum(length[-1] for length in lengths), "longest": max(length[-1] for length in lengths),
    }  # fmt: skip
    requests.reset()
    assert not any(requests.counts().values())


def test_a_reset_counts_only_what_comes_after_it():
    """Of asynchronous training: requests live on from one step to the next; the engine knows their tokens."""
    requests, state = rollout_progress.Requests(), SimpleNamespace()
    state.detokenizer = SimpleNamespace(output_token_ids=[0] * 7)
    engine = SimpleNamespace(output_processor=SimpleNamespace(request_states={"one": state}))

    ended = asyncio.Event()

    async def at_the_end():
        await ended.wait()
        yield output(10, "stop")

    async def consume() -> None:
        async for _ in requests.watch(at_the_end()):
            pass

    async def scene() -> None:
        request = asyncio.create_task(consume())
        await asyncio.sleep(0)
        requests.reset(engine)
        assert requests.counts(engine)["tokens"] == 0
        state.detokenizer.output_token_ids.append(0)
        assert requests.counts(engine)["tokens"] == 1
        engine.output_processor.request_states.clear()
        ended.set()
        await request
        assert requests.counts(engine)["tokens"] == 3 and requests.counts(engine)["done"] == 1

    asyncio.run(scene())


def test_waiting_is_without_a_token_and_a_cancelled_request_is_gone():
    requests = rollout_progress.Requests()

    async def never():
        yield output(0)
        yield output(5)
        await asyncio.sleep(60)
        yield output(6)

    async def scene() -> None:
        stream = requests.watch(never())
        await anext(stream)
        assert (requests.counts()["waiting"], requests.counts()["running"]) == (1, 0)
        await anext(stream)
        assert (requests.counts()["waiting"], requests.counts()["running"]) == (0, 1)
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert requests.counts() == {"done": 0, "running": 0, "waiting": 0, "tokens": 5, "longest": 5}

    asyncio.run(scene())


def test_servers_add_up():
    one = {"done": 1, "running": 2, "waiting": 0, "tokens": 50, "longest": 20, "kv": 0.5, "preempted": 2}
    other = {"done": 3, "running": 0, "waiting": 4, "tokens": 7, "longest": 9, "kv": 0.25, "preempted": 1}
    assert rollout_progress.total([one, other]) == {
        "done": 4, "running": 2, "waiting": 4, "tokens": 57, "longest": 20, "kv": 0.5, "preempted": 3,
    }  # fmt: skip


@pytest.mark.parametrize(("configured", "variable", "shown"), [
    (None, None, False), (None, "1", True), (True, None, True), (False, "1", False)])  # fmt: skip
def test_the_driver_decides_unless_the_user_did(monkeypatch, configured, variable, shown):
    monkeypatch.delenv(rollout_progress.TERMINAL, raising=False)
    if variable:
        monkeypatch.setenv(rollout_progress.TERMINAL, variable)
    rollout = OmegaConf.create({"use_tqdm": configured})
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stderr", nothing)
        rollout_progress.decide(rollout)
    assert rollout.use_tqdm is shown


# A driver, a trainer and two servers as verl has them: processes of Ray. The second server gets no request.
# Ends when its argument is there: what an actor draws takes its time to the terminal.
PROGRAM = """
import asyncio, os, sys, time, types
import ray
from omegaconf import OmegaConf
from ascend_rl.rollout import rollout_progress

rollout = OmegaConf.create({"use_tqdm": None})
rollout_progress.decide(rollout)
assert rollout.use_tqdm

@ray.remote
class Server:
    def __init__(self):
        self.requests = rollout_progress.Requests()
    async def rollout_progress(self, reset=False):
        if reset:
            self.requests.reset()
        return self.requests.counts() | {"kv": 0.25, "preempted": 1}
    async def generate(self, tokens):
        async def outputs():
            for length in range(1, tokens + 1):
                await asyncio.sleep(0.1)
                sample = types.SimpleNamespace(token_ids=[0] * length, finish_reason="stop")
                yield types.SimpleNamespace(outputs=[sample], finished=length == tokens)
        async for _ in self.requests.watch(outputs()):
            pass

@ray.remote
class TaskRunner:
    def run(self):
        async def generate(manager, prompts):
            await asyncio.gather(*[manager.server_handles[0].generate.remote(t) for t in prompts])
        manager = types.SimpleNamespace(
            server_handles=[Server.remote(), Server.remote()])
        async def rollout(prompts):
            async with rollout_progress.shown(manager, len(prompts), "rollout 7"):
                await generate(manager, prompts)
        asyncio.run(rollout([5, 30]))
        print("rollout over")

ray.init(os.environ["RAY_ADDRESS"])
ray.get(TaskRunner.remote().run.remote())
until = time.monotonic() + 120
while not os.path.exists(sys.argv[1]) and time.monotonic() < until:
    time.sleep(0.1)
"""


def test_a_user_at_a_terminal_sees_it_move(start_ray, tmp_path):
    """Through Ray: counted in servers, drawn by an actor, shown where the driver's terminal is."""
    script, seen = tmp_path / "driver.py", tmp_path / "seen"
    script.write_text(textwrap.dedent(PROGRAM))
    context = start_ray(num_cpus=4, include_dashboard=False)
    environment = os.environ | {"RAY_ADDRESS": context.address_info["address"]}
    environment.pop(rollout_progress.TERMINAL, None)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (40, 200))
    command = [sys.executable, script, seen]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while chunk := os.read(ours, 1 << 16):
            shown += chunk
            if re.search(rb" 0 running, 0 waiting, longest 30, KV 25%, 2 preempted:.*?2(\.\d+)?/2", shown):
                seen.touch()  # the whole line: with the driver ends what it has not printed yet
    os.close(ours)
    assert process.wait(200) == 0, shown.decode()[-2000:]
    text = shown.decode()
    assert "rollout over" in text
    states = re.findall(
        r"rollout 7: (\d+) tokens/s, (\d) running, 0 waiting, longest (\d+), KV 25%, 2 preempted:.*?"
        r"(\d+(?:\.\d+)?)/2",
        text,
    )
    assert ("1", "1") in {(running, done[0]) for _, running, _, done in states}, text  # one done, one running
    longest = [int(state[2]) for state in states]
    assert longest == sorted(longest) and longest[-1] == 30 and len(set(longest)) >= 3
    speed, running, _, done = states[-1]
    assert running == "0" and done[0] == "2" and 0 < int(speed) <= 12  # 35 tokens in 3 s or more


def test_the_last_line_is_drawn_after_the_end(monkeypatch):
    """A rollout may end while a question is under way, whose answer then is not the last."""
    from ray.experimental import tqdm_ray

    drawn: list[str] = []

    class Bar:
        def __init__(self, **_):
            self.set_description, self.close = drawn.append, lambda: None

    monkeypatch.setattr(tqdm_ray, "tqdm", Bar)
    monkeypatch.setattr(rollout_progress, "PERIOD_S", 0.01)

    async def rollout():
        over = asyncio.Event()

        async def ask():
            longest = 30 if over.is_set() else 29
            over.set()
            return [{"done": 1, "running": 0, "waiting": 0, "tokens": longest, "longest": longest}]

        await rollout_progress._draw(ask, 1, "rollout 1", over)

    asyncio.run(rollout())
    assert [line.rpartition(" ")[2] for line in drawn] == ["29", "30"]
