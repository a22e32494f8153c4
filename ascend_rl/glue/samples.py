"""What the rollout managers of both stacks ask about samples and their agent loops."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import hydra
import numpy as np

from ascend_rl.process.counts import count
from ascend_rl.rollout.data_rebalance import Placement, place, predict
from ascend_rl.rollout.prompt_memory import PromptMemory, Text, fitting
from ascend_rl.speculation import sam_history
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


@functools.cache
def keeps_no_state(target: str) -> bool:
    """Whether one instance of an agent loop serves all requests: verl's, or one with ``stateless = True``.

    A subclass does not inherit the declaration.
    """
    found = hydra.utils.get_object(target)
    return found is SingleTurnAgentLoop or bool(getattr(found, "__dict__", {}).get("stateless"))


def known_of(
    memory: PromptMemory, keys: Sequence[str], servers: int
) -> tuple[list[list[Text]] | None, Placement | None, dict[str, float]]:
    """What a rollout's samples bring along.

    Args:
        keys: [N] prompt of each sample.
        servers: to place them on; 0: they are not placed.

    Returns:
        earlier texts of each sample, where texts are kept; the placement; metrics of what was known.
    """
    texts, placement, metrics = None, None, {}
    if memory.keep:
        limit = sam_history.SENT_BYTES / len(keys)
        fit = {key: fitting(memory.texts.get(key, []), limit) for key in keys}
        texts = [fit[key] for key in keys]
        metrics[f"{sam_history.KEY}/known_share"] = sum(map(bool, texts)) / len(keys)
    if servers:
        predicted = predict(keys, memory.lengths)
        placement = place(keys, servers, predicted)
        known = ~np.isnan(predicted)
        neighbours = np.repeat(np.arange(len(placement.sizes)), placement.sizes)  # verl's order
        count("data_rebalance", int((placement.rank != neighbours).sum()))
        count("known_lengths", int(known.sum()))
        metrics["data_rebalance/known_share"] = float(known.mean())
    return texts, placement, metrics
