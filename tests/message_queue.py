"""vLLM's queue of calls, as between an engine and a worker process."""

from __future__ import annotations

import threading
from typing import Any


def ends() -> tuple[Any, Any]:
    """The end that writes and the one that reads, which know of each other."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    writer = MessageQueue(1, 1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join()
    return writer, reader
