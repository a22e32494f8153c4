"""How long a rollout takes, from the shapes of the model, the layout and the lengths of the responses.

A decode step of a server with requests of S tokens in all, in the graph of g rows, on TP dies:

    layers * LAYER_S                                              launches and collectives, whatever the batch
    + weights / (HBM * STREAM)                                    read once
    + g * (FLOPs / PEAK + exchanged bytes / LINK) / ROW           matrix products, exchange with experts
    + S * KV bytes / (HBM * ATTENTION)                            attention; with ``padded`` g * the longest

Servers that share experts step together: all take as long as the fullest. Requests wait in a queue as in
vLLM, for a place or for KV cache, and outside of the server if it admits fewer.

The model sees numbers only, never a name. Which published figures fixed its constants, and which are
predicted: docs/step_time.md, tests/test_step_time.py. Invariants: every response is decoded to its end;
no server holds more requests than its places. Cost: one numpy pass for every STRIDE tokens, about 0.2 s for
8192 requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ascend_rl.estimate.rollout_memory import kv_bytes_per_token, rollout_parameters
from ascend_rl.estimate.tensors import WEIGHT_BYTES, layer_parameters
from ascend_rl.settings.model import Model

# A die of Atlas A3. Published for Ascend 910C, which has two: 752 TFLOPS of bf16, 3.2 TB/s of HBM, 392 GB/s
# of links in one direction.
PEAK_FLOPS, HBM_BYTES_S, LINK_BYTES_S = 376e12, 1.6e12, 196e9

# Fixed by published figures, see docs/step_time.md.
STREAM = 0.8  # share of HBM's speed at which weights are read; assumed
MOE_LAYER_S = 0.0006  # DeepSeek-V3: a step of one row takes 54 ms
DENSE_LAYER_S = MOE_LAYER_S / 2  # without the two exchanges with experts, of four collectives; assumed
ROW = 0.65  # share of peak and link in decode: DeepSeek-V3's steps of 1 to 64 rows
ATTENTION = 0.18  # share of HBM's speed of attention whose cores are not balanced: two placements
BALANCED_ATTENTION = 0.27  # the same, balanced: 4919 to 4153 s
GC_OFF = 0.957  # share of layer_s that remains: 137.64 to 135.19 ms
GC_OFF_BOUND = 0.77  # the same with core binding: 137.64 to 124.66 ms
NPUGRAPH_EX = 0.3  # the same of a dense model: 2106 to 1621 s
PREFILL_S = 0.0002  # a token, on a server of four dies; assumed, as in bench/sim_rollout.py
STRIDE = 32  # tokens decoded between two looks at the queues


@dataclass(frozen=True)
class Decoder:
    """What a model costs on one die of a rollout.

    ``row_flops``, ``row_bytes``: of one token; experts that are spread over dies take it from every die of
    its server. ``kv_bytes``: of one token. ``padded``: attention reads padded rows too, each as the longest.
    """

    layers: int
    layer_s: float
    weights_bytes: float
    kv_bytes: float
    row_flops: float
    row_bytes: float
    tp: int
    padded: bool = False

    @classmethod
    def of(cls, model: Model, tp: int, ep: int) -> Decoder:
        exchanged = 2 * WEIGHT_BYTES * model.layers * model.experts_per_token * model.hidden
        return cls(
            layers=model.layers,
            layer_s=MOE_LAYER_S if model.experts else DENSE_LAYER_S,
            weights_bytes=WEIGHT_BYTES * sum(rollout_parameters(model, tp, ep).values()),
            kv_bytes=kv_bytes_per_token(model, tp),
            row_flops=2 * active_parameters(model, tp, ep > 1),
            row_bytes=exchanged if ep > 1 else 0,
            tp=tp,
        )


def active_parameters(model: Model, tp: int = 1, whole_experts: bool = False) -> float:
    """Parameters that a token meets on a die, without the embedding; 22e9 of Qwen3-235B-A22B at TP 1.

    >>> round(active_parameters(Model.named("qwen3-235b-a22b")) / 1e9, 1)
    21.6
    """
    layer = layer_parameters(model)
    experts = layer.pop("moe", 0) * model.experts_per_token / max(1, model.experts)
    rest = model.layers * sum(layer.values()) + model.vocabulary * model.hidden
    return rest / tp + model.layers * experts / (1 if whole_experts else tp)


@dataclass(frozen=True)
class Engines:
    """The servers of a rollout, and how requests come to them.

    Attributes:
        servers: DP ranks, each of TP dies.
        lockstep: they share experts, and so step together.
        gears: captured batch sizes; a larger batch runs as if it had a graph of its own size.
        admitted: requests in all servers of one front end at once; the others wait outside.
        placement: adjacent (equal parts in order), interleaved (samples of a prompt go to different servers),
            least (to the server with the fewest, when they are admitted).
        moves: running requests move to where all servers fit a smaller graph, and are prefilled again.
        attention: share of HBM's speed, ATTENTION or BALANCED_ATTENTION.
        latency: share of ``layer_s`` that remains, by tuning of the host or of the graphs.
        tokens_a_step, speculation_rows: with speculation, in batches up to so many rows; a step then has
            ``1 + drafted`` times the rows.
    """

    servers: int
    lockstep: bool
    gears: tuple[int, ...]
    max_num_seqs: int
    kv_tokens: int
    admitted: int = 1 << 60
    placement: str = "interleaved"
    moves: bool = False
    attention: float = ATTENTION
    latency: float = 1.0
    tokens_a_step: float = 1.0
    drafted: int = 0
    speculation_rows: int = 0


@dataclass(frozen=True)
class RolloutTime:
    """Seconds of the slowest server, and where they go; ``first_idle``: share of them that the first server
    to finish waits; ``gear_s``: seconds in each graph; ``tail_s``: with less than half of the requests left;
    ``dropped_tokens``: whose KV preemptions drop, on all servers, to be computed again.
    """

    seconds: float
    layers: float
    weights: float
    rows: float
    attention: float
    prefill: float
    steps: float
    first_idle: float
    tail_s: float
    dropped_tokens: float
    gear_s: dict[int, float]


def draw_lengths(
    prompts: int, samples: int, seed: int, longest: int, median: float, between: float, within: float
) -> np.ndarray:
    """[prompts, samples] int64, tokens of responses: log-normal, alike in a prompt, cut at ``longest``."""
    rng = np.random.default_rng(seed)
    logs = np.log(median) + between * rng.standard_normal((prompts, 1))
    logs = logs + within * rng.standard_normal((prompts, samples))
    return np.clip(np.rint(np.exp(logs)), 1, longest).astype(np.int64)


def _placed(shape: tuple[int, int], servers: int, placement: str) -> np.ndarray:
    """[N] server of each request, in the order of requests; -1: when it is admitted."""
    count = shape[0] * shape[1]
    part = np.arange(count) * servers // count
    if placement == "interleaved":  # all first samples, all second ones, .. in equal parts
        part = part.reshape(shape[1], shape[0]).T.reshape(-1)
    return np.full(count, -1) if placement == "least" else part


def rollout_time(lengths: np.ndarray, prompt: float, decoder: Decoder, engines: Engines) -> RolloutTime:
    """The rollout of ``lengths`` [prompts, samples] after prompts of ``prompt`` tokens on average.

    Raises:
        ValueError: there is room for no request.
    """
    server = _placed(lengths.shape, engines.servers, engines.placement)
    if engines.lockstep:
        return _together(lengths.reshape(-1), prompt, server, decoder, engines)
    if engines.placement == "least":  # by number, so about alternating
        server = np.arange(lengths.size) % engines.servers
    alone = replace(engines, servers=1, placement="adjacent")
    each = [
        _together(
            lengths.reshape(-1)[server == one], prompt, np.zeros((server == one).sum(), int), decoder, alone
        )
        for one in range(engines.servers)
    ]
    slowest = max(each, key=lambda one: one.seconds)
    idle = 1 - min(one.seconds for one in each) / slowest.seconds
    return replace(slowest, first_idle=idle, dropped_tokens=sum(one.dropped_tokens for one in each))


def _together(lengths, prompt, server, decoder: Decoder, engines: Engines) -> RolloutTime:
    servers, limit = engines.servers, engines.max_num_seqs
    gears = np.array(sorted(set(engines.gears) | {limit}))
    count = len(lengths)
    server, done = server.copy(), np.zeros(count)
    waiting = list(range(count))[::-1]  # outside, next last
    queues: list[list[int]] = [[] for _ in range(servers)]
    running = np.zeros(0, np.int64)  # oldest first
    held, last = np.zeros(servers, np.int64), np.zeros(servers)
    inside = 0
    parts = dict.fromkeys(("layers", "weights", "rows", "attention", "prefill"), 0.0)
    gear_s = dict.fromkeys(gears.tolist(), 0.0)
    steps = tail = clock = dropped = 0.0
    layer_s = decoder.layers * decoder.layer_s * engines.latency
    weights_s = decoder.weights_bytes / (HBM_BYTES_S * STREAM)
    row_s = (decoder.row_flops / PEAK_FLOPS + decoder.row_bytes / LINK_BYTES_S) / ROW
    token_s = decoder.kv_bytes / (HBM_BYTES_S * engines.attention)
    prefill_s = PREFILL_S * 4 / decoder.tp
    while waiting or inside:
        while waiting and inside < engines.admitted:
            request = waiting.pop()
            if server[request] < 0:
                server[request] = int(np.argmin(held))
            queues[server[request]].append(request)
            held[server[request]] += 1
            inside += 1
        active = np.bincount(server[running], minlength=servers)
        used = np.bincount(server[running], weights=prompt + done[running], minlength=servers)
        admitted: list[int] = []
        recomputed = np.zeros(servers)
        for one in np.flatnonzero(held > active):
            while (
                queues[one]
                and active[one] < limit
                and used[one] + prompt + done[queues[one][0]] + STRIDE * (active[one] + 1)
                <= engines.kv_tokens
            ):
                request = queues[one].pop(0)
                admitted.append(request)
                active[one] += 1
                used[one] += prompt + done[request]
                recomputed[one] += done[request] + prompt
        running = np.concatenate([running, np.array(admitted, np.int64)])
        if not len(running):
            raise ValueError(f"{engines.kv_tokens} tokens of KV cache do not hold a request")
        if engines.moves and not any(queues):
            _move(running, server, done, prompt, active, used, held, recomputed, gears)
        over = np.flatnonzero(used + STRIDE * active > engines.kv_tokens)
        for one in over:  # vLLM preempts the youngest
            youngest = running[np.flatnonzero(server[running] == one)[-1]]
            if active[one] == 1:
                raise ValueError(f"{engines.kv_tokens} tokens of KV cache do not hold a request")
            running = running[running != youngest]
            queues[one].insert(0, int(youngest))
            active[one] -= 1
            used[one] -= prompt + done[youngest]
            dropped += prompt + done[youngest]
        most = int(active.max())
        speculates = most <= engines.speculation_rows
        rows = most * (1 + engines.drafted * speculates)
        graph = int(gears[min(np.searchsorted(gears, rows), len(gears) - 1)])
        graph = max(graph, rows)
        emitted = engines.tokens_a_step if speculates else 1.0
        strides = STRIDE / emitted
        reads = (graph * (prompt + done[running].max()) if decoder.padded else used.max()) + most * STRIDE / 2
        parts["layers"] += strides * layer_s
        parts["weights"] += strides * weights_s
        parts["rows"] += strides * graph * row_s
        parts["attention"] += strides * reads * token_s
        parts["prefill"] += recomputed.max() * prefill_s
        before, clock = clock, sum(parts.values())
        gear_s[graph] = gear_s.get(graph, 0.0) + clock - before
        steps += strides
        tail += (clock - before) * (inside + len(waiting) < count / 2)
        done[running] += STRIDE
        ended = done[running] >= lengths[running] - STRIDE / 2
        if ended.any():
            gone = server[running[ended]]
            held -= np.bincount(gone, minlength=servers)
            last[gone] = clock
            inside -= int(ended.sum())
            running = running[~ended]
    return RolloutTime(
        clock,
        **parts,
        steps=steps,
        first_idle=1 - last.min() / clock,
        tail_s=tail,
        dropped_tokens=dropped,
        gear_s=gear_s,
    )


def _move(running, server, done, prompt, active, used, held, recomputed, gears) -> None:
    """Spread running requests so that all servers fit the smallest graph that holds them; changes the
    arrays. Servers above it give up their surplus, smallest requests first.
    """
    target = gears[np.searchsorted(gears, -(-len(running) // len(active)))]
    if target >= gears[min(np.searchsorted(gears, active.max()), len(gears) - 1)]:
        return
    for one in np.flatnonzero(active > target):
        mine = running[server[running] == one]
        for request in mine[np.argsort(done[mine], kind="stable")][: active[one] - target]:
            to = int(np.argmin(active))
            tokens = prompt + done[request]
            server[request] = to
            for counted, amount in ((active, 1), (held, 1), (used, tokens)):
                counted[one] -= amount
                counted[to] += amount
            recomputed[to] += tokens
