"""How long an engine's decode steps take, to be compared with those of other engines.

A step's time depends on how many requests it computes, so steps are counted by that number's bucket (a power
of two), and engines are compared bucket by bucket (rollout/slow_ranks.py). Only steps that decode count:
nothing waits, and no request was added since the step before. Times are differences of what the engine stamps
on its outputs.

Cost: O(1) per engine step.
"""

from __future__ import annotations

from typing import Any

PREFIX = "rollout/engine_times/"
SUMS = ("steps", "seconds", "tokens")
LONGEST_S = 60.0  # between two steps: more is no step


class EngineTimes:
    """Of the engines of one server since the last `take`."""

    def __init__(self):
        self.before: dict[int, tuple[float, int]] = {}  # engine -> when its last step ended, running requests
        self.reset()

    def reset(self) -> None:
        self.sums: dict[tuple[int, int], list[float]] = {}  # (engine, bucket) -> steps, seconds, tokens

    def record(self, engine: int, outputs: Any) -> None:
        """One step: vLLM's EngineCoreOutputs with scheduler_stats."""
        stats, now = outputs.scheduler_stats, outputs.timestamp
        before, self.before[engine] = self.before.get(engine), (now, stats.num_running_reqs)
        computed = len(outputs.outputs)
        if before is None or stats.num_waiting_reqs or not 0 < computed <= before[1]:
            return
        if (seconds := now - before[0]) < LONGEST_S:
            tokens = sum(len(output.new_token_ids) for output in outputs.outputs)
            found = self.sums.setdefault((engine, computed.bit_length()), [0, 0.0, 0])
            for n, value in enumerate((1, seconds, tokens)):
                found[n] += value

    def take(self) -> dict[str, dict[int, list[float]]]:
        """engine -> bucket -> [steps, seconds, tokens]; then start again at zero."""
        taken: dict[int, dict[int, list[float]]] = {}
        for (engine, bucket), sums in self.sums.items():
            taken.setdefault(engine, {})[bucket] = sums
        self.reset()
        return taken
