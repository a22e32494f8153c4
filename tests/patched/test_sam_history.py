"""Earlier responses travel through verl's own rollout manager, workers and agent loop to the engines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from counting_servers import PROMPTS, make_manager, rollout

from ascend_rl.speculation.sam_history import KEY, take_history
from ascend_rl.speculation.sam_options import HISTORY

VLLM = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
SAM = f"{VLLM}.speculative_config.method=sam"


def brought(manager) -> list[tuple[list[int], list[tuple[list[int], int]]]]:
    """Of each request: its prompt, and the earlier texts that it brings, each with its prompt's length."""
    found = []
    for server in manager.servers.values():
        for prompt, params in server.asked:
            texts = take_history(SimpleNamespace(extra_args=params.get("extra_args")))
            found.append((prompt, [(tokens.tolist(), length) for tokens, length in texts]))
    return found


@pytest.mark.parametrize("overrides", [[], ["actor_rollout_ref.rollout.data_rebalance=True"]])
def test_a_sample_brings_the_last_responses_to_its_prompt(tiny, overrides):
    manager = make_manager(tiny / "model", SAM, *overrides)
    output = None
    for step in range(3):  # training, validation, training
        earlier = responses(output) if output else {}
        output, _ = rollout(manager, global_steps=step, validate=step == 1)
        assert output.non_tensor_batch["mark"].tolist() == list(range(len(PROMPTS)))
        assert KEY not in output.non_tensor_batch
        assert output.meta_info["timing"][f"{KEY}/known_share"] == (step > 0)
        requests = brought(manager)
        assert len(requests) == len(PROMPTS)
        for prompt, texts in requests:
            known = earlier.get(tuple(prompt), set())
            assert {(*prompt, *response) for response in known} >= {tuple(tokens) for tokens, _ in texts}
            assert len(texts) == len({tuple(tokens) for tokens, _ in texts}) == min(HISTORY, len(known))
            assert all(length == len(prompt) for _, length in texts)
        assert step == 0 or max(len(texts) for _, texts in requests) == HISTORY


def responses(output) -> dict[tuple, set[tuple]]:
    """The different responses to each prompt."""
    found: dict[tuple, set[tuple]] = {}
    width = output.batch["responses"].shape[1]
    for tokens, mask in zip(output.batch["input_ids"], output.batch["attention_mask"].bool(), strict=True):
        prompt = tuple(tokens[:-width][mask[:-width]].tolist())
        found.setdefault(prompt, set()).add(tuple(tokens[-width:][mask[-width:]].tolist()))
    return found


@pytest.mark.parametrize("overrides", [[], [SAM, f"{VLLM}.additional_config.sam_decoding.history=0"]])
def test_without_sam_or_history_requests_are_as_before(tiny, overrides):
    manager = make_manager(tiny / "model", *overrides)
    for _ in range(2):
        output, _ = rollout(manager)
        assert not any(texts for _, texts in brought(manager))
        assert f"{KEY}/known_share" not in output.meta_info["timing"]
    assert all(
        "extra_args" not in params for server in manager.servers.values() for _, params in server.asked
    )


ROWS, LENGTH = 16, 200
MOVES = "actor_rollout_ref.rollout.rollout_rebalance"


@pytest.fixture(scope="module")
def engines(start_ray, forked, checkpoint, tmp_path_factory):
    """verl's manager over real servers, one of them with two DP engines, and what happened in the engines."""
    from live_servers import Servers, configuration

    from ascend_rl.process.counts import VARIABLE, counted

    path = tmp_path_factory.mktemp("engines")

    class Counting(Servers):
        environment = {VARIABLE: str(path / "counts")}

    start_ray(num_cpus=4, include_dashboard=False, runtime_env=forked)
    moves = [f"{MOVES}.enable=True", f"{MOVES}.check_interval_s=0.03"]
    drafts = [SAM, f"{VLLM}.speculative_config.num_speculative_tokens=3"]
    manager = Counting.create(configuration(checkpoint, path, *moves, *drafts))
    return manager, lambda: counted(path / "counts")


def test_real_engines_take_in_what_a_sample_brings_and_it_can_still_move(engines):
    """Through Ray, AsyncLLM, msgpack and the engines' processes. Greedy: each prompt has one response."""
    from live_servers import batch

    manager, counts = engines

    def run(places: list[int], move: bool = False):
        manager.rollout_config.rollout_rebalance.enable = move  # here, in the driver
        given = {"temperature": 0.0, "ignore_eos": True, "max_tokens": LENGTH}
        output = manager.generate_sequences(batch([given | {"engine": place} for place in places]))
        return output.batch["responses"].tolist(), output.meta_info["timing"]

    first, _ = run([0] * ROWS)
    assert counts()["sam_history"] == 0
    second, timing = run([1, 2] * (ROWS // 2))  # which have not seen these prompts
    assert second == first and timing[f"{KEY}/known_share"] == 1
    assert counts()["sam_history"] == ROWS * LENGTH
    third, timing = run([1] * ROWS, move=True)
    assert third == first
    assert timing["rollout_rebalance/moves_waiting"] + timing["rollout_rebalance/moves_running"] > 0
    # The first engine of that server did not know half of the prompts; to the others, some may have moved.
    assert 1 <= counts()["sam_history"] / (ROWS * LENGTH) <= 2
