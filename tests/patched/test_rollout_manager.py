"""verl's trainer constructs this project's rollout manager, which is verl's with the switches off."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from counting_servers import PROMPTS, Server, make_manager, rollout

from ascend_rl.rollout.prompt_memory import FILE
from ascend_rl.speculation.sam_history import KEY as HISTORY

VLLM = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
SAM = f"{VLLM}.speculative_config.method=sam"
PLACED = "actor_rollout_ref.rollout.data_rebalance=True"
NAME = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"


def asked(manager) -> list[list[str]]:
    """Of each server, the requests, in any order."""
    return [sorted(map(repr, server.asked)) for server in manager.servers.values()]


def trainer_of(manager, directory):
    """As much of RayPPOTrainer as a checkpoint takes."""
    from omegaconf import OmegaConf
    from torchdata.stateful_dataloader import StatefulDataLoader

    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.config = OmegaConf.create(
        {
            "trainer": {
                "default_local_dir": str(directory),
                "default_hdfs_dir": None,
                "resume_mode": "auto",
                "del_local_ckpt_after_load": False,
                "nnodes": 1,
                "n_gpus_per_node": 1,
            },
            "actor_rollout_ref": {"actor": {"checkpoint": {}, "strategy": "fsdp"}},
        }
    )
    trainer.actor_rollout_wg = SimpleNamespace(
        save_checkpoint=lambda *_, **__: None, load_checkpoint=lambda *_, **__: None
    )
    trainer.train_dataloader, trainer.passes = StatefulDataLoader([0]), None
    trainer.use_critic, trainer.global_steps, trainer.async_rollout_manager = False, 1, manager
    return trainer


@pytest.mark.parametrize(
    ("before", "after"),
    [([PLACED, SAM], [PLACED, SAM]), ([PLACED], [PLACED]), ([], [PLACED, SAM]), ([PLACED, SAM], [])],
)
def test_a_resumed_run_knows_earlier_responses(tiny, tmp_path, before, after):
    first, second = make_manager(tiny / "model", *before), make_manager(tiny / "model", *after)
    rollout(first)
    trainer_of(first, tmp_path)._save_checkpoint()
    assert (tmp_path / "global_step_1" / FILE).exists() == bool(before)
    trainer_of(second, tmp_path)._load_checkpoint()
    output, _ = rollout(second, global_steps=2)
    timing = output.meta_info["timing"]
    assert timing.get("data_rebalance/known_share") == (bool(before) if PLACED in after else None)
    assert timing.get(f"{HISTORY}/known_share") == (bool(before) if SAM in after else None)
    if before == after:
        rollout(first, global_steps=2)
        assert asked(first) == asked(second)


def test_without_any_switch_requests_and_answers_are_verls(tiny):
    ours, verls = make_manager(tiny / "model"), make_manager(tiny / "model", f"{NAME}=null")
    assert type(ours).__mro__[2] is type(verls).__mro__[1]
    for step in range(2):
        (found, _), (expected, _) = (
            rollout(manager, global_steps=step, validate=step == 1) for manager in (ours, verls)
        )
        requests = [sorted(sum(asked(manager), [])) for manager in (ours, verls)]
        assert requests[0] == requests[1] and len(requests[0]) == len(PROMPTS)
        for key in ("prompts", "attention_mask", "response_mask", "position_ids"):
            assert found.batch[key].tolist() == expected.batch[key].tolist()
        assert found.batch.keys() == expected.batch.keys()
        for key, column in expected.non_tensor_batch.items():
            assert found.non_tensor_batch[key].tolist() == column.tolist()
        assert found.non_tensor_batch.keys() == expected.non_tensor_batch.keys()
        assert found.meta_info["timing"].keys() == expected.meta_info["timing"].keys()


@pytest.mark.parametrize(
    ("overrides", "name", "split"),
    [
        ([], "vllm", False),
        ([PLACED], "vllm", True),
        (["actor_rollout_ref.rollout.rollout_rebalance.enable=True"], "vllm", True),
        ([PLACED], "sglang", False),
    ],
)
def test_engines_are_servers_only_where_it_serves_a_feature(tiny, overrides, name, split):
    from ascend_rl.glue.rollout_manager import RolloutManager

    manager = make_manager(tiny / "model", *overrides)
    manager.rollout_config.name = name
    created = []
    manager.load_balancer_class = SimpleNamespace(remote=lambda ids, _: created.extend(ids))

    class Handle:
        class dp_engines:
            @staticmethod
            async def remote():
                return 2

    manager.server_addresses, manager.server_handles = ["a"], [Handle]
    asyncio.run(RolloutManager._init_global_load_balancer(manager))
    assert created == manager.server_addresses == (["a#0", "a#1"] if split else ["a"])
    assert [getattr(handle, "index", None) for handle in manager.server_handles] == (
        [0, 1] if split else [None]
    )


def test_everything_on_at_once(tiny, counts):
    """In the written order: samples are placed, drawn, answered, put back in order and learned from."""
    steps: list[str] = []

    class Noting(Server):
        async def rollout_progress(self, reset=False):
            steps.append("reset" if reset else "drawn")
            return {"done": 0, "running": 0, "waiting": 0, "tokens": 0, "longest": 0}

        async def engine_stats(self):
            steps.append("reported")
            return {}

        async def generate(self, *args, **kwargs):
            steps.append("generated")
            return await super().generate(*args, **kwargs)

    from counting_servers import remote

    manager = make_manager(
        tiny / "model", PLACED, SAM, "actor_rollout_ref.rollout.use_tqdm=True",
    )  # fmt: skip
    manager.servers = {name: Noting(server.tokenizer) for name, server in manager.servers.items()}
    manager.server_handles = [remote(server) for server in manager.servers.values()]
    for worker in manager.workers:
        worker.server_manager._server_id_to_handle = dict(
            zip(manager.servers, manager.server_handles, strict=True)
        )
    for step in range(2):
        steps.clear()
        output, _ = rollout(manager, global_steps=step)
        assert output.non_tensor_batch["mark"].tolist() == list(range(len(PROMPTS)))
        assert output.meta_info["timing"]["data_rebalance/known_share"] == step
        assert output.meta_info["timing"][f"{HISTORY}/known_share"] == step
        order = list(dict.fromkeys(steps))
        assert order == ["reset", "generated", "drawn", "reported"] and steps.count("generated") == 14
    assert counts()["known_lengths"] == len(PROMPTS)
