"""The server of the 235B layout lets in all requests of a step, and calls that are no requests as well."""

from __future__ import annotations

import asyncio
import time

REQUESTS = 512 * 16
LAYOUT = {"tensor_model_parallel_size": 4, "data_parallel_size": 32, "expert_parallel_size": 128,
          "max_num_seqs": 256}  # fmt: skip


def test_all_requests_of_a_step_are_let_in_and_questions_are_answered_meanwhile(
    start_ray, forked, tiny, tmp_path
):
    import admitting_server
    import ray
    from hydra import compose, initialize_config_module

    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    start_ray(num_cpus=2, resources={"NPU": 128}, include_dashboard=False, runtime_env=forked)
    overrides = [f"actor_rollout_ref.rollout.{key}={value}" for key, value in LAYOUT.items()]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            [f"actor_rollout_ref.model.path={tiny}/model", "actor_rollout_ref.rollout.name=vllm", *overrides],
        )
    replica = vLLMReplica(0, config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, 128)
    assert replica.world_size == 128 and replica.nnodes == 1
    replica.server_class = ray.remote(admitting_server.Server)
    worker = ray.remote(admitting_server.Worker).options(resources={"NPU": 1}).remote()
    replica.workers = [worker] * 128
    asyncio.run(replica.launch_servers())
    (server,) = replica.servers

    note = tmp_path / "let_in"
    note.touch()
    answers = [server.generate.remote(str(note)) for _ in range(REQUESTS)]
    deadline, seen = time.monotonic() + 120, -1
    while (size := note.stat().st_size) < REQUESTS and time.monotonic() < deadline:
        if size > 0 and size == seen:
            break  # nothing for three seconds
        seen = size
        time.sleep(3)
    assert size == REQUESTS
    assert ray.get(server.rollout_progress.remote(), timeout=60) == 0  # all of them still run
    ray.get(server.finish.remote(), timeout=60)
    ray.get(answers, timeout=120)
    assert ray.get(server.rollout_progress.remote(), timeout=60) == REQUESTS
