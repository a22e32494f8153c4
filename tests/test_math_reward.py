"""The reward: extraction, equality, the limits of the child process; GSM8K as ground truth."""

from __future__ import annotations

import json
import os
import random
import resource
import runpy
import signal
import string
import subprocess
import sys
import threading
import time
import timeit
from pathlib import Path

import pytest

from ascend_rl.launch.supervise import processes
from ascend_rl.recipe import math_reward
from ascend_rl.recipe.math_reward import Checker, compute_score, extract_answer, is_equal, last_box


def score(solution: str, truth) -> float:
    return compute_score("any", solution, truth)["score"]


@pytest.fixture(scope="module")
def gsm8k(root):
    def rows(name: str) -> list[dict]:
        return [json.loads(line) for line in (root / f"tests/samples/gsm8k/{name}.jsonl").open()]

    return rows


def test_every_solution_of_gsm8k_scores_1(gsm8k):
    rows = gsm8k("train") + gsm8k("test")
    truths = [row["answer"].rpartition("####")[2].strip() for row in rows]
    assert len(rows) == 80
    assert all(score(row["answer"], truth) for row, truth in zip(rows, truths, strict=True))
    others = [truths[0] if truth != truths[0] else truths[1] for truth in truths]
    assert not any(score(row["answer"], other) for row, other in zip(rows, others, strict=True))


def test_answers_of_models_score_as_openai_labelled_them(gsm8k):
    """60 problems, 4 models each: 240 labels; on all of the 5276 published ones the two agree as well."""
    labels = []
    for row in gsm8k("example_model_solutions"):
        truth = row["ground_truth"].rpartition("A:")[2].strip()
        for answer in row.values():
            if isinstance(answer, dict):
                labels.append(answer["is_correct"])
                assert score(answer["solution"].replace("\nA:", "\n####"), truth) == answer["is_correct"]
    assert 80 < sum(labels) < 160 and len(labels) == 240


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{ \{1, 2\} }", r"\{1, 2\}"),
        (r"\fbox{7}", "7"),
        (r"\boxed{1}. Wait: \boxed{2", None),  # cut off
        (r"<think>\boxed{1}</think> it is \boxed{3}", "3"),
        (r"<think>it is \boxed{1}", None),  # thinking without an end
        (r"\boxed{1} as thought</think>I do not know", None),
        (r"\boxed{}", None),
        ("#### 12\n", "12"),
        ("first #### 12 then\n#### 13 apples\nbye", "13 apples"),
        ("so\nAnswer: 34", "34"),
        ("**Final answer:** 34", "34"),
        ("The answer is $x^2$.", "$x^2$."),
        ("Answer: 1\nno\nAnswer: 2", "2"),
        ("231</think>132", "132"),
        ("-1.5", "-1.5"),
        ("132 and 5", None),
        ("", None),
        (r"\boxed{" + "1" * 501 + "}", None),
    ],
)
def test_the_answer_of_a_response(solution, answer):
    assert extract_answer(solution) == answer


def test_braces_that_are_escaped_do_not_count():
    assert last_box(r"\boxed{\{x \mid x > 0\}} }") == r"\{x \mid x > 0\}"


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\frac{1}{2}", r"\dfrac12"),
        (r"-\frac{2}{3}", r"\frac{-2}{3}"),
        ("1000", "1,000"),
        ("18", "18.00"),
        ("18", r"\$18"),
        ("1000000", "10^6"),
        (r"2\sqrt{3}", r"\sqrt{12}"),
        ("x^2+2x+1", "(x+1)^2"),
        (r"\binom{5}{2}", "10"),
        ("5", "x = 5"),
        (r"1\frac{1}{2}", "1.5"),
        (r"90^\circ", "90"),
        (r"5\text{ cm}", "5"),
        (r"5\text{ cm}", r"5\,\text{cm}"),
        (r"50\%", "50%"),
        (r"50\%", "50"),
        (r"50\%", "0.5"),
        ("0.5", "50%"),
        (r"\{1,2\}", r"\{2, 1\}"),
        ("1,2", "2,1"),
        ("[0,1)", r"\left[0, 1\right)"),
        (r"(-\infty,2]", r"(-\infty, 2]"),
        (r"\text{East}", "east"),
        ("B", r"\text{(B)}"),
        ("12:30", "12:30"),
    ],
)
def test_what_is_equal(truth, answer):
    assert is_equal(truth, answer)


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("1", "11"),
        ("1", "-1"),
        ("1", "2 + 1"),
        ("0.3", "0.33"),
        (r"\frac{1}{3}", "0.3333"),
        (r"\pi", "3.14"),
        ("(1,2)", "(2,1)"),
        ("(1,2)", "(1,2]"),
        (r"\{1,2\}", r"\{1,2,3\}"),
        ("[0,1)", "[0,1]"),
        (r"50\%", "5"),
        ("0.5", "50"),
        ("1,2", "12"),
        ("east", "west"),
        (r"\sqrt{2}", "2"),
        ("x+1", "x-1"),
        ("1", ""),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    ],
)
def test_what_is_not(truth, answer):
    assert not is_equal(truth, answer)


def test_the_ground_truth_somewhere_in_the_text_earns_nothing():
    assert score("1 + 1 = 2, then 1, 2, 3. I think 1, but am not sure.", "1") == 0
    assert score(r"\boxed{21}", "1") == score(r"\boxed{1 or 2}", "1") == 0


def test_several_right_answers_and_numbers_as_truth():
    assert score(r"\boxed{2}", ["1", "2"]) == score(r"\boxed{2}", 2) == 1
    assert compute_score("x", "no idea", "1") == {"score": 0.0, "acc": 0.0, "answered": 0.0}


def test_what_hangs_scores_0_in_time_from_many_threads():
    """As in Ray, where the reward runs on threads: math-verify's own timeouts raise there."""
    checker = Checker(deadline_s=10)  # the first comparison loads sympy
    assert checker.equal("x+x", "2x")
    child, began, results = checker.child.pid, time.monotonic(), {}
    pairs = [("9^{9^{9^{9}}}", "1"), ("x+x", "2x"), (r"\sqrt{4}", "2")]
    threads = [threading.Thread(target=lambda p=p: results.update({p: checker.equal(*p)})) for p in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {pairs[0]: False, pairs[1]: True, pairs[2]: True}
    assert checker.child.pid != child and time.monotonic() - began < 300
    os.kill(checker.child.pid, signal.SIGKILL)  # by the kernel, out of memory
    checker.child.wait()
    assert checker.equal("x+x", "2x")
    checker.close()


def test_what_takes_too_much_memory_scores_0():
    """The child may have 4 GiB of addresses; what needs more is not equal, and the next pair is compared."""
    checker = Checker(deadline_s=120)
    assert checker.equal("x+x", "2x")
    child = checker.child.pid
    assert resource.prlimit(child, resource.RLIMIT_AS) == (4 << 30, 4 << 30)
    used = int(Path(f"/proc/{child}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(child, resource.RLIMIT_AS, (used + (64 << 20), 4 << 30))
    assert not checker.equal("2^{2^{30}}", "2^{2^{30}}+1")  # 128 MiB each
    assert checker.equal("x+x", "2x")
    checker.close()


def test_the_child_ends_with_its_parent():
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from ascend_rl.recipe.math_reward import *; import time\n"
            "is_equal('x+x', '2x'); from ascend_rl.recipe import math_reward as m\n"
            "print(m._checker.child.pid, flush=True); time.sleep(300)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 300
    while child in processes():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("answer", ["2*pi", "2pi", "2\u03c0", r"2\pi", "6.283185", "pi * 2"])
def test_pi_may_be_written_as_a_word(answer):
    assert is_equal("2*pi", answer) and is_equal(answer, r"2\pi")
    assert not is_equal("3*pi", answer)


@pytest.mark.parametrize(
    "text",
    [
        "\u56e0\u6b64\uff0c\u7b54\u6848\u662f 42\u3002",
        "\u6700\u7ec8\u7b54\u6848\uff1a42",
        "\u7b54\u6848\u4e3a\uff1a**42**",
        "\u7b54\u6848\u662f 7\u3002\n\u66f4\u6b63\uff0c\u7b54\u6848\u662f $42$\u3002",
    ],
)
def test_an_answer_may_be_announced_in_chinese(text):
    assert compute_score("x", text, "42")["score"] == 1
    assert extract_answer("\u8fd9\u4e2a\u7b54\u6848\u5f88\u96be 42") is None


@pytest.fixture(scope="module")
def responses(root) -> list[dict]:
    return [json.loads(line) for line in (root / "tests/samples/math_responses.jsonl").open()]


def test_responses_score_as_their_final_answer(responses):
    assert len(responses) > 150
    wrong = [row for row in responses if score(row["response"], row["truth"]) != row["right"]]
    assert not wrong


def test_a_right_answer_in_the_form_that_dapo_math_asks_for_is_not_refused(root, responses):
    """verl's math_dapo, on the last 300 characters: what it pays rightly is paid here."""
    dapo = runpy.run_path(root / "frameworks/verl/verl/utils/reward_score/math_dapo.py")["compute_score"]
    for row in responses:
        if row["right"] and dapo(row["response"], row["truth"])["acc"]:
            assert score(row["response"], row["truth"]), row


@pytest.mark.parametrize("heading", ["#", "##", "###", "####", "#####", "######"])
@pytest.mark.parametrize("before", ["", "**", "*", "__", "- ", "1. ", "> "])
def test_headings_of_any_level_are_no_answers(heading, before):
    steps = f"{heading} {before}Step 1: add 3 and 4\n3 + 4 = 7\n\n{heading} Step 2\n5\n\n"
    for line in (
        f"{before}Answer: 34",
        f"{heading} {before}Answer: 34",
        f"{heading} Answer\n\n34",
        "Answer: **34**",
    ):
        for after in ("", "\n", f"\n\n{heading} Check\n30 + 4 = 34", "\nAnswers may vary."):
            assert score(steps + line + after, "34") == 1, line + after
            assert score(steps + line + after, "7") == score(steps + line + after, "5") == 0


HOSTILE = [
    *string.printable, "\n \n", "*\n", "**", "* ", "\n\n#", "####", "#### ", "####1\n", "Answer",
    "answer ", "Answer:", "Answer: a ", "the answer is ", "Answer\n", "Answer (", "Answer to ",
    "ANSWER: 1 ", "\\boxed", "\\boxed{", "\\boxed{}", "\\boxed{\\boxed{", "\\boxed 1", "\\fbox ",
    "</think>", "<think>", "<answer>", "<answer></answer>", "<|end|>", "</s>", "</s>\n", "$$", "\\[",
    "\\(", "{}", "\\{", "1,", "1 ", "1.", "(1", "\\text{", "0.\\overline{", "\\frac{", "^{", " \u00a0",
    "\u3000", "\u00bd", "\u00b2", "\uff11", "\uff0c", "\u7b54\u6848", "\u7b54\u6848\u662f ",
    "\u6545\u9009", "\n\u7b54\uff1a", "so the ", "1 because ", ", so ", "\U0001d7cf",
]  # fmt: skip


def thread_s(function, *arguments) -> float:
    """CPU seconds of a call in this thread, the least of three."""
    return min(timeit.repeat(lambda: function(*arguments), timer=time.thread_time, repeat=3, number=1))


@pytest.mark.parametrize(
    "around", [("", ""), ("Answer: a", "b"), ("\\boxed{", "}"), ("x", "\nAnswer: 7"), ("#### ", "x")]
)
def test_a_megabyte_of_anything_costs_this_process_a_tenth_of_a_second(around):
    """Of its CPU time, which is also the time that the other threads of the worker stand still."""
    before, after = around
    for unit in HOSTILE:
        text = before + unit * (1_000_000 // len(unit)) + after
        assert thread_s(compute_score, "any", text, ["1,2", "x^2"]) < 0.1, unit


def test_responses_of_random_pieces_cost_as_little():
    rng = random.Random(2)
    for _ in range(40):
        pieces = rng.choices(HOSTILE, k=rng.randint(2, 4))
        text = "".join(rng.choices(pieces, k=200_000))
        assert thread_s(extract_answer, text) < 0.1, pieces


def test_one_deadline_for_all_truths(monkeypatch):
    """A hundred truths that sympy cannot decide cost as much as one, and nothing is left behind."""
    monkeypatch.setattr(math_reward, "_checker", checker := Checker(deadline_s=2))
    assert score(r"\boxed{x+x}", "2x") == 1  # started
    began = time.monotonic()
    assert score("\\boxed{9^{9^{9^9}}}", [f"{n}^{{{n}^{{{n}^9}}}}" for n in range(10, 110)]) == 0
    assert time.monotonic() - began < 10
    assert score(r"\boxed{x+x}", ["3x", "2x"]) == 1
    checker.close()


def test_truths_of_any_type():
    numpy = pytest.importorskip("numpy")
    right = [
        5,
        5.0,
        numpy.int64(5),
        numpy.float32(5),
        numpy.array(5),
        numpy.array([4, 5]),
        numpy.array(["5"], dtype=object),
    ]
    right += [
        ["4", "5"],
        ("5",),
        {"5"},
        [["5"]],
        [None, "5"],
        '["5"]',
        "['5']",
        b"5",
        "\\boxed{5}",
        "2 + 3 = 5\n#### 5",
        " 5 ",
    ]
    right += ['["4", "5"]', numpy.array([["5"]])]
    for truth in right:
        assert score(r"\boxed{5}", truth) == 1, truth
        assert score(r"\boxed{6}", truth) == 0, truth
    for truth in (
        None,
        "",
        [],
        [None],
        float("nan"),
        numpy.nan,
        numpy.array([]),
        {},
        object(),
        True,
        "[",
        '["',
        "[1, 2]",
    ):
        assert (
            score(r"\boxed{5}", truth) == score(r"\boxed{None}", truth) == score(r"\boxed{nan}", truth) == 0
        ), truth
    assert score(r"\boxed{True}", True) == 1 and score(r"\boxed{[1, 2]}", "[1, 2]") == 1
    for response in (None, 5, b"x", ""):
        assert compute_score("x", response, "5") == {"score": 0.0, "acc": 0.0, "answered": 0.0}


def test_the_published_pairs_of_the_recipes_data_sets(root):
    """A truth in a box earns 1, whatever data set it is of."""
    for truth in (
        "34",
        r"\frac{3}{4}",
        "(1, 2)",
        r"[0, \infty)",
        r"\text{(C)}",
        "x^2 + 1",
        "12:30",
        r"10\sqrt{3}\text{ cm}",
    ):
        for response in (
            rf"\boxed{{{truth}}}",
            f"Answer: {truth}",
            f"**Answer:** ${truth}$",
            f"#### {truth}",
        ):
            assert score(response, truth) == 1, response
