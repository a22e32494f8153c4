"""EPLB communicates in a group of its own with small buffers, and nothing in a rollout uses the world's."""

from __future__ import annotations

from npu_ground import on_ranks, save_random_model
from test_npu_eplb import RANKS, TP, Rank

BUFFER_MB = 100  # twice a die, for each group in which anything is sent


def groups_used(path: str) -> dict:
    """Calls by what they do and in which group (MB of its buffers, or world), to the end of a round."""
    import torch.distributed as dist

    calls, sizes = {}, {}

    def counted(name, function, group_of):
        def call(*args, **kwargs):
            group = group_of(*args, **kwargs)
            if group in (None, dist.group.WORLD) or group in sizes:
                key = f"{name} {sizes.get(group, 'world')}"
                calls[key] = calls.get(key, 0) + 1
            return function(*args, **kwargs)

        return call

    new_group = dist.new_group

    def made(*args, pg_options=None, **kwargs):
        group = new_group(*args, pg_options=pg_options, **kwargs)
        config = getattr(pg_options, "hccl_config", {})
        if config.get("hccl_buffer_size") == BUFFER_MB:
            sizes[group] = BUFFER_MB
        return group

    def given(place):
        return lambda *args, group=None, **_: group or (args[place] if len(args) > place else None)

    dist.new_group = made
    dist.all_gather_into_tensor = counted("gather", dist.all_gather_into_tensor, given(2))
    dist.all_reduce = counted("reduce", dist.all_reduce, given(2))
    dist.batch_isend_irecv = counted("moves", dist.batch_isend_irecv, lambda ops: ops[0].group)

    engine = Rank(path, TP, 2)
    before = held(engine)
    engine.step_to(1)
    engine.step_to(0)  # all layers have moved
    found = {"calls": calls, "moved": held(engine) != before}
    engine.end()
    return found


def held(engine) -> list[list[int]]:
    return [of_layer.tolist() for of_layer in engine.runner.eplb_adaptor.expert_map_per_layer_cpu.values()]


def rollout(path: str) -> dict:
    import os

    os.environ["DYNAMIC_EPLB"] = "true"
    return on_ranks("A3", RANKS, groups_used, path)


def test_only_a_small_group_is_used(npu_ground, tmp_path):
    save_random_model(tmp_path, moe=True)
    found = npu_ground.run(rollout, str(tmp_path))
    print(found)
    assert found["moved"]
    assert not [name for name in found["calls"] if name.endswith("world")], found["calls"]
    assert all(found["calls"][f"{what} {BUFFER_MB}"] for what in ("gather", "reduce", "moves"))
