"""Responses that end while others are put into TransferQueue are put together. verl puts each alone: three
requests to other processes per response.

This module stands in for `transfer_queue` in verl's agent loop. Ray sends that loop's class by value, with
all that it refers to, except modules.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any, NamedTuple

import torch
import transfer_queue

from verl.utils.tensordict_utils import list_of_dict_to_tensordict


class Put(NamedTuple):
    keys: list[str]
    fields: list[dict[str, Any]]
    tags: list[dict[str, Any]]
    done: asyncio.Future


_waiting: dict[tuple, list[Put]] = defaultdict(list)  # by what one TensorDict can hold
_putting: asyncio.Task | None = None


def __getattr__(name: str) -> Any:
    return getattr(transfer_queue, name)


async def async_kv_batch_put(
    *, keys: list[str], fields: list[dict[str, Any]], tags: list[dict[str, Any]], partition_id: str
) -> None:
    """As transfer_queue's, for rows that are not yet a TensorDict.

    Returns once the rows are there, and raises what the request that held them raised.
    """
    global _putting
    put = Put(keys, fields, tags, asyncio.get_running_loop().create_future())
    _waiting[partition_id, columns(fields[0])].append(put)
    if _putting is None or _putting.done():
        _putting = asyncio.create_task(_put_all())
    await put.done


async def _put_all() -> None:
    while _waiting:
        group = next(iter(_waiting))
        puts = _waiting.pop(group)
        failure = None
        try:
            await transfer_queue.async_kv_batch_put(
                keys=[key for put in puts for key in put.keys],
                fields=list_of_dict_to_tensordict([row for put in puts for row in put.fields]),
                tags=[tag for put in puts for tag in put.tags],
                partition_id=group[0],
            )
        except Exception as error:
            failure = error
        for put in puts:
            if put.done.cancelled():
                continue
            if failure:
                put.done.set_exception(failure)
            else:
                put.done.set_result(None)


def columns(row: dict[str, Any]) -> frozenset:
    """What must agree for rows to be in one TensorDict."""
    return frozenset(
        (name, value.dtype, value.ndim, *value.shape[1:]) if isinstance(value, torch.Tensor) else (name,)
        for name, value in row.items()
    )
