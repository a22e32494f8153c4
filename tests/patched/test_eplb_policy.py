"""vllm-ascend's EPLB worker process with our policy: what it sends, and how its failures are handled."""

from __future__ import annotations

import pytest

LAYERS, RANKS, SLOTS, EXPERTS = 3, 4, 3, 8


def expert_maps(placement):
    """[layers, ranks, experts] the slot of each expert on each rank, or -1: vllm-ascend's expert maps."""
    import numpy as np

    maps = np.full((*placement.shape[:2], EXPERTS), -1, dtype=np.int64)
    slots = np.broadcast_to(np.arange(placement.shape[2]), placement.shape)
    np.put_along_axis(maps, placement, slots, 2)
    return maps


def updates(policy: int, action: str) -> dict:
    """One update through the worker process and the updator of rank 0; ``action`` goes wrong on the way."""
    import io
    import tempfile
    from contextlib import redirect_stderr
    from multiprocessing import Manager
    from types import SimpleNamespace

    import numpy as np
    import torch
    import torch.distributed as dist

    import vllm.distributed.parallel_state as groups
    import vllm_ascend.distributed.parallel_state as ascend_groups
    from vllm_ascend.eplb.core.eplb_worker import EplbProcess
    from vllm_ascend.eplb.eplb_updator import EplbUpdator

    groups._EP = ascend_groups._DYNAMIC_EPLB = SimpleNamespace(rank_in_group=0)  # 0.23 asks them for the rank
    directory = tempfile.TemporaryDirectory()
    dist.init_process_group("gloo", init_method=f"file://{directory.name}/store", rank=0, world_size=1)
    table = np.tile((np.arange(RANKS)[:, None] * 2 + np.arange(SLOTS)) % EXPERTS, (LAYERS, 1, 1))
    load = np.random.default_rng(0).integers(1, 1000, (LAYERS, RANKS, SLOTS))
    with Manager() as manager:
        shared = manager.dict()
        eplb = EplbProcess(shared, policy)
        process = eplb._launch_process()
        if action != "no maps":
            shared["expert_maps"] = torch.from_numpy(expert_maps(table)).int()
        shared["moe_load"] = torch.from_numpy(load)
        config = SimpleNamespace(
            expert_map_path=None, expert_map_record_path=None, num_iterations_eplb_update=1, gate_eplb=False,
            num_wait_worker_iterations=1, expert_heat_collection_interval=1, algorithm_execution_interval=1,
            eplb_policy_type=policy,
        )  # fmt: skip
        updator = EplbUpdator(config, None, eplb, process)
        updator.cur_iterations, updator.num_moe_layers, updator.device = 1, LAYERS, torch.device("cpu")
        try:
            if action == "killed":
                process.kill()
            else:
                updator.wakeup_eplb_worker()
            with redirect_stderr(io.StringIO()) as said:
                if hasattr(updator, "take_update_info_from_eplb_process"):
                    updator.take_update_info_from_eplb_process()
                else:  # 0.23
                    updator.forward_before()
            if updator.update_info_all is None:
                return {"said": said.getvalue()}
        finally:
            process.kill()
            process.join()
            dist.destroy_process_group()
        maps = np.asarray(shared["expert_maps"])
        return {
            "policy": type(eplb.worker.policy).__name__,
            "table": table.tolist(),
            "load": load.tolist(),
            "maps": maps.tolist(),
            "sent": [[maps_of_rank, log2phy] for _, _, maps_of_rank, log2phy, _ in updator.update_info_all],
            "received": [receives for _, receives, *_ in updator.update_info_all],
        }


def test_the_worker_sends_our_placement(npu_ground):
    import numpy as np

    from ascend_rl.experts.eplb import rebalance_table

    done = npu_ground.run(updates, 4, "")
    assert done["policy"] == "VllmAscendPolicy"
    changed, _, new = rebalance_table(done["table"], done["load"])
    maps = expert_maps(new)
    assert changed and done["maps"] == maps.tolist()  # the worker has taken back no layer
    flat = new.reshape(LAYERS, -1)
    for layer, (own_map, log2phy) in enumerate(done["sent"]):
        assert own_map == maps[layer][0].tolist()
        assert flat[layer][log2phy].tolist() == list(range(EXPERTS))
        wanted = set(new[layer][0]) - set(np.array(done["table"])[layer][0])
        assert {expert for _, expert in done["received"][layer]} == wanted
        for source, expert in done["received"][layer]:
            assert expert in done["table"][layer][source]


def test_other_policies_are_there_as_before(npu_ground):
    assert npu_ground.run(updates, 1, "")["policy"] in ("DynamicEplb", "DefaultEplb")  # 0.13, 0.23


@pytest.mark.parametrize(
    "action, message", [("no maps", "Failed to get expert_maps"), ("killed", "exit code -9")]
)
def test_failures_are_said_and_end_the_planning(npu_ground, action, message):
    said = npu_ground.run(updates, 4, action)["said"]
    assert message in said and "experts stay where they are" in said
