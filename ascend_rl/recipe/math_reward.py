"""The reward of the math recipes: 1 if an answer is mathematically equal to the ground truth, else 0.

Two things often go wrong in such rewards. One that looks for the ground truth anywhere in the response nearly
always pays when the truth is "1". And a library that compares with sympy can take forever on ``9^{9^{9}}``;
its timeouts are signals, which Python delivers only to the main thread, while verl calls the reward on
threads of a Ray actor.

Here a response gives exactly one candidate: after ``</think>``, the last ``\\boxed{}``, else what follows
the last ``####``, else the last "Answer:" line or its Chinese phrase, else the whole text if it is just a
number. A box that is not closed, or thinking that does not end, does not count. Equal text and plain
numbers are decided at once; math-verify compares the rest in a child process with a deadline and a memory
limit, which is killed and replaced when it exceeds them.

Cost: microseconds for equal text and numbers, about 5 ms through math-verify; one child for each of verl's
reward workers, started when first needed. A comparison that hangs delays its worker by ``DEADLINE_S`` and
scores 0.
"""

from __future__ import annotations

import atexit
import json
import re
import select
import subprocess
import sys
import threading
from decimal import Decimal

DEADLINE_S = 5.0
START_DEADLINE_S = 120.0
MEMORY_BYTES = 4 << 30
LONGEST_ANSWER = 500  # characters; answers are short, and longer text does not count

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_ANSWER_LINE = re.compile(r"(?im)^[\s*]*(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*[:=]?[\s*]*(.+?)[\s*]*$")
_CHINESE_ANSWER = re.compile(  # "the answer is" in Chinese, with or without a colon, up to the full stop
    r"\u7b54\u6848(?:[\u662f\u4e3a]\s*[:=\uff1a]?|\s*[:=\uff1a])[\s*]*([^\n\u3002]+?)[\s*]*(?:[\u3002\n]|$)"
)
_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])|\u03c0")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_DECORATION = re.compile(r"\\left|\\right|\\displaystyle|\\[!,;:]|[\s$]|\\[()\[\]]")


def last_box(text: str) -> str | None:
    r"""The content of the last ``\boxed{}``; None if there is none or it is not closed.

    >>> last_box(r"first \boxed{1}, then \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = None
    for match in _BOX.finditer(text):
        start = match.end()
    if start is None:
        return None
    depth = 1
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}") if text[end - 1] != "\\" else 0
        if depth == 0:
            return text[start:end]
    return None


def extract_answer(solution: str) -> str | None:
    """The single candidate of a response, as described above; None if it has none.

    >>> extract_answer("1 + 1 = 2, so #### 2"), extract_answer("it may be 2")
    ('2', None)
    """
    before, closed, final = solution.rpartition("</think>")
    if not closed and "<think>" in solution:
        return None
    if _BOX.search(final):
        answer = last_box(final)
    elif "####" in final:
        answer = final.rpartition("####")[2].strip().partition("\n")[0]
    elif lines := [*_ANSWER_LINE.finditer(final), *_CHINESE_ANSWER.finditer(final)]:
        answer = max(lines, key=lambda line: line.start(1))[1]
    else:
        answer = final if _number(final) is not None else None
    answer = (answer or "").strip()
    return answer if 0 < len(answer) <= LONGEST_ANSWER else None


def _plain(text: str) -> str:
    """The text without what does not change its meaning: $ signs, spaces, bracket sizes, the final full stop.

    >>> _plain(r"$ \\left( 1, \\dfrac12 \\right) $.")
    '(1,\\\\frac12)'
    """
    text = _DECORATION.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1", text)
    return text.replace("\\%", "%").rstrip(".")


def _number(text: str) -> Decimal | None:
    """The value of a plain decimal number, with or without thousands separators and a dollar sign; else None.

    >>> _number("$1,234.50"), _number("1,23"), _number("50%")
    (Decimal('1234.50'), None, None)
    """
    text = _plain(text.replace("\\$", ""))
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) and text.strip("+-.") else None


def _values(text: str) -> set[Decimal]:
    """The values a plain number may have; a percentage may lack its sign. Empty if ``text`` is not a number.

    >>> sorted(_values("50%")), _values("x")
    ([Decimal('0.5'), Decimal('50')], set())
    """
    number = _number(_plain(text).removesuffix("%"))
    if number is None:
        return set()
    return {number, number / 100} if _plain(text).endswith("%") else {number}


class Checker:
    """A child process that compares pairs of LaTeX expressions, one a line; safe to call from any thread."""

    def __init__(self, deadline_s: float = DEADLINE_S):
        self.deadline_s = deadline_s
        self.lock = threading.Lock()
        self.child: subprocess.Popen | None = None

    def equal(self, truth: str, answer: str) -> bool:
        """Whether math-verify finds them equal; False if it cannot tell within the limits."""
        with self.lock:
            try:
                if self.child is None or self.child.poll() is not None:
                    self._start()
                self.child.stdin.write(json.dumps([truth, answer, self.deadline_s]) + "\n")
                self.child.stdin.flush()
                return self._line(self.deadline_s) == "equal"
            except (BrokenPipeError, TimeoutError):
                self.close()
                return False

    def _start(self) -> None:
        self.child = subprocess.Popen(
            [sys.executable, __file__], text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if self._line(START_DEADLINE_S) != "ready":
            raise RuntimeError("math-verify does not start; install the version of requirements-cpu.txt")

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
    if _plain(truth) == _plain(answer):
        return True
    values = _values(truth), _values(answer)
    if all(values):
        return not values[0].isdisjoint(values[1])
    return _checker.equal(_PI.sub(r"\\pi ", truth), _PI.sub(r"\\pi ", answer))


def compute_score(data_source, solution_str: str, ground_truth, extra_info=None, **kwargs) -> dict:
    """verl's reward hook.

    Args:
        data_source: name of the data set; the same rules apply to all.
        solution_str: the decoded response.
        ground_truth: the correct answer, LaTeX or plain text, or a list of which any one is correct.

    Returns:
        score and acc, 0 or 1; answered, whether the response had an answer at all.
    """
    answer = extract_answer(solution_str)
    truths = [ground_truth] if isinstance(ground_truth, str | int | float) else list(ground_truth)
    right = float(answer is not None and any(is_equal(str(truth), answer) for truth in truths))
    return {"score": right, "acc": right, "answered": float(answer is not None)}


def serve() -> None:
    """Run as the child: answer each line [truth, answer, seconds] with a line, while there is a parent."""
    import logging
    import resource
    import signal

    from math_verify import parse, verify

    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print("ready", flush=True)
    for line in sys.stdin:
        truth, answer, seconds = json.loads(line)
        signal.alarm(int(seconds) + 2)  # ends this process if the parent is not there to do it
        try:
            sides = [parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer)]
            equal = all(sides) and verify(*sides, timeout_seconds=None)
        except Exception:  # any error of sympy or the parser on model output means "not equal"
            equal = False
        signal.alarm(0)
        print("equal" if equal else "different", flush=True)


if __name__ == "__main__":
    serve()
