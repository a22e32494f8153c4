"""Marks for the profiler, which is not here."""

from __future__ import annotations


def mark(*args, **kwargs) -> None:
    pass


range_end = mark


def range_start(*args, **kwargs) -> int:
    return 0


class mstx:
    mark, range_start, range_end = map(staticmethod, (mark, range_start, range_end))
