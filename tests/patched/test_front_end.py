"""What a rollout server does for each token, and that its results are those of verl's own request."""

from __future__ import annotations

import asyncio

import pytest
from played_engines import Server

ENGINES, SEATS, TOKENS = 2, 150, 5  # more requests a message than vLLM's chunk of 128


@pytest.fixture
def server(tiny):
    return lambda **given: Server(tiny / "model", ENGINES, SEATS, **given)


def rollout(server, messages, **sampling):
    async def run():
        calls = await server.start(**sampling)
        await server.play(messages)
        return await asyncio.gather(*calls)

    return asyncio.run(run())


def fields(results):
    return [(r.token_ids, r.log_probs, r.stop_reason, r.routed_experts, r.num_preempted) for r in results]


def test_results_are_those_of_verls_own_request(server):
    plain, here = server(plain=True), server()
    messages = plain.messages(TOKENS, ends=("length", "stop"))
    expected, found = fields(rollout(plain, messages)), fields(rollout(here, messages))
    assert found == expected and len(found) == ENGINES * SEATS
    assert all(len(ids) == len(probs) == TOKENS for ids, probs, *_ in found)
    assert len({tuple(ids) for ids, *_ in found}) > SEATS
    assert {type(value) for _, probs, *_ in found for value in probs} == {float}


def test_without_log_probs_too(server):
    plain, here = server(plain=True), server()
    messages = plain.messages(TOKENS, log_probs=False)
    expected, found = (fields(rollout(one, messages, logprobs=False)) for one in (plain, here))
    assert found == expected and found[0][1] is None


def test_an_aborted_request_returns_what_it_has(server):
    def aborted(one):
        async def run():
            calls = await one.start()
            await one.play(one.messages(TOKENS)[: 3 * ENGINES])  # three of five tokens
            await one.server.engine.abort([name for names in one.names for name in names])
            return await asyncio.gather(*calls)

        return fields(asyncio.run(run()))

    expected, found = aborted(server(plain=True)), aborted(server())
    assert found == expected
    assert {(len(ids), len(probs), reason) for ids, probs, reason, *_ in found} == {(3, 3, "aborted")}


def test_a_request_makes_one_output_and_no_text(server, monkeypatch):
    from vllm.v1.engine.output_processor import RequestOutputCollector

    put, given = [], RequestOutputCollector.put
    monkeypatch.setattr(RequestOutputCollector, "put", lambda self, o: put.append(o) or given(self, o))
    one = server()
    rollout(one, one.messages(TOKENS))
    assert len(put) == ENGINES * SEATS and not any(output.outputs[0].text for output in put)


def test_drafted_tokens_and_wider_rows_append_the_same_as_vllms_own_code():
    from ascend_rl.rollout.front_end import append_sampled, sampled_log_probs
    from vllm.logprobs import FlatLogprobs

    ids, values, ranks = [[5, 9], [7, 5], [5, 1]], [[-0.5, -0.25], [-1.5, -0.125], [-2.0, -1.0]], [2, 4, 1]
    theirs, ours = FlatLogprobs(), FlatLogprobs()
    for step in range(3):
        theirs.append_fast(ids[step], values[step], [ranks[step]], [None] * 2)
    assert append_sampled(ours, ids[:1], values[:1], ranks[:1]) == -0.5
    assert append_sampled(ours, ids[1:], values[1:], ranks[1:]) == -3.5
    assert ours == theirs
    assert (
        sampled_log_probs([5, 7, 5], ours) == sampled_log_probs([5, 7, 5], list(ours)) == [-0.5, -1.5, -2.0]
    )


def test_stop_strings_are_still_looked_for_in_the_text(server):
    one = server()
    messages = one.messages(TOKENS)

    async def run():
        calls = await one.start(stop=["no such text"])
        states = list(one.server.engine.output_processor.request_states.values())
        await one.play(messages)
        await asyncio.gather(*calls)
        return states

    assert all(state.detokenizer.output_text for state in asyncio.run(run()))


def test_log_probs_arrive_without_an_array_a_request(server, monkeypatch):
    from vllm.v1.serial_utils import MsgpackDecoder

    arrays, given = [], MsgpackDecoder._decode_ndarray
    monkeypatch.setattr(MsgpackDecoder, "_decode_ndarray", lambda *a: arrays.append(a) or given(*a))
    one = server()
    rollout(one, one.messages(TOKENS))
    assert not arrays


def test_progress_knows_the_tokens_of_requests_that_have_not_ended(server):
    one = server(use_tqdm=True)
    messages = one.messages(TOKENS)

    async def run():
        await one.server.rollout_progress(reset=True)
        calls, seen = await one.start(), []
        for first in range(0, len(messages), ENGINES):
            seen.append(await one.server.rollout_progress())
            await one.play(messages[first : first + ENGINES])
        await asyncio.gather(*calls)
        return [*seen, await one.server.rollout_progress()]

    requests, seen = ENGINES * SEATS, asyncio.run(run())
    assert [counts["tokens"] for counts in seen] == [requests * step for step in range(TOKENS + 1)]
    assert [counts["longest"] for counts in seen] == list(range(TOKENS + 1))
    assert [counts["running"] for counts in seen] == [0, *[requests] * (TOKENS - 1), 0]
    assert [counts["waiting"] for counts in seen] == [requests, *[0] * TOKENS]
    assert [counts["done"] for counts in seen] == [*[0] * TOKENS, requests]
