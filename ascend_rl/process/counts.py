"""Counts of what features did, for the report of a rehearsal (docs/rehearsal.md).

A feature that is switched on may still do nothing. `count` is called where it does something, and adds a line
to the file that ASCEND_RL_COUNTS names; without the variable it does nothing. Processes of a run share the
file: a line is one short write at the end of it, so that nothing is lost when a process is killed.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

VARIABLE = "ASCEND_RL_COUNTS"
# name: (what is counted, over all processes; the switch).
COUNTED = {
    "data_rebalance": ("samples on another server than in verl's order", "rollout.data_rebalance=True"),
    "known_lengths": ("samples placed by lengths of earlier responses", "rollout.data_rebalance=True"),
    "rollout_rebalance": ("requests moved between engines", "ROLLOUT_REBALANCE_ENABLE=1"),
    "length_scheduler": ("requests that an engine admitted out of turn or later", "LENGTH_SCHEDULER=1"),
    "scheduled_lengths": ("requests that came with lengths of earlier responses", "LENGTH_SCHEDULER=1"),
    "sam_drafted": ("tokens drafted by SAM, padding included", "ENABLE_SAM=1"),
    "sam_accepted": ("of these, tokens that were emitted", "ENABLE_SAM=1"),
    "sam_history": ("tokens of earlier responses taken in to draft from", "sam_decoding.history"),
    "draft_gate": ("steps too large for drafts", "VLLM_SPECULATIVE_BATCH_SIZE_THRE"),
    "eplb": ("experts received from other dies", "VLLM_ENABLE_EPLB=1"),
    "chunked_moe": ("chunks of MoE layers", "VLLM_FUSED_MOE_CHUNK_SIZE"),
    "router_replay": ("routes, of a token in an MoE layer, that were replayed", "ROUTER_REPLAY"),
    "other_routes": ("of the rollout's, where the trainer's router chose other experts", "ROUTER_REPLAY=R3"),
    "other_routes_in_updates": ("of those replayed in updates, where it chose others", "ROUTER_REPLAY"),
    "moe_alltoallv": ("tensors of experts sent by AllToAllV", "ALL_TO_ALL_RESHARD=1"),
    "hdp_rings": ("micro-batches of a rank in rings of several", "USE_HDP=1"),
    "hdp_alone": ("micro-batches of a rank alone", "USE_HDP=1"),
    "gc_between": ("garbage collections between steps", "ROLLOUT_DISABLE_GC=1"),
    "gc_within": ("garbage collections within steps", "ROLLOUT_DISABLE_GC=0"),
    "async": ("responses that ended while the trainer computed", "trainer_mode=separate_async"),
    "scheduled_ahead": ("steps scheduled while the one before ran", "async_scheduling=True"),
}


def count(name: str, times: int = 1) -> None:
    """Note that a feature did something ``times`` times.

    Raises:
        KeyError: ``name`` is not in COUNTED; while counts are recorded only.
    """
    file = os.environ.get(VARIABLE)
    if file and times:
        COUNTED[name]
        with open(file, "ab", buffering=0) as lines:
            lines.write(f"{name} {times}\n".encode())


def counted(file: Path) -> dict[str, int]:
    """What `count` wrote into ``file``, by name in the order of COUNTED; 0 for what never happened."""
    totals: Counter[str] = Counter()
    for line in file.read_text().splitlines() if file.exists() else ():
        name, times = line.split()
        totals[name] += int(times)
    return {name: totals[name] for name in COUNTED}
