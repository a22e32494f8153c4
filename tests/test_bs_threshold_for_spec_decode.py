"""When speculation is on: the gate, the source of its threshold, and the rule for a good one."""

from __future__ import annotations

import pytest

from ascend_rl.speculation.bs_threshold_for_spec_decode import (
    VARIABLE,
    draft_gate,
    main,
    step_time,
    threshold,
)

MATMUL_US = {4: 15, 32: 19, 128: 23, 256: 32}  # one MatMul of a decode step on an NPU, published


def test_a_batch_that_varies_by_one_switches_once():
    gate = draft_gate("sam", 16)
    assert [gate(16 + i % 2) for i in range(8)] == [True] + [False] * 7
    assert not gate(15) and gate(14) and gate(16)


def test_a_threshold_of_one_comes_on_again():
    gate = draft_gate("sam", 1)
    assert [gate(requests) for requests in (1, 2, 1, 0, 1)] == [True, False, False, True, True]


def test_without_a_threshold_it_is_always_open():
    assert draft_gate("suffix", None)(10**6) and draft_gate(None, 4)(10**6)


def test_the_environment_comes_first(monkeypatch):
    monkeypatch.setenv(VARIABLE, "8")
    gate = draft_gate("ngram", 100)
    assert gate(8) and not gate(9)


@pytest.mark.parametrize("method, value, message", [
    ("sam", "0", "size of 1 or more"), ("sam", "-3", "size of 1 or more"), ("sam", "many", "is 'many'"),
    ("suffix", "8", "use ngram or sam"), ("eagle", "8", "would miss the tokens"),
])  # fmt: skip
def test_incompatible_settings_are_refused(method, value, message, monkeypatch):
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError, match=message):
        draft_gate(method, None)


def test_step_times_are_interpolated():
    assert [step_time(MATMUL_US, tokens) for tokens in (4, 18, 32, 256, 384)] == [15, 17, 19, 32, 41]


@pytest.mark.parametrize("draft_tokens, emitted", [(7, 1.7), (7, 2.85), (3, 1.2), (15, 1.05)])
def test_drafts_pay_up_to_the_threshold_only(draft_tokens, emitted):
    """Against the definition, for every batch."""
    pays = [
        step_time(MATMUL_US, batch * (draft_tokens + 1)) / emitted < step_time(MATMUL_US, batch)
        for batch in range(1, 257)
    ]
    largest = threshold(MATMUL_US, draft_tokens, emitted)
    assert pays == [True] * largest + [False] * (256 - largest)


def test_drafts_that_change_nothing_do_not_pay():
    """Twice the tokens take twice the time, and bring two tokens instead of one."""
    assert threshold({1: 1, 8: 8}, draft_tokens=1, emitted=2) == 0


def test_the_documented_value(capsys):
    main(["4:15", "32:19", "128:23", "256:32", "--draft-tokens", "7", "--emitted", "1.7"])
    assert capsys.readouterr().out == f"{VARIABLE}=32\n"


@pytest.mark.parametrize("arguments, message", [
    (["4:15", "--draft-tokens", "7", "--emitted", "2"], "give at least two sizes"),
    (["4:15", "8:16", "--emitted", "2"], "required: --draft-tokens"),
    (["4:15", "8:16", "--draft-tokens", "7"], "required: --emitted"),
])  # fmt: skip
def test_the_command_says_what_is_missing(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_two_sizes_are_enough(capsys):
    main(["1:10", "2:10", "--draft-tokens", "1", "--emitted", "1.5"])
    assert capsys.readouterr().out == f"{VARIABLE}=2\n"
