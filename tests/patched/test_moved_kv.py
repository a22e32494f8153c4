"""Running requests move with their KV: the same answers, of which the target recomputes one token."""

from __future__ import annotations

import multiprocessing.spawn
import os
from pathlib import Path

import pytest
from moving_engines import LENGTHS, check, move, prompts_of, stay
from npu_ground import save_random_model
from warm import Warm


@pytest.fixture(scope="module")
def run(forked):
    """Runs functions, each in a process of its own: a process has one KV connector."""
    warm = Warm(["vllm.entrypoints.llm"])  # a fork of this process may wait for threads that it lacks
    program = forked["py_executable"]
    yield lambda function, *args, **options: warm.run(1, call, program, function, args, options)[0]
    warm.stop()


def call(_, program, function, args, options):
    multiprocessing.spawn.set_executable(program)
    return function(*args, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def stayed(run, model):
    return run(stay, str(model), prompts_of(LENGTHS))


TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.mark.parametrize(
    ("workers", "options"), [pytest.param(2, TWO_RANKS, marks=pytest.mark.long), (1, {})]
)
def test_the_target_computes_one_token(run, model, stayed, tmp_path, workers, options):
    found = move(run, model, tmp_path, workers, **options)
    check(found, stayed, model)
    assert found.sent == len(found.computed) and found.computed == [1] * found.sent


def test_requests_wait_with_their_kv_and_are_preempted_later(run, model, stayed, tmp_path):
    """7 blocks of 128 for prompts that need 11: what is preempted has no KV to load any more."""
    found = move(run, model, tmp_path, target={"num_gpu_blocks_override": 7}, cut=19)
    check(found, stayed, model)
    assert found.computed == [1] * found.sent and found.preempted


def test_without_usable_kv_the_target_computes_all(run, model, stayed, tmp_path):
    def spoil(directory: Path) -> None:
        kv = directory / "0.kv"
        number = int(directory.name.split("-")[1])
        if number == 0:
            kv.unlink()
        elif number == 1:
            os.truncate(kv, kv.stat().st_size // 16 * 8)
        elif number == 2:
            kv.write_bytes(kv.read_bytes()[:-4096] + bytes(4096))
        else:
            (directory / "about.json").write_text("{}")

    found = move(run, model, tmp_path, spoil=spoil)
    check(found, stayed, model)
    assert found.sent == 0
    assert found.computed[:4] == found.lengths[:4] and found.computed[4] == found.lengths[4] - 256  # known


def test_the_connector_is_there_only_if_kv_is_to_be_sent(launch):
    rebalance = "actor_rollout_ref.rollout.rollout_rebalance"
    assert launch(f"{rebalance}.enable=True", device="cpu").kv_transfer_config is None
    assert launch(f"{rebalance}.send_kv_tokens=8", device="cpu").kv_transfer_config is None
    sent = launch(
        f"{rebalance}.enable=True", f"{rebalance}.send_kv_tokens=8", device="cpu"
    ).kv_transfer_config
    assert sent.kv_connector == "MovedKVConnector" and sent.kv_role == "kv_both"
    given = (
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_transfer_config={kv_connector:x,kv_role:kv_both}"
    )
    with pytest.raises(Exception, match="is incompatible with kv_transfer_config"):
        launch(f"{rebalance}.enable=True", f"{rebalance}.send_kv_tokens=8", given, device="cpu")
