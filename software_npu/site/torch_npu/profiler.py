"""torch_npu.profiler: a profile of nothing."""

from __future__ import annotations

import contextlib
import enum
import sys
import types


class ProfilerActivity(enum.Enum):
    CPU, NPU = range(2)


class ProfilerLevel(enum.Enum):
    Level_none, Level0, Level1, Level2 = range(4)


class AiCMetrics(enum.Enum):
    PipeUtilization, ArithmeticUtilization, AiCoreNone = range(3)


class ExportType(enum.Enum):
    Text, Db = range(2)


def _ExperimentalConfig(**settings):
    return types.SimpleNamespace(**settings)


def schedule(**settings):
    return lambda step: None


def tensorboard_trace_handler(*args, **kwargs):
    return lambda profiler: None


class profile(contextlib.AbstractContextManager):
    def __init__(self, *args, **kwargs):
        pass

    def __exit__(self, *error) -> None:
        pass

    def step(self) -> None:
        pass

    start = stop = step


dynamic_profile = types.ModuleType(f"{__name__}.dynamic_profile")
dynamic_profile.init = dynamic_profile.step = lambda *args, **kwargs: None
sys.modules[dynamic_profile.__name__] = dynamic_profile
