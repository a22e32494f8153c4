"""Sends each sample of a rollout to the server where data_rebalance places it: the glue to verl.

`attach` wraps the trainer's ``generate_sequences``. The batch goes out in the order of the placement, each
sample with its server in ``non_tensor_batch[KEY]``; the agent loop of a sample puts that into ``server``,
which the load balancer asks; the output returns in the order in which the batch came. Prompts are recognised
by a hash of their messages, since verl's ``uid`` is new in every step. What is known of them is part of a
checkpoint (`save`, `load`): a run that goes on places its samples as it would have.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Hashable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from ascend_rl.process.counts import count
from ascend_rl.rollout.data_rebalance import Placement, place, predict

# The server of the sample whose agent loop runs in this task of asyncio; None: the least loaded.
server: ContextVar[str | None] = ContextVar("server", default=None)
KEY = "rollout_server"  # of a sample, in a DataProto's non_tensor_batch
LENGTHS = "response_lengths.json"  # of a checkpoint: {hash of a prompt: tokens of its last responses}


class Placer:
    """Places rollout after rollout, and remembers how long the responses to a prompt were.

    Args:
        servers: ids of the servers, which are alike.
    """

    def __init__(self, servers: Sequence[str]):
        self.servers = np.array(servers, dtype=object)
        self.earlier: dict[Hashable, list[float]] = {}

    def place(self, prompts: Sequence[Hashable]) -> tuple[Placement, float]:
        """Where the samples of these prompts go, and the share of them whose prompt's lengths are known."""
        predicted = predict(prompts, self.earlier)
        return place(prompts, len(self.servers), predicted), float(np.mean(~np.isnan(predicted)))

    def learn(self, prompts: Sequence[Hashable], lengths: Sequence[float]) -> None:
        """Keep the lengths of this rollout, in place of older ones of the same prompts."""
        now: defaultdict[Hashable, list[float]] = defaultdict(list)
        for prompt, tokens in zip(prompts, lengths, strict=True):
            now[prompt].append(float(tokens))
        self.earlier |= now


def attach(manager: Any) -> None:
    """With ``rollout.data_rebalance``, let an AgentLoopManager's rollouts go where the samples are placed.

    ``generate_sequences`` then sends each sample to its server, longest first, and returns the samples in the
    order in which they came, whatever they are for: training, validation or a baseline.
    """
    if not manager.rollout_config.get("data_rebalance"):
        return
    placer, generate = Placer(manager.server_addresses), manager.generate_sequences
    manager.placer = placer

    def generate_sequences(prompts):
        messages = prompts.non_tensor_batch["raw_prompt"]
        keys = [hashlib.blake2b(str(prompt).encode(), digest_size=16).hexdigest() for prompt in messages]
        placement, known_share = placer.place(keys)
        neighbours = np.repeat(np.arange(len(placement.sizes)), placement.sizes)  # verl's order
        count("data_rebalance", int((placement.rank != neighbours).sum()))
        count("known_lengths", round(known_share * len(keys)))
        sent = prompts.select_idxs(placement.order)
        sent.non_tensor_batch[KEY] = placer.servers[placement.rank[placement.order]]
        output = generate(sent).select_idxs(placement.inverse)
        output.non_tensor_batch.pop(KEY, None)
        width = output.batch["responses"].shape[1]
        placer.learn(keys, output.batch["attention_mask"][:, -width:].sum(1).tolist())
        output.meta_info["timing"]["data_rebalance/known_share"] = known_share
        return output

    manager.generate_sequences = generate_sequences


def save(manager: Any, checkpoint: str) -> None:
    """Put into a checkpoint what an AgentLoopManager knows of response lengths."""
    if placer := getattr(manager, "placer", None):
        Path(checkpoint, LENGTHS).write_text(json.dumps(placer.earlier))


def load(manager: Any, checkpoint: str) -> None:
    """Take that from a checkpoint; one of a run without data_rebalance has nothing."""
    path = Path(checkpoint, LENGTHS)
    if (placer := getattr(manager, "placer", None)) and path.exists():
        placer.earlier = json.loads(path.read_text())
