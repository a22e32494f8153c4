"""What goes by the id of a rollout server: the server itself, or one of the DP engines behind it.

A server of which one AsyncLLM deals to several DP engines (large EP) appears as several servers, one for each
engine: ``address#0``, ``address#1``, ... Whatever places, moves or restarts treats both alike.
"""

from __future__ import annotations

import asyncio
import functools
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

# The server of the sample whose agent loop runs in this task of asyncio; None: the least loaded.
placed: ContextVar[str | None] = ContextVar("placed", default=None)


class Engine:
    """One of the DP engines behind a server, in place of the server's handle."""

    def __init__(self, server: Any, index: int):
        self.server, self.index = server, index

    def __reduce__(self):
        return Engine, (self.server, self.index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)

    @property
    def generate(self) -> SimpleNamespace:
        return SimpleNamespace(remote=functools.partial(self.server.generate.remote, engine=self.index))


def server_of(handle: Any) -> Any:
    """The server of a handle, which may be one of its engines."""
    return handle.server if isinstance(handle, Engine) else handle


def address_of(id: str) -> str:
    """The server's part of an id.

    >>> address_of("10.0.0.1:80#3"), address_of("10.0.0.1:80")
    ('10.0.0.1:80', '10.0.0.1:80')
    """
    return id.partition("#")[0]


def engine_ids(address: str, engines: int) -> list[str]:
    """The ids of a server's engines; its address where it has one.

    >>> engine_ids("10.0.0.1:80", 2), engine_ids("10.0.0.1:80", 1)
    (['10.0.0.1:80#0', '10.0.0.1:80#1'], ['10.0.0.1:80'])
    """
    return [f"{address}#{k}" for k in range(engines)] if engines > 1 else [address]


def handle_of(id: str, server: Any) -> Any:
    """What goes by an id: a server, or one of its engines."""
    _, _, engine = id.partition("#")
    return Engine(server, int(engine)) if engine else server


async def split(addresses: list[str], servers: list[Any]) -> dict[str, Any]:
    """Each DP engine of servers as a server: handles by id."""
    engines = await asyncio.gather(*[server.dp_engines.remote() for server in servers])
    return {
        id: handle_of(id, server)
        for address, server, count in zip(addresses, servers, engines, strict=True)
        for id in engine_ids(address, count)
    }


def has_died(error: BaseException, actor_died: type[BaseException]) -> bool:
    """Whether an error of a remote call says that the server's Ray actor or its engine is gone.

    vLLM's error goes by its name: callers of other engines have no vLLM to import it from.
    """
    causes = (error, getattr(error, "cause", None))
    names = {kind.__name__ for cause in causes for kind in type(cause).__mro__}
    return any(isinstance(cause, actor_died) for cause in causes) or "EngineDeadError" in names
