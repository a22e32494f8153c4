"""torch.npu.NPUGraph and the context that captures one; csrc/graphs.h says what a replay does.

``counts()`` has how many graphs this process captured and replayed, the steps it ran, the groups it updated.
"""

from __future__ import annotations

import gc
import itertools

import torch

from software_npu import _C

from .streams import Stream, current_stream
from .streams import stream as stream_context

_pools = itertools.count(1)


def counts() -> dict[str, int]:
    return _C.graph_counts()


def reset_counts() -> None:
    _C.reset_graph_counts()


def graph_pool_handle() -> tuple[int, int]:
    return 0, next(_pools)


def is_current_stream_capturing() -> bool:
    return _C.is_capturing()


class NPUGraph:
    def __init__(self, keep_graph: bool = False):
        self._graph = _C.Graph()
        self._pool = graph_pool_handle()

    def capture_begin(self, pool=None, capture_error_mode: str = "global", **kwargs) -> None:
        self._pool = pool or self._pool
        self._graph.begin(current_stream())

    def capture_end(self) -> None:
        self._graph.end()

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()

    def pool(self):
        return self._pool

    def names(self) -> list[str]:
        """The captured calls, in order."""
        return self._graph.names()

    def debug_dump(self, path: str) -> None:
        with open(path, "w") as file:
            file.write("\n".join(self.names()))


class graph:
    """Captures what is called within, on a stream of its own unless one is given."""

    def __init__(self, npu_graph, pool=None, stream=None, capture_error_mode="global", **kwargs):
        self.graph, self.pool, self.mode = npu_graph, pool, capture_error_mode
        self.context = stream_context(stream or Stream())

    def __enter__(self) -> None:
        torch.npu.synchronize()
        gc.collect()
        torch.npu.empty_cache()
        self.context.__enter__()
        self.graph.capture_begin(self.pool, self.mode)

    def __exit__(self, *error) -> None:
        self.graph.capture_end()
        self.context.__exit__(*error)


def graph_task_group_begin(stream: Stream) -> None:
    _C.begin_group(stream)


def graph_task_group_end(stream: Stream):
    """A handle of the calls since ``graph_task_group_begin``, for an update of their arguments."""
    return _C.end_group(stream)


def graph_task_update_begin(stream: Stream, handle) -> None:
    _C.begin_update(stream, handle)


def graph_task_update_end(stream: Stream) -> None:
    _C.end_update(stream)
