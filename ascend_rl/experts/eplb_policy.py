"""`eplb.rebalance_table` as a policy of vllm-ascend, and what its worker process sends when it fails.

Problem: a policy runs in a process of its own, and each rank waits for its answer. vllm-ascend logs a failure
of this process and ends it; the ranks then wait forever.
Idea: the worker sends the traceback in place of the plan, and whoever waits also looks whether it is alive. A
placement is of use, not needed: if the worker of any rank has failed, no rank carries out its plan.
Invariants (tests/test_eplb_policy.py, tests/patched/test_eplb_policy.py, tests/patched/test_npu_eplb.py): a
plan is returned as it was sent; all ranks have a plan, or none has.
Cost: one all-reduce of a number for a plan.
"""

from __future__ import annotations

import queue
import sys
import traceback
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ascend_rl.experts.eplb import rebalance_table
from ascend_rl.process.counts import count


class VllmAscendPolicy:
    """Type 4 of ``additional_config.eplb_policy_type``. The constructor compiles, in the worker's parent."""

    def __init__(self, config: Any):
        self.config = config
        table = np.array([[[0, 1], [1, 2]]])
        rebalance_table(table, table)

    def rebalance_experts(self, current_expert_table: Any, expert_workload: Any):
        return rebalance_table(np.asarray(current_expert_table), np.asarray(expert_workload))


class Failure(str):
    """The traceback of a worker that has failed."""


def failure() -> Failure:
    """In an except clause: what the worker sends in place of a result."""
    return Failure(traceback.format_exc())


def answer(results: Any, worker: Any, poll_s: float = 1.0) -> Any:
    """What the worker puts into the queue ``results``, whenever it does.

    Raises:
        RuntimeError: the worker has failed, or is gone without an answer.
    """
    while True:
        gone = not worker.is_alive()  # before looking: its last words may be on the way
        try:
            result = results.get(timeout=poll_s)
        except queue.Empty:
            if gone:
                raise RuntimeError(f"the EPLB worker is gone, exit code {worker.exitcode}") from None
            continue
        if isinstance(result, Failure):
            raise RuntimeError(f"the EPLB worker failed:\n{result}")
        return result


class Moves(list):
    """A plan: (experts sent, received, maps) of each layer, which vllm-ascend pops as it moves."""

    def pop(self, index=-1):
        move = super().pop(index)
        count("eplb", len(move[1]))
        return move


def own_plan(results: Any, worker: Any) -> Any:
    """What this rank's worker has planned; None if it has failed, whose reason is printed."""
    try:
        return Moves(answer(results, worker))
    except RuntimeError as error:
        print(f"EPLB: experts stay where they are, until the end: {error}", file=sys.stderr, flush=True)
        return None


def plan_of_all(plan: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """This rank's plan; None on all ranks if the worker of any has failed. Called by all ranks.

    Plans are parts of one move, with sends and receives, so that none may be carried out alone; and a worker
    whose plan was not carried out knows the wrong placement. Call it after a step's last collective: ranks
    without requests (DP) take their plans there, and a rank that waited before its own would wait forever.

    Args:
        group: EPLB's own (patch eplb_group), of all ranks; None: the world.
    """
    failed = torch.tensor([plan is None], dtype=torch.int32, device=device)
    dist.all_reduce(failed, group=group)
    return None if failed.item() else plan
