"""The real TransferQueue: responses are put together, and a worker fetches what it reads."""

from __future__ import annotations

import asyncio

import pytest
import torch


@pytest.fixture(scope="module")
def queue(start_ray):
    import ray
    import transfer_queue as tq
    from hydra import compose, initialize_config_module

    start_ray(num_cpus=8, include_dashboard=False)
    with initialize_config_module("verl.trainer.config", version_base=None):
        units = "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"
        tq.init(compose("ppo_trainer", ["transfer_queue.enable=True", units]).transfer_queue)
    yield tq
    tq.close()
    ray.shutdown()


def row(i: int) -> dict:
    """As one of verl's: lengths differ, and a third has a column more."""
    fields = {"responses": torch.arange(i % 5 + 1) + i, "reward_score": i / 4, "extra_fields": {"a": [i]}}
    return fields | ({"routes": torch.full((i % 5 + 1, 2, 3), i)} if i % 3 == 0 else {})


def put_all(put, rows: list[dict], partition: str) -> None:
    async def all_at_once():
        await asyncio.gather(
            *(
                put(keys=[f"k{i}"], fields=[each], tags=[{"n": i}], partition_id=partition)
                for i, each in enumerate(rows)
            )
        )

    asyncio.run(all_at_once())


def test_rows_put_at_once_are_as_put_alone_in_fewer_requests(queue, monkeypatch):
    from ascend_rl.glue.cann9_1 import puts
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    sizes, send = [], queue.async_kv_batch_put

    async def count(**request):
        sizes.append(len(request["keys"]))
        return await send(**request)

    monkeypatch.setattr(queue, "async_kv_batch_put", count)
    rows = [row(i) for i in range(40)]
    put_all(puts.async_kv_batch_put, rows, "together")
    assert sum(sizes) == 40 and len(sizes) <= 4, sizes

    for i, each in enumerate(rows):
        queue.kv_batch_put(
            keys=[f"k{i}"], fields=list_of_dict_to_tensordict([each]), tags=[{"n": i}], partition_id="alone"
        )
    assert queue.kv_list("together")["together"] == queue.kv_list("alone")["alone"]
    for names, keys in ((["responses"], range(40)), (["routes", "responses"], range(0, 40, 3))):
        keys = [f"k{i}" for i in keys]
        for name in names:
            together, alone = (
                queue.kv_batch_get(keys=keys, partition_id=partition, select_fields=[name])[name].unbind()
                for partition in ("together", "alone")
            )
            for ours, theirs in zip(together, alone, strict=True):
                assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    others = ["reward_score", "extra_fields"]
    together, alone = (
        queue.kv_batch_get(keys=["k7", "k8"], partition_id=partition, select_fields=others)
        for partition in ("together", "alone")
    )
    assert all(list(together[name]) == list(alone[name]) for name in others)


def test_a_failed_request_fails_its_rows_only(queue):
    from ascend_rl.glue.cann9_1 import puts

    async def three():
        good, bad, other = (
            puts.async_kv_batch_put(keys=[f"f{i}"], fields=[row(i)], tags=tags, partition_id=f"fails{i}")
            for i, tags in ((1, [{"n": 1}]), (2, []), (4, [{"n": 4}]))
        )
        return await asyncio.gather(good, bad, other, return_exceptions=True)

    good, bad, other = asyncio.run(three())
    assert good is None and other is None and isinstance(bad, ValueError)


def test_a_worker_fetches_tensors_and_pictures_only(queue, monkeypatch):
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict
    from verl.utils.transferqueue_utils import tqbridge

    storage, fetched = type(queue.get_client().storage_manager), []
    fetch = storage.get_data

    async def count(self, meta):
        fetched.extend(meta.field_names)
        return await fetch(self, meta)

    monkeypatch.setattr(storage, "get_data", count)
    rows = [row(3 * i) | {"multi_modal_inputs": {"pixels": [i]}, "uid": f"u{i}"} for i in range(4)]
    sent = {"fields": list_of_dict_to_tensordict(rows), "tags": [{}] * 4, "partition_id": "worker"}
    meta = queue.kv_batch_put(keys=[f"k{i}" for i in range(4)], **sent)
    data = tqbridge()(lambda data: dict(data.items()))(meta)
    tensors = {"responses", "routes", "multi_modal_inputs"}
    assert set(data) == set(fetched) == tensors | ({"reward_score"} & set(data))
    assert set(meta.fields) == set(data) | {"reward_score", "extra_fields", "uid"}
    assert [each["pixels"] for each in data["multi_modal_inputs"].tolist()] == [[0], [1], [2], [3]]
    for got, each in zip(data["responses"].unbind(), rows, strict=True):
        assert torch.equal(got, each["responses"])
