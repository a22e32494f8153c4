"""A live progress line for the rollout: requests done, running and waiting, tokens/s, the longest response.

A rollout takes most of a step and prints nothing until it is over. Three processes each have a part:

    vLLM's servers   count what they generate (`Requests`), nothing else;
    the trainer      (Ray's TaskRunner, an actor) asks all servers once a second and draws (`shown`);
    the driver       (`python -m verl.trainer.main_ppo`) has the terminal, and decides (`decide`).

The stderr of an actor is a file, so neither a plain tqdm nor isatty() works there. The trainer draws with
ray.experimental.tqdm_ray: what it writes travels with Ray's log lines, and the driver renders it with tqdm.

Invariants (tests/test_rollout_progress.py): counts are exact at the end, also with aborted requests; drawing
never ends or delays a rollout by more than one question; switched off nothing is counted or asked.
Cost: O(1) per token batch and request; one small Ray call per server and second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from ascend_rl.rollout.servers import server_of

PERIOD_S = 1.0
TERMINAL = (
    "ASCEND_RL_TERMINAL"  # set by ascend_rl.launch.supervise, which passes the driver's output on to one
)


def decide(rollout: Any) -> None:
    """In the driver: resolve `use_tqdm=null` of verl's rollout settings: on if it has a terminal."""
    if rollout.get("use_tqdm", False) is None:
        rollout.use_tqdm = sys.stderr.isatty() or os.environ.get(TERMINAL) == "1"


class Requests:
    """What one server has done since the last reset, in requests and tokens."""

    def __init__(self):
        self._live: dict[object, int] = {}  # tokens so far
        self.reset()

    def reset(self, engine: Any = None) -> None:
        """Start at zero, also for the tokens that live requests have already; engine: see `counts`."""
        self.done = self.tokens = self.longest = self.before = 0
        self.before = self.counts(engine)["tokens"]

    async def watch(self, outputs: AsyncIterator) -> AsyncIterator:
        """Pass on a request's cumulative outputs (vLLM's RequestOutput), counting them."""
        key = object()
        self._live[key] = 0
        try:
            async for output in outputs:
                tokens = len(output.outputs[0].token_ids)
                self.tokens += tokens - self._live[key]
                self.longest = max(self.longest, tokens)
                self._live[key] = tokens
                self.done += output.finished and output.outputs[0].finish_reason != "abort"
                yield output
        finally:
            del self._live[key]

    def counts(self, engine: Any = None) -> dict[str, float]:
        """`waiting` are requests without a token: queued or in their prefill.

        Args:
            engine: vLLM's AsyncLLM, which knows the tokens of requests that send none before they end, and
                in ``stats`` the KV cache and preemptions, if `engine_stats` counts them.
        """
        seen = now = list(self._live.values())
        if engine is not None:
            states = engine.output_processor.request_states.values()
            now = [len(state.detokenizer.output_token_ids) for state in states]
        running = sum(tokens > 0 for tokens in now)
        stats = getattr(engine, "stats", None)
        return {
            "done": self.done,
            "running": running,
            "waiting": max(0, len(seen) - running),
            "tokens": self.tokens - sum(seen) + sum(now) - self.before,
            "longest": max([self.longest, *now]),
            **(stats.live() if stats else {}),
        }


def total(counts: Sequence[dict[str, float]]) -> dict[str, float]:
    """The counts of all servers together; of the longest response and the fullest KV cache the largest."""
    summed = {key: sum(count[key] for count in counts) for key in counts[0]}
    return summed | {key: max(count[key] for count in counts) for key in ("longest", "kv") if key in summed}


def describe(title: str, counts: dict[str, float], tokens_per_s: float) -> str:
    """The text before the bar; KV cache and preemptions only if there are any.

    >>> counts = {"done": 3, "running": 2, "waiting": 1, "tokens": 99, "longest": 40}
    >>> describe("rollout 7", counts, 512.3)
    'rollout 7: 512 tokens/s, 2 running, 1 waiting, longest 40'
    >>> describe("rollout 7", counts | {"kv": 0.934, "preempted": 4}, 512.3)
    'rollout 7: 512 tokens/s, 2 running, 1 waiting, longest 40, KV 93%, 4 preempted'
    """
    running, waiting, longest = (counts[key] for key in ("running", "waiting", "longest"))
    parts = [f"{tokens_per_s:.0f} tokens/s", f"{running} running", f"{waiting} waiting", f"longest {longest}"]
    parts += [f"KV {counts['kv']:.0%}"] if counts.get("kv") else []
    parts += [f"{counts['preempted']} preempted"] if counts.get("preempted") else []
    return f"{title}: {', '.join(parts)}"


async def _draw(ask: Callable[[], Awaitable], requests: int, title: str, over: asyncio.Event) -> None:
    from ray.experimental import tqdm_ray

    began = before_s = time.monotonic()
    before = 0
    bar = tqdm_ray.tqdm(desc=title, total=requests, unit="requests", flush_interval_s=0)
    try:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(over.wait(), PERIOD_S)
            ended = over.is_set()  # before the question: its answer may be older than the end
            counts, now = total(await ask()), time.monotonic()
            if ended:  # the mean of the whole rollout
                before, before_s = 0, began
            # A conversation of several turns has more requests than the batch has prompts.
            bar.total = max(requests, counts["done"] + counts["running"] + counts["waiting"])
            bar.n = counts["done"]
            bar.set_description(describe(title, counts, (counts["tokens"] - before) / (now - before_s)))
            before, before_s = counts["tokens"], now
            if ended:
                return
    finally:
        bar.close()


@contextlib.asynccontextmanager
async def shown(manager: Any, requests: int, title: str) -> AsyncIterator[None]:
    """Draw while an AgentLoopManager's rollout of so many requests runs, on vLLM."""

    servers = set(map(server_of, manager.server_handles))  # a server counts for all of its engines

    async def ask(reset: bool = False) -> list[dict]:
        asked = [server.rollout_progress.remote(reset) for server in servers]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [counts for counts in answers if isinstance(counts, dict)]  # a server may have died

    await ask(reset=True)
    over = asyncio.Event()
    drawing = asyncio.create_task(_draw(ask, requests, title, over))
    try:
        yield
    finally:
        over.set()
        with contextlib.suppress(Exception):  # a dead server is the rollout's error to report
            await drawing
