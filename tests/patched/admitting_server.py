"""A rollout server that only notes which requests it was let in to serve, for test_rollout_concurrency.py."""

from __future__ import annotations

import asyncio


class Server:
    """What verl's replica asks of a vLLMHttpServer; `generate` returns when `finish` is called."""

    def __init__(self, config, **_):
        self.served, self.over = 0, asyncio.Event()

    def get_master_address(self):
        return "127.0.0.1", 1, 2

    async def launch_server(self, **_):
        return None

    def get_server_address(self):
        return "127.0.0.1", 3

    async def generate(self, note: str) -> None:
        with open(note, "ab") as file:  # a call that asked for the count would itself have to be let in
            file.write(b".")
        await self.over.wait()
        self.served += 1

    async def rollout_progress(self) -> int:
        return self.served

    async def finish(self) -> None:
        self.over.set()


class Worker:
    """The training worker beside a die; only its place is asked for."""
