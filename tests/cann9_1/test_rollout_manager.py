"""The rollout manager on verl's V1 stack: two real vLLM servers, TransferQueue and verl's replay buffer."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from ascend_rl.glue.cann9_1.options import MANAGER
from ascend_rl.rollout import server_restart
from ascend_rl.settings.metrics import PREEMPTED, REQUESTS
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

CUSTOM = "+actor_rollout_ref.rollout.custom"
SKEWED = [200] * 12 + [10] * 12  # tokens of the responses


class GivenLength(SingleTurnAgentLoop):
    """verl's single-turn agent; each prompt brings the length of its response, in its index."""

    stateless = True

    async def run(self, sampling_params, *, index, **kwargs):
        length = {"max_tokens": SKEWED[index % len(SKEWED)], "ignore_eos": True}
        return await super().run(sampling_params | length, **kwargs)


def configuration(model: Path, directory: Path):
    from hydra import compose, initialize_config_module

    agents = directory / "agents.yaml"
    agents.write_text(yaml.dump([{"name": "given", "_target_": f"{__name__}.GivenLength"}]))
    rollout = {
        "name": "vllm", "load_format": "auto", "dtype": "float32", "enforce_eager": True,
        "calculate_log_probs": True, "tensor_model_parallel_size": 1, "n_gpus_per_node": 2,
        "prompt_length": 16, "response_length": 220, "max_model_len": 256, "max_num_seqs": 4,
        "max_num_batched_tokens": 1024, "n": 1, "temperature": 0, "agent.num_workers": 1,
        "agent.agent_loop_config_path": agents, "agent.default_agent_loop": "given",
        "enable_sleep_mode": False, "engine_kwargs.vllm.distributed_executor_backend": "uni",
        "engine_kwargs.vllm.num_gpu_blocks_override": 128, "agent.agent_loop_manager_class": MANAGER,
    }  # fmt: skip
    given = [f"++actor_rollout_ref.rollout.{key}={value}" for key, value in rollout.items()]
    given += [
        f"{CUSTOM}.use_tqdm=True", f"{CUSTOM}.data_rebalance=True",
        f"{CUSTOM}.rollout_rebalance.enable=True", f"{CUSTOM}.rollout_rebalance.check_interval_s=0.05",
        f"{CUSTOM}.rollout_rebalance.send_kv_tokens=40",
        f"actor_rollout_ref.model.path={model}", "transfer_queue.enable=True",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    ]  # fmt: skip
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", given)


class Trainer:
    """What verl's synchronous trainer does around a rollout, with `Servers` and `RolloutManager`."""

    def __init__(self, config, workers: list):
        import transfer_queue as tq

        from ascend_rl.glue.cann9_1.rollout_manager import RolloutManager
        from ascend_rl.glue.cann9_1.servers import Servers
        from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

        tq.init(config.transfer_queue)
        group = SimpleNamespace(world_size=len(workers), workers=workers)
        self.servers = Servers.create(config=config, worker_group=group)
        self.manager = RolloutManager.create(config=config, llm_client=self.servers.get_client())
        self.manager.take(self.servers)
        self.buffer = ReplayBuffer("sync", {}, None, "drop", {})
        self.synced, self.uids = [], 0
        self.checkpoints = SimpleNamespace(backend="naive")

        def update(global_steps):  # what the training workers do, without the weights
            self.synced.append(global_steps)
            return [replica.servers[0].wake_up.remote() for replica in self.servers.rollout_replicas]

        server_restart.attach(self.manager, self.checkpoints, update)

    def rollout(self, prompts: int = len(SKEWED), moves: bool = True, beside=None) -> SimpleNamespace:
        """``tokens`` and ``log_probs`` of each response, in the order of the prompts, and ``timing``."""
        import transfer_queue as tq

        from verl.utils import tensordict_utils as tu

        messages = [[{"role": "user", "content": f"{i + 10}+{i * 7 % 90 + 10}"}] for i in range(prompts)]
        uids = [f"u{self.uids + i}" for i in range(prompts)]
        self.uids += prompts
        columns = {"uid": np.array(uids, dtype=object), "index": np.arange(prompts)}
        raw = np.empty(prompts, dtype=object)
        raw[:] = messages
        batch = tu.get_tensordict({"raw_prompt": raw, **columns})
        tu.assign_non_tensor_data(batch, "global_steps", 1)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": 1} for _ in uids]
        tq.kv_batch_put(keys=uids, partition_id="train", tags=tags)
        rebalance = {"enable": moves, "check_interval_s": 0.05, "send_kv_tokens": 40}
        self.manager.options = {**self.manager.options, "rollout_rebalance": rebalance}
        self.manager.begin(prompts, "rollout 1")
        self.manager.generate_sequences(batch)
        if beside:
            beside()
        sampled, _ = self.buffer.sample(1, "train", prompts)
        timing = self.manager.end()
        self.manager.learn(sampled)
        order = sorted(sampled.keys, key=lambda key: uids.index(key.split("_")[0]))
        fields = ["responses", "rollout_log_probs"]
        data = tq.kv_batch_get(keys=order, partition_id="train", select_fields=fields)
        tq.kv_clear(keys=order, partition_id="train")
        return SimpleNamespace(
            tokens=[row.tolist() for row in data["responses"].unbind()],
            log_probs=[row for row in data["rollout_log_probs"].unbind()],
            timing=timing,
        )

    def tokens(self) -> list[int]:
        """Of each server in the last rollout."""
        import ray

        asked = [server.rollout_progress.remote() for server in self.manager.server_handles]
        return [counts["tokens"] for counts in ray.get(asked)]


@pytest.fixture(scope="module")
def trainer(start_ray, forked, tiny, tmp_path_factory):
    import ray

    here = str(Path(__file__).parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", here, prepend=os.pathsep)
        patch.setenv(server_restart.SWITCH, "1")
        patch.setattr(server_restart, "CHECK_S", 0.5)
        start_ray(num_cpus=8, resources={"NPU": 2}, include_dashboard=False, runtime_env=forked)

        @ray.remote(num_cpus=0, resources={"NPU": 1})  # verl asks its training workers where they are
        class Worker:
            pass

        config = configuration(tiny / "model", tmp_path_factory.mktemp("agents"))
        yield Trainer(config, [Worker.remote() for _ in range(2)])


@pytest.fixture(scope="module")
def unmoved(trainer):
    return trainer.rollout(moves=False)


def test_samples_are_placed_and_learned(trainer, unmoved):
    """Where no length is known, one server gets all long responses; then both get as many."""
    assert [len(tokens) for tokens in unmoved.tokens] == SKEWED
    assert unmoved.timing["data_rebalance/known_share"] == 0
    assert sum(unmoved.timing[f"{REQUESTS}{k}/max"] for k in range(2)) == len(SKEWED)
    assert trainer.tokens() == [12 * 200, 12 * 10] and unmoved.timing[PREEMPTED] == 0
    again = trainer.rollout(moves=False)
    assert again.timing["data_rebalance/known_share"] == 1
    assert again.tokens == unmoved.tokens and trainer.tokens() == [6 * 210, 6 * 210]


def test_requests_move_and_responses_stay_the_same(trainer, unmoved):
    """Beside other load, all that run may end before one moves; so rollouts go on until both kinds did."""
    most: Counter = Counter()
    for _ in range(5):
        trainer.manager.memory.lengths.clear()
        found = trainer.rollout()
        assert found.tokens == unmoved.tokens
        differences = [(a - b).abs().max() for a, b in zip(found.log_probs, unmoved.log_probs, strict=True)]
        assert max(differences) < 2e-5
        did = {
            key.rpartition("/")[2]: value for key, value in found.timing.items() if "rollout_rebalance" in key
        }
        assert not did["failed"]
        most |= Counter({name: did[name] for name in ("moves_waiting", "kv_moves")})
        if len(most) == 2:
            break
    assert len(most) == 2, most


def test_a_server_that_dies_is_replaced(trainer, unmoved):
    import ray

    first = trainer.servers.rollout_replicas[0]
    pid = ray.get(first.server_handle.__ray_call__.remote(lambda server: os.getpid()))
    found = trainer.rollout(beside=lambda: os.kill(pid, signal.SIGKILL))
    assert found.tokens == unmoved.tokens
    trainer.checkpoints.sleep_replicas()
    trainer.checkpoints.update_weights(7)
    assert trainer.synced == [7]
    again = trainer.rollout(moves=False)
    assert again.tokens == unmoved.tokens and again.timing[server_restart.METRIC] == 1
    assert all(again.timing[f"{REQUESTS}{k}/max"] for k in range(2))
