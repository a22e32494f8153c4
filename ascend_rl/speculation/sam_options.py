"""Options of SAM decoding, ``additional_config.sam_decoding``, checked by the engine and the linter alike.

Apart from `sam_decoding`, whose import compiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ascend_rl.settings.switch import refuse
from ascend_rl.speculation.bs_threshold_for_spec_decode import step_time

NAME = "sam_decoding"
STEP_TIMES = {4: 15.0, 32: 19.0, 128: 23.0, 256: 32.0}
"""{tokens of a decode step: time}, in any unit, as only ratios matter: one MatMul of a step as published, us
(docs/spec_decode_logprobs.md). What a step takes besides makes drafts cheaper, so this underrates them."""
WORTH = 0.03
MAX_BYTES, LEAST_BYTES, BEYOND_BYTES = 1 << 30, 24 << 20, 4 << 30  # the table alone takes 16 MiB
HISTORY = 2
KNOWN = ("step_times", "worth", "max_bytes", "history")


def measured_steps(given: Any) -> dict[int, float]:
    """{tokens of a decode step: its time} from JSON, whose keys are strings; STEP_TIMES if there is none.

    Raises:
        ValueError: fewer than two sizes, or numbers that are no sizes and times.
    """
    try:
        steps = {int(tokens): float(time) for tokens, time in (given or STEP_TIMES).items()}
        if len(steps) < 2 or min(steps) < 1 or min(steps.values()) <= 0 or step_time(steps, 1) <= 0:
            raise ValueError
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{given!r} are not times of decode steps") from error
    return steps


def conflicts(given: Any) -> Iterator[tuple[str, str, str]]:
    """(key of additional_config, what is wrong, what to do) of these options.

    >>> next(conflicts({"history": -1}))[1]
    '-1 is not a number of responses'
    """
    if not isinstance(given, Mapping):
        yield NAME, f"{given!r} names no option", f"give some of {', '.join(KNOWN)}"
        return
    for name in given:
        if name not in KNOWN:
            yield f"{NAME}.{name}", "there is no such option", f"use {', '.join(KNOWN)}"
    try:
        measured_steps(given.get("step_times"))
    except ValueError as error:
        yield (
            f"{NAME}.step_times",
            str(error),
            'give measured times of decode steps by their number of tokens, two at least, such as {"4": 15, '
            '"256": 32}',
        )
    worth, most, history = (
        given.get(name, default)
        for name, default in (("worth", WORTH), ("max_bytes", MAX_BYTES), ("history", HISTORY))
    )
    if isinstance(worth, bool) or not isinstance(worth, int | float) or not 0 <= worth < 1:
        yield f"{NAME}.worth", f"{worth!r} are no odds", f"give 0 or more and less than 1, such as {WORTH}"
    if isinstance(most, bool) or not isinstance(most, int) or not LEAST_BYTES <= most < BEYOND_BYTES:
        fix = f"give an integer from {LEAST_BYTES} to {BEYOND_BYTES - 1}, such as {MAX_BYTES}"
        yield f"{NAME}.max_bytes", f"{most!r} is not a number of bytes that will do", fix
    if isinstance(history, bool) or not isinstance(history, int) or history < 0:
        fix = f"give how many responses of its last rollout a prompt is sent with, such as {HISTORY}; 0: none"
        yield f"{NAME}.history", f"{history!r} is not a number of responses", fix


def check(given: Any) -> None:
    """Refuse options that are incompatible.

    Raises:
        CannotWork: with all that is wrong with them.
    """
    refuse(f"additional_config.{NAME}", (f"{where}: {why}; {fix}" for where, why, fix in conflicts(given)))
