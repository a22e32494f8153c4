"""A few responses of each step, to read: ``generations.jsonl`` beside verl's ``metrics.jsonl``
(docs/watching.md).

A line: ``step``, ``kinds`` (of KINDS), ``tokens`` of the response, ``score``, ``prompt``, ``response``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from ascend_rl.process.logs import add_record

FILE = "generations.jsonl"
KINDS = ("first", "longest", "best", "worst", "truncated")
KEPT = 2000  # characters at each end of a text


def pick(lengths: Sequence[int], scores: Sequence[float], limit: int) -> dict[int, list[str]]:
    """The rows of a step to keep, with what they are an example of.

    Args:
        lengths: [N] tokens of each response.
        scores: [N] reward of each; NaN counts as the lowest.
        limit: tokens at which a response is cut.

    Returns:
        row -> KINDS, in this order. Of the best the shortest, of the worst the longest, of those that are cut
        the first; "truncated" is missing if none is.
    """
    lengths, scores = np.asarray(lengths), np.nan_to_num(np.asarray(scores, dtype=float), nan=-np.inf)
    rows = [0, lengths.argmax(), np.lexsort((lengths, -scores))[0], np.lexsort((-lengths, scores))[0]]
    rows += np.flatnonzero(lengths >= limit)[:1].tolist()
    found: dict[int, list[str]] = {}
    for row, kind in zip(rows, KINDS, strict=False):
        found.setdefault(int(row), []).append(kind)
    return found


def shortened(text: str) -> str:
    left_out = len(text) - 2 * KEPT
    return text if left_out <= 0 else f"{text[:KEPT]}\n[... {left_out} characters ...]\n{text[-KEPT:]}"


def record(
    step: int,
    lengths: Sequence[int],
    scores: Sequence[float],
    limit: int,
    texts: Callable[[list[int]], Sequence[tuple[str, str]]],
) -> None:
    """Write those rows of a step, where verl's file logger writes its metrics; otherwise nothing.

    Args:
        lengths, scores, limit: see `pick`.
        texts: prompt and response of given rows.
    """
    if not os.environ.get("VERL_FILE_LOGGER_PATH") or not len(lengths):
        return
    rows = pick(lengths, scores, limit)
    for (row, kinds), (prompt, response) in zip(rows.items(), texts(list(rows)), strict=True):
        sample = {"step": step, "kinds": kinds, "tokens": int(lengths[row]), "score": float(scores[row])}
        sample |= {"prompt": shortened(prompt), "response": shortened(response)}
        add_record(FILE, sample)


def record_batch(step: int, batch: dict, limit: int, decode: Callable) -> None:
    """`record` of verl's padded batch.

    Args:
        batch: prompts [N, P], padded on the left, responses [N, R], attention_mask [N, P + R],
            token_level_scores [N, R].
        decode: token ids -> text.
    """
    prompts, responses = batch["prompts"], batch["responses"]
    asked, answered = batch["attention_mask"].bool().split((prompts.shape[1], responses.shape[1]), dim=1)

    def texts(rows: list[int]) -> list[tuple[str, str]]:
        return [(decode(prompts[row][asked[row]]), decode(responses[row][answered[row]])) for row in rows]

    scores = batch["token_level_scores"].sum(-1)
    record(step, answered.sum(-1).tolist(), scores.tolist(), limit, texts)
