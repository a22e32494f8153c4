r"""The reward of the math recipes: 1 if an answer is mathematically equal to the ground truth, else 0.

A response gives exactly one candidate, so that listing numbers earns nothing: after ``</think>``, the last of
its announced answers: a ``\boxed{}``, an "Answer:" line (as a heading, in bold, in Chinese), "the answer is"
before mathematics, or ``####`` before a number. Where there is none, the last weaker one counts: other text
after "the answer is" or ``####``, or a response that is just a number. A box that is not closed, or thinking
that does not end, does not count.

Invariants (tests/test_math_reward.py): verl calls this on threads of a Ray actor, where it must neither hang
nor hold Python's lock. A response is searched with str.rfind and bounded patterns, so a megabyte takes
milliseconds. Spelling and plain numbers are compared here (math_text.py), the rest in a child process with a
memory limit (math_equal.py), which is killed and replaced when a response takes more than ``DEADLINE_S``.
Cost: 0.1 ms for equal text and numbers, some milliseconds through the child; one child for each reward
worker, started when first needed. What hangs delays its worker by ``DEADLINE_S`` and scores 0.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import json
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from ascend_rl.recipe.math_text import number, quickly

ROOT = str(Path(sys.modules["ascend_rl"].__file__).parents[1])  # verl loads this file by its path
DEADLINE_S = 5.0
START_DEADLINE_S = 120.0
LONGEST_ANSWER = 500  # characters; answers are short, and longer text does not count
LONGEST_LABEL = 100
TRIED = 50  # occurrences of a word, from the end

_MARKUP = " \t*_#>`~"
_END_TOKEN = re.compile(r"(?:<\|[a-z_]{1,30}\|>|</s>)$")
_LABEL = re.compile(  # what may stand before "answer" in a line that announces one
    r"(?i)(?:[\s*_#>`~\-+\u2022(\[{]|\d{1,3}[.)]|\\(?:text(?:bf|it)?|mathbf|noindent)|"
    r"(?:so|thus|hence|therefore|finally|and|the|my|our|final|correct|short|exact|numerical|simplified)\b,?|"
    r"\u6700\u7ec8|\u6700\u540e|\u6b63\u786e|\u56e0\u6b64|\u6240\u4ee5|\u6545|[\uff0c,\u7684])*"
)
_LINKING = re.compile(  # what may stand between "answer" and a colon or verb, in the same sentence
    r"[^\S\n]?(?:\([^()\n]{0,40}\)|[*_`)\]}]{0,6}|[^\S\n]?(?:to|for|of|in|here|choice|option)\b[^.:=\n?!]{0,60}?)?"
    r"[*_`)\]} ]{0,6}"
    r"(?P<verb>[:=\uff1a]|\b(?:is|are|was|will be|would be|should be|must be|equals)\b)"
)
_CHINESE_LINKING = re.compile(
    r"[*_` ]{0,6}(?P<verb>(?:\u5e94\u8be5?|\u5c31|\u5373|\u4fbf)?(?:[\u662f\u4e3a]|\u7b49\u4e8e)"
    r"|[:=\uff1a\uff1d])"
)
_FILLER = re.compile(
    r"(?i)(?:[\s*_#>`:=\uff1a]"
    r"|(?:therefore|thus|simply|just|clearly|indeed|then|now|equal to|given by|exactly)\b,?)*"
)
_MATHEMATICS = re.compile(
    r"[-+\u2212\u00b1]?\s?"
    r"(?:[\d$\\(\[{\u221a\u221e\u03c0\u2205\u00bc-\u00be\u2150-\u215e\uff10-\uff19\u20ac\u00a3\u00a5]|\.\d)"
    r"|[B-HJ-Zb-z](?![A-Za-z'\u2019])|[AaI](?![A-Za-z'\u2019])(?!\s[A-Za-z])|not\b|pi\b|sqrt\b"
)
_ARTICLE = re.compile(r"(?i)\b(?:the|an|our|final) $")
_DIRECT = re.compile(r"([ *_]{1,6}(?:of )?)[-+]?[\d$\\]")
_STEP = re.compile(r"\d{1,3}[.):](?!\d)\s*(?=\S)")  # "2. Add both sides" is a heading
_REASON = re.compile(  # where an explanation begins that is not part of the answer
    r"(?i)[.;!?](?=\s{1,3}[^\d\s$\\])|\s(?:because|since|as|which|where|so|after|per the|by the)\s"
    r"|,\s{1,3}(?:because|since|as|which|where|so|and so|obtained|i\.e|not)\b"
    r"|\s[\u2713\u2714\u2705\u25a1\u25a0]|\uff08[\u4e00-\u9fff]{1,20}\uff09[\u3002\s]{0,3}$"
    r"|[\uff0c,](?:\u56e0\u4e3a|\u6240\u4ee5|\u7531\u4e8e|\u5176\u4e2d|\u8c22)"
    r"|\s\((?:as|i\.e|(?!(?:mod|sin|cos|tan|log|not|and)\b)[a-z]{3,20})\b[^()]{0,100}\)[.\s*]{0,5}$"
)


def _places(text: str, word: str) -> Iterator[int]:
    """Where ``word`` occurs, from the end, at most TRIED times."""
    place = len(text)
    for _ in range(TRIED):
        place = text.rfind(word, 0, place)
        if place < 0:
            return
        yield place


def _braced(text: str, start: int) -> str | None:
    """The text from ``start`` to its closing brace; None if that is not within LONGEST_ANSWER characters."""
    depth = 1
    for end in range(start, min(len(text), start + LONGEST_ANSWER + 1)):
        depth += (text[end] == "{") - (text[end] == "}") if text[end - 1] != "\\" else 0
        if depth == 0:
            return text[start:end]
    return None


def _box(text: str) -> tuple[int, str | None] | None:
    """The place and content of the last box, or of the one around it; None if there is no box."""
    places = sorted((place for word in (r"\boxed", r"\fbox") for place in _places(text, word)), reverse=True)
    last = None
    for place in places:
        after = text[place : place + LONGEST_LABEL]
        content = after[6 if after.startswith(r"\boxed") else 5 :]
        if content[:1].isalpha():
            continue
        start = place + len(after) - len(content.lstrip())
        if text[start : start + 1] == "{":
            found = _braced(text, start + 1)
        elif last is None and content.strip():  # TeX takes a box without braces for the next token
            found = re.split(
                r"[$\n]|\\\)|\\\]|[.,;!?](?:\s|$)", text[start : start + LONGEST_ANSWER], maxsplit=1
            )[0]
        else:
            found = None
        if last is None:
            last, end = (place, found), start + 1 + len(found or "")
        elif found is not None and start + 1 + len(found) >= end:
            last, end = (place, found), start + 1 + len(found)
    return last


def last_box(text: str) -> str | None:
    r"""The content of the last ``\boxed{}``; None if there is none or it is not closed.

    >>> last_box(r"first \boxed{1}, then \boxed{\frac{1}{2}}."), last_box(r"\boxed{1} and \boxed{2")
    ('\\frac{1}{2}', None)
    """
    found = _box(text)
    return found[1] if found else None


def _line(text: str, start: int) -> str:
    """The answer that follows ``start``: its line, or the next one if that is empty, or a display."""
    rest = text[start : start + 2 * LONGEST_ANSWER]
    rest = rest[_FILLER.match(rest).end() :]
    for opening, closing in (("$$", "$$"), (r"\[", r"\]")):
        if rest.startswith(opening) and (end := rest.find(closing, 2)) > 0:
            return rest[: end + 2]
    return rest.partition("\n")[0].partition("</answer>")[0]


def _answer_of(line: str) -> str:
    r"""The answer at the start of a line, without an explanation after it.

    >>> _answer_of("34 (since 30 + 4 = 34)"), _answer_of("$x^2$, which is even."), _answer_of("13. It is odd")
    ('34', '$x^2$', '13')
    """
    line = line.strip(_MARKUP).lstrip("})] ")
    if line.count("}") > line.count("{"):
        line = line[: line.rindex("}")]  # of \\text{Answer: 5}
    if line.startswith("$") and (end := line.find("$", 1)) > 1:
        after = line[end + 1 :].lstrip(" *_")
        if "$" not in after and after[:1] in (",", ";", "(", ".", "\u2014", "-", ":"):
            return line if after.strip(" .*_") == "" else line[: end + 1]
    if match := _REASON.search(line):
        line = line[: match.start()]
    return line.strip(_MARKUP).rstrip("\\ ")


def _announced(text: str) -> Iterator[tuple[int, bool, str]]:
    """(place, whether it is certain, answer) of what announces answers, besides boxes."""
    for word in ("\u6545\u9009", "\n\u7b54\uff1a", "\n\u7b54:"):
        for place in _places(text, word):
            yield place, True, _answer_of(_line(text, place + len(word)))
    for word, linking in (("nswer", _LINKING), ("NSWER", _LINKING), ("\u7b54\u6848", _CHINESE_LINKING)):
        for place in _places(text, word):
            english, begin, after = word.isascii(), place, place + len(word)
            if english:
                begin -= 1
                if text[place - 1 : place] not in ("a", "A") or text[begin - 1 : begin].isalpha():
                    continue
                after += text[after : after + 1] in ("s", "S")
                if text[after : after + 1].isalpha():
                    continue
            before = text[max(0, begin - LONGEST_LABEL) : begin].rpartition("\n")[2]
            rest = text[after : after + 2 * LONGEST_LABEL]
            labelled = _LABEL.fullmatch(before) is not None
            if match := linking.match(rest):
                answer = _answer_of(_line(text, after + match.end()))
                colon = match["verb"] in ":=\uff1a\uff1d"
                certain = not english or (labelled and colon) or _MATHEMATICS.match(answer) is not None
                if certain or labelled or not colon:
                    yield place, certain, answer
            elif labelled and not rest.partition("\n")[0].strip("*_` "):  # a heading
                yield place, True, _answer_of(_line(text, after))
            elif (labelled or _ARTICLE.search(before)) and (match := _DIRECT.match(rest)):
                yield place, True, _answer_of(_line(text, after + match.end(1)))


def _after_hashes(text: str) -> Iterator[tuple[int, bool, str]]:
    for place in _places(text, "####"):
        if text[place - 1 : place] == "#" or text[place + 4 : place + 5] == "#":
            continue
        answer = (
            text[place + 4 : place + 4 + LONGEST_ANSWER + 1].strip(" \t").partition("\n")[0].strip(_MARKUP)
        )
        if answer:
            certain = _MATHEMATICS.match(answer) is not None and not _STEP.match(answer)
            yield place, certain, answer


def _tagged(text: str) -> Iterator[tuple[int, bool, str]]:
    for place in _places(text, "<answer>"):
        content = text[place + 8 : place + 8 + LONGEST_ANSWER + 10]
        inside, closed, _ = content.partition("</answer>")
        if closed:
            yield place, True, inside.strip()
        return


def extract_answer(solution: str) -> str | None:
    """The single candidate of a response, as described above; None if it has none.

    >>> extract_answer("1 + 1 = 2, so #### 2"), extract_answer("it may be 2")
    ('2', None)
    >>> extract_answer("#### Step 1: add\\n- **Answer:** 34 apples\\nAnswers may vary.")
    '34 apples'
    """
    final = solution[solution.rfind("</think>") + 8 :] if "</think>" in solution else solution
    if "<think>" in final:
        return None
    final = final.rstrip()
    for _ in range(3):  # what a tokenizer may leave at the end
        if match := _END_TOKEN.search(final, max(0, len(final) - 40)):
            final = final[: match.start()].rstrip()
    found = [*_announced(final), *_after_hashes(final), *_tagged(final)]
    if box := _box(final):
        found.append((box[0], True, box[1] or ""))
    certain = [candidate for candidate in found if candidate[1]]
    if certain or found:
        answer = max(certain or found)[2]
    else:
        short = final.strip() if len(final) < 10 * LONGEST_ANSWER else ""
        answer = short if len(short) <= LONGEST_ANSWER and number(short) is not None else ""
    answer = answer.strip()
    return answer if 0 < len(answer) <= LONGEST_ANSWER else None


class Checker:
    """A child process that compares answers, one response per line; safe to call from any thread."""

    def __init__(self, deadline_s: float = DEADLINE_S):
        self.deadline_s = deadline_s
        self.lock = threading.Lock()
        self.child: subprocess.Popen | None = None

    def equal(self, truth: str, answer: str) -> bool:
        return self.any_equal([truth], answer)

    def any_equal(self, truths: list[str], answer: str) -> bool:
        """Whether one of the truths equals the answer; False if it cannot tell within the limits."""
        with self.lock:
            try:
                if self.child is None or self.child.poll() is not None:
                    self._start()
                self.child.stdin.write(json.dumps([truths, answer, self.deadline_s]) + "\n")
                self.child.stdin.flush()
                return self._line(self.deadline_s) == "equal"
            except (BrokenPipeError, TimeoutError):
                self.close()
                return False

    def _start(self) -> None:
        self.close()
        paths = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-m", "ascend_rl.recipe.math_equal"],
            env=os.environ | {"PYTHONPATH": paths},
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        if self._line(START_DEADLINE_S) != "ready":
            raise RuntimeError(
                "the comparison of answers does not start; install sympy as requirements*.txt pins it"
            )

    def _line(self, seconds: float) -> str:
        """The child's next line; empty if it ended. Raises TimeoutError if none comes in time."""
        if not select.select([self.child.stdout], [], [], seconds)[0]:
            raise TimeoutError
        return self.child.stdout.readline().strip()

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.child.stdin.close()
            self.child.stdout.close()
            self.child = None


_checker = Checker()
atexit.register(_checker.close)


def is_equal(truth: str, answer: str) -> bool:
    """Whether two answers are mathematically equal."""
    return any_equal([truth], answer)


def any_equal(truths: list[str], answer: str) -> bool:
    """Whether one of the truths equals the answer, within one deadline for all of them."""
    quick = [quickly(truth, answer) for truth in truths]
    if True in quick:
        return True
    open_ones = [truth for truth, decided in zip(truths, quick, strict=True) if decided is None]
    return bool(open_ones) and _checker.any_equal(open_ones, answer)


def truths_of(ground_truth) -> list[str]:
    r"""The answers that a ground truth allows: one, or those of a list; without a box or a solution.

    >>> truths_of(5), truths_of(["1", None, [2.5]]), truths_of('["34"]'), truths_of("3+4=7\n#### 7")
    (['5'], ['1', '2.5'], ['34'], ['7'])
    """
    if hasattr(ground_truth, "tolist"):  # numpy
        ground_truth = ground_truth.tolist()
    if isinstance(ground_truth, list | tuple | set | frozenset):
        return [truth for part in ground_truth for truth in truths_of(part)]
    if ground_truth is None or ground_truth != ground_truth:
        return []
    if isinstance(ground_truth, bytes):
        ground_truth = ground_truth.decode(errors="replace")
    text = str(ground_truth).strip()
    if text[:2] in ('["', "['") and text[-2:] in ('"]', "']"):
        with contextlib.suppress(ValueError, SyntaxError):
            return truths_of(json.loads(text) if text[1] == '"' else ast.literal_eval(text))
    if (box := last_box(text)) is not None:
        text = box
    elif "####" in text:
        text = text.rpartition("####")[2].strip()
    return [text] if 0 < len(text) <= 4 * LONGEST_ANSWER else []


def compute_score(data_source, solution_str: str, ground_truth, extra_info=None, **kwargs) -> dict:
    """verl's reward hook.

    Args:
        data_source: name of the data set; the same rules apply to all.
        solution_str: the decoded response.
        ground_truth: the correct answer, LaTeX, plain text or a number, or a list of which any is correct.

    Returns:
        score and acc, 0 or 1; answered, whether the response had an answer at all.
    """
    answer = extract_answer(solution_str) if isinstance(solution_str, str) else None
    right = float(answer is not None and any_equal(truths_of(ground_truth), answer))
    return {"score": right, "acc": right, "answered": float(answer is not None)}
