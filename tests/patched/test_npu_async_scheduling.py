"""Asynchronous scheduling of vLLM 0.13 on vllm-ascend: a step is scheduled while the one before runs."""

from __future__ import annotations

import asyncio
import functools
import os
from pathlib import Path

import pytest
from npu_ground import make_llm, save_random_model

from ascend_rl.process.counts import VARIABLE, counted

pytestmark = pytest.mark.long

PROMPTS = [[5, 6, 3 + i % 7, *[2 + i % 11] * (i * 5 % 40)] for i in range(12)]
LENGTHS = [20 + 13 * i % 60 for i in range(12)]  # tokens
FEWEST_STEPS = sum(LENGTHS) / 4  # with 4 requests at a time
SIZES = [1, 2, 4]
GRAPHS = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES}


def decode(path: str, ahead: bool, sampling: dict, lengths: list[int] = LENGTHS, **options) -> dict:
    """A job: token ids, log-probs, preemptions, replays, and steps scheduled before the last had ended."""
    import torch

    from vllm import SamplingParams

    options = {"max_num_seqs": 4, "max_num_batched_tokens": 32} | options
    llm = make_llm(path, async_scheduling=ahead, **options)
    core = llm.llm_engine.engine_core.engine_core
    found, schedule, preempt = {"ahead": 0, "preempted": 0}, core.scheduler.schedule, None
    preempt = core.scheduler._preempt_request

    def counted_schedule():
        found["ahead"] += bool(core.batch_queue)
        return schedule()

    def counted_preempt(*args):
        found["preempted"] += 1
        return preempt(*args)

    core.scheduler.schedule, core.scheduler._preempt_request = counted_schedule, counted_preempt
    torch.npu.graphs.reset_counts()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS[: len(lengths)]],
        [SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0, **sampling) for n in lengths],
        use_tqdm=False,
    )
    completions = [output.outputs[0] for output in outputs]
    found["ids"] = [list(one.token_ids) for one in completions]
    found["log_probs"] = [
        [step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)]
        for one in completions
    ]
    return found | {"replays": torch.npu.graphs.counts()["replays"]}


def serve(path: str, directory: str, ahead: bool) -> dict:
    """A job: what verl's server returns, with an engine core and a worker in processes of their own."""
    from live_servers import configuration

    import verl.workers.rollout.vllm_rollout.vllm_async_server as server_module
    from verl.workers.rollout.replica import RolloutMode

    server_module.ray.util.get_node_ip_address = lambda: "127.0.0.1"
    counts, rollout = Path(directory, f"counts-{ahead}"), "actor_rollout_ref.rollout"
    os.environ |= {VARIABLE: str(counts), "ASCEND_RT_VISIBLE_DEVICES": "0"}
    config = configuration(
        Path(path),
        Path(directory),
        f"{rollout}.enforce_eager=False",
        f"{rollout}.cudagraph_capture_sizes={SIZES}".replace(" ", ""),
        f"{rollout}.engine_kwargs.vllm.distributed_executor_backend=mp",
        f"+{rollout}.engine_kwargs.vllm.async_scheduling={ahead}",
    ).actor_rollout_ref

    async def run() -> dict:
        server = server_module.vLLMHttpServer(
            config.rollout, config.model, RolloutMode.STANDALONE, [None], 0, 0, 1, 1, "0"
        )
        await server.launch_server()
        try:
            sampling = {"temperature": 0.0, "ignore_eos": True, "logprobs": True}
            done = await asyncio.gather(*[
                server.generate(prompt, sampling | {"max_tokens": count}, f"request-{i}")
                for i, (prompt, count) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
            ])  # fmt: skip
            taken = server.engine.stats.take()
        finally:
            server.engine.shutdown()
        return {
            "ids": [list(one.token_ids) for one in done],
            "log_probs": [list(one.log_probs) for one in done],
            "ahead": counted(counts)["scheduled_ahead"],
            "replays": taken["rollout/graph_steps"],
        }

    return asyncio.run(run())


@functools.cache
def model_in(directory: Path) -> str:
    return str(save_random_model(directory))


@pytest.fixture
def model(tmp_path_factory) -> str:
    return model_in(tmp_path_factory.getbasetemp() / "async_scheduling")


def assert_same(plain: dict, ahead: dict) -> None:
    assert plain["ids"] == ahead["ids"]
    pairs = zip(sum(plain["log_probs"], []), sum(ahead["log_probs"], []), strict=True)
    assert max(abs(a - b) for a, b in pairs) < 1e-5


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_greedy_tokens_are_those_of_steps_one_by_one(npu_ground, model, graphs):
    options = {"enforce_eager": False, "compilation_config": GRAPHS} if graphs else {}
    plain, ahead = (npu_ground.run(decode, model, on, {"temperature": 0}, **options) for on in (False, True))
    assert_same(plain, ahead)
    assert plain["ahead"] == 0 and ahead["ahead"] > 0.9 * FEWEST_STEPS
    assert not graphs or min(plain["replays"], ahead["replays"]) > 0.8 * FEWEST_STEPS


def test_preempted_requests_continue_where_they_were(npu_ground, model):
    lengths, options = [150] * 4, {"num_gpu_blocks_override": 6}  # of 128 tokens, one unused: 4 would need 8
    runs = [npu_ground.run(decode, model, on, {"temperature": 0}, lengths, **options) for on in (False, True)]
    assert_same(*runs)
    assert all(run["preempted"] for run in runs) and runs[1]["ahead"] > 150


def test_through_verls_server_and_its_processes(npu_ground, model, tmp_path):
    plain, ahead = (npu_ground.run(serve, model, str(tmp_path), on) for on in (False, True))
    assert_same(plain, ahead)
    assert plain["ahead"] == 0 and ahead["ahead"] > 0.9 * FEWEST_STEPS
    assert min(plain["replays"], ahead["replays"]) > 0.8 * FEWEST_STEPS


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty"])
def test_penalties_see_the_tokens_of_the_last_step(npu_ground, model, penalty):
    sampling = {"temperature": 0, penalty: 1.5}
    plain, ahead = (npu_ground.run(decode, model, on, sampling, [30] * 4) for on in (False, True))
    assert_same(plain, ahead)
