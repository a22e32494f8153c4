"""Expert balancing against the policies of vLLM and vllm-ascend, run in this process from the pinned trees.

Usage:    python bench/bench_eplb.py [--quick] [--layers 94]
Example:  python bench/bench_eplb.py            # about 10 minutes; --quick: 8 layers, one minute
1. The published example: 8 experts on 8 devices with 2 slots.
2. Balance and time: uniform, Zipf, few-hot and recorded loads, all rank counts, all redundancies that fill
   the ranks evenly. Peers start from experts in order; a placement that lacks an expert, or an exception, is
   a failure. Cases a peer refuses are skipped for it (DynamicEplb, V2: over one redundant expert per rank).
3. Drifting loads: each peer continues from its own placement. At each step ours starts from the same one and
   stops as soon as no layer is worse than the peer's; the numbers of copies are compared.
4. What runs in vllm-ascend: the policy, behind its gate, on rounds of tokens drawn from a popularity that
   stays the same (experts copied) and then shifts once (peak over average before and after).
Loads are seeded. The recorded ones are counted in the tiny Qwen3-MoE of data/tiny_moe, on its own prompts.
Time is CPU time of one thread. Compilation (numba keeps it on disk) is excluded for all.
"""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import time
import types
from collections.abc import Callable

import numpy as np
import torch
from bars import ROOT, bar, canvas, finish, parser_of, save

from ascend_rl.experts.eplb import balance, copied, lower_bound, rank_loads, replica_counts
from ascend_rl.experts.eplb_policy import VllmAscendPolicy

EXPERTS = 128
RANKS, REDUNDANT = (8, 32, 64, 128), (0, 16, 32, 64, 128)
PUBLISHED = np.array([[600.0, 560, 120, 120, 20, 10, 10, 10]])
OPTIMUM = 590 / 3
EXPERT_BYTES = 3 * 4096 * 1536 * 2  # Qwen3-235B-A22B, bf16
Policy = Callable[[np.ndarray, np.ndarray], np.ndarray]  # load, current placement -> new placement


def peers(layers: int) -> dict[str, Policy]:
    """The policies, called as in their own packages."""
    frameworks = ROOT / "frameworks"
    sys.path.insert(0, str(frameworks / "vllm"))
    for package, path in (
        ("peer_vllm", frameworks / "vllm/vllm/distributed/eplb/policy"),
        ("peer_ascend", frameworks / "vllm_ascend/vllm_ascend/eplb/core/policy"),
    ):
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(path)]
    default = importlib.import_module("peer_vllm.default").DefaultEplbPolicy
    config = importlib.import_module("peer_ascend.policy_abstract").DynamicConfig()
    config.buffer_expert_layer_num = layers  # FlashLB: all layers in one update, as the others

    def vllm_default(load, current):
        _, ranks, slots = current.shape
        maps = default.rebalance_experts(torch.from_numpy(load), ranks * slots, 1, 1, ranks)
        return maps[0].numpy().reshape(current.shape)

    def ascend(module: str, name: str) -> Policy:
        policy = getattr(importlib.import_module(f"peer_ascend.{module}"), name)

        def run(load, current):
            share = load / replica_counts(current, load.shape[1])
            slot_load = share[np.arange(len(load))[:, None, None], current]
            table, slot_load = torch.from_numpy(current.copy()), torch.from_numpy(slot_load)
            return np.array(policy(config).rebalance_experts(table, slot_load)[2])

        return run

    return {
        "vLLM Default": vllm_default,
        "Random": ascend("policy_random", "RandomLoadBalance"),
        "DynamicEplb": ascend("policy_dynamic_ep", "DynamicEplb"),
        "DynamicEplbV2": ascend("policy_dynamic_ep_v2", "DynamicEplbV2"),
        "FlashLB": ascend("policy_flashlb", "FlashLB"),
    }


def in_order(layers: int, experts: int, ranks: int, slots: int) -> np.ndarray:
    """Experts in order, then copies of the following ones."""
    first = np.arange(ranks) * experts // ranks
    return np.tile((first[:, None] + np.arange(slots)) % experts, (layers, 1, 1))


def make_loads(layers: int) -> dict[str, np.ndarray]:
    """[layers, experts] tokens."""
    random = np.random.default_rng(0)
    zipf = 1 / np.arange(1, EXPERTS + 1)
    zipf = np.array([random.permutation(zipf) for _ in range(layers)])
    few_hot = random.gamma(2, 1, (layers, EXPERTS))
    for row in few_hot:
        row[random.choice(EXPERTS, 4, replace=False)] *= random.uniform(10, 30, 4)
    loads = {
        "uniform": random.uniform(0, 1, (layers, EXPERTS)),
        "Zipf": zipf * random.uniform(0.8, 1.2, zipf.shape),
        "few-hot": few_hot,
    }
    return {name: np.rint(load / load.mean() * 8192) + 1 for name, load in loads.items()}


def drifting_loads(layers: int, steps: int) -> np.ndarray:
    """[steps, layers, experts] log-normal loads; each step a tenth of the variance is new."""
    random = np.random.default_rng(1)
    level, loads = random.standard_normal((layers, EXPERTS)), []
    for _ in range(steps):
        level = np.sqrt(0.9) * level + np.sqrt(0.1) * random.standard_normal(level.shape)
        loads.append(np.rint(8192 * np.exp(level - 0.5)) + 1)
    return np.array(loads)


def recorded_loads(windows: int = 16) -> np.ndarray:
    """[windows * layers, experts] tokens of each expert of the tiny Qwen3-MoE on its prompts and answers."""
    from transformers import AutoTokenizer, Qwen3MoeForCausalLM

    from ascend_rl.recipe.tiny import careful, encode, operand_pairs

    path = ROOT / "data/tiny_moe/model"
    if not path.exists():
        print("training the tiny Qwen3-MoE for data/tiny_moe, one or two minutes, once", flush=True)
        command = [sys.executable, "-m", "ascend_rl.tiny", "--out", str(path.parent), "--moe"]
        subprocess.run(command, cwd=ROOT, check=True)
    tokenizer, model = AutoTokenizer.from_pretrained(path), Qwen3MoeForCausalLM.from_pretrained(path)
    pairs, counts = operand_pairs(0)[0], []
    for window in range(windows):
        some = pairs[window * 256 : (window + 1) * 256]
        tokens, _ = encode(tokenizer, some, [careful(a, b) for a, b in some])
        with torch.no_grad():
            gates = model(input_ids=tokens, output_router_logits=True).router_logits
        for gate in gates:
            real = gate[tokens.flatten() != tokenizer.pad_token_id]
            counts.append(np.bincount(real.topk(2).indices.flatten(), minlength=gate.shape[1]))
    return np.array(counts, dtype=float)


def judge(load: np.ndarray, placement: np.ndarray) -> np.ndarray:
    """[layers] peak over average."""
    if (replica_counts(placement, load.shape[1]) == 0).any():
        raise ValueError("an expert is missing")
    loads = rank_loads(load, placement)
    return loads.max(1) / loads.mean(1)


def cases(loads: dict[str, np.ndarray]) -> list[tuple[str, np.ndarray, int, int]]:
    """name, load, ranks, slots"""
    found = []
    for name, load in loads.items():
        experts = load.shape[1]
        if experts == EXPERTS:
            sizes = [(r, experts + extra) for r in RANKS for extra in REDUNDANT]
        else:
            sizes = [(r, experts + extra) for r in (2, 4, 8) for extra in (0, 2, 4, 8)]
        found += [(name, load, r, copies // r) for r, copies in sizes if copies % r == 0]
    return found


def balance_table(loads: dict[str, np.ndarray], others: dict[str, Policy]) -> list[dict]:
    rows = []
    for name, load, ranks, slots in cases(loads):
        layers, experts = load.shape
        redundant = ranks * slots - experts
        start = in_order(layers, experts, ranks, slots)
        row = {"load": name, "ranks": ranks, "redundant": redundant, "slots": slots, "par": {}, "ms": {}}
        policies = {"ours": lambda load, current: balance(load, *current.shape[1:]), **others}
        for policy, run in policies.items():
            refuses = policy in ("DynamicEplb", "DynamicEplbV2") and redundant > ranks
            if refuses or (policy == "Random" and ranks < 4):
                continue
            if policy == "ours":
                run(load, start)  # compiled, or read from disk
            try:
                begun = time.thread_time()
                placement = run(load, start)
                row["ms"][policy] = (time.thread_time() - begun) * 1e3
                par = judge(load, placement)
                row["par"][policy] = (par.mean(), par.max())
            except (ValueError, IndexError, AssertionError, ZeroDivisionError) as error:
                row["par"][policy] = None
                row.setdefault("failed", {})[policy] = str(error)[:80]
            if policy == "ours":
                peak = rank_loads(load, placement).max(1)
                over = peak / lower_bound(load, ranks, slots) - 1
                row["over"] = (over.mean(), over.max(), float((over > 0.005).mean()))
        rows.append(row)
        cells = " ".join(
            f"{policy} " + ("failed" if pair is None else f"{pair[0]:.4f}/{pair[1]:.4f}")
            for policy, pair in row["par"].items()
        )
        print(
            f"{name:<9}{ranks:>4} x {slots:<3}+{redundant:<4} {row['ms']['ours']:6.1f} ms, over the bound "
            f"{row['over'][0]:.3%}/{row['over'][1]:.3%}  {cells}",
            flush=True,
        )
    return rows


def moves_table(layers: int, steps: int, others: dict[str, Policy]) -> list[dict]:
    """Copies made by each peer on drifting loads, and by ours for the same balance from the same start."""
    loads, rows = drifting_loads(layers, steps), []
    for ranks, redundant in ((32, 32), (64, 64), (128, 128)):
        slots = (EXPERTS + redundant) // ranks
        for policy, run in others.items():
            current = in_order(layers, EXPERTS, ranks, slots)
            theirs, ours, pars, our_pars = [], [], [], []
            for step, load in enumerate(loads):
                new = run(load, current)
                if step:  # the first placement is not an update
                    peak = rank_loads(load, new).max(1)
                    bound = lower_bound(load, ranks, slots)
                    mine = balance(load, ranks, slots, current=current, tolerance=peak / bound - 1)
                    theirs.append(copied(current, new).sum())
                    ours.append(copied(current, mine).sum())
                    pars.append(judge(load, new))
                    our_pars.append(judge(load, mine))
                current = new
            row = {
                "ranks": ranks, "redundant": redundant, "policy": policy,
                "theirs": float(np.mean(theirs)) / layers, "ours": float(np.mean(ours)) / layers,
                "their_par": (np.mean(pars), np.max(pars)), "our_par": (np.mean(our_pars), np.max(our_pars)),
                "worse_layers": float((np.array(our_pars) > np.array(pars) * (1 + 1e-9)).mean()),
            }  # fmt: skip
            rows.append(row)
            print(
                f"{ranks:>4} + {redundant:<4} {policy:<14} {row['theirs']:7.1f} copied a layer, "
                f"ours {row['ours']:6.1f}; PAR {row['their_par'][0]:.4f}/{row['their_par'][1]:.4f}, ours "
                f"{row['our_par'][0]:.4f}/{row['our_par'][1]:.4f}; layers worse {row['worse_layers']:.1%}",
                flush=True,
            )
    return rows


def rounds_table(layers: int, rounds: int) -> list[dict]:
    """The policy as vllm-ascend calls it; the popularity, by which peaks are judged, shifts half way."""
    random, policy, rows = np.random.default_rng(2), VllmAscendPolicy(None), []
    for ranks, slots in ((32, 5), (64, 3), (128, 2)):
        table = in_order(layers, EXPERTS, ranks, slots)
        row = {"ranks": ranks, "slots": slots, "moved": [], "still": [], "before": [], "after": []}
        for _ in range(2):
            load = random.permuted(np.tile(np.arange(1, EXPERTS + 1) ** -0.7, (layers, 1)), axis=1)
            load *= 8192 / load.mean()
            row["before"].append(judge(load, table).mean())
            fetched = []
            for _ in range(rounds // 2):
                share = random.poisson(load) / replica_counts(table, EXPERTS)
                slot_load = np.rint(share[np.arange(layers)[:, None, None], table])
                new = policy.rebalance_experts(table, slot_load)[2]
                fetched.append(copied(table, new).sum() / layers)
                table = new
            row["moved"].append(fetched[0])
            row["still"].append(np.mean(fetched[1:]))
            row["after"].append(judge(load, table).mean())
        rows.append(row)
        print(
            f"{ranks:>4} x {slots:<3} copied a layer: when popularity shifts {row['moved'][1]:6.1f}, in each "
            f"later round {max(row['still']):.2f}; PAR {row['before'][1]:.3f} -> {row['after'][1]:.3f}",
            flush=True,
        )
    return rows


def main() -> int:
    parser = parser_of(__doc__, "2 layers")
    parser.add_argument("--layers", type=int, default=94)
    args = parser.parse_args()
    layers = 2 if args.quick else args.layers
    torch.set_num_threads(1)
    logging.getLogger("vllm").setLevel(logging.WARNING)
    others = peers(layers)

    start = in_order(1, 8, 8, 2)
    example = {"ours": balance(PUBLISHED, 8, 2)}
    example |= {name: run(PUBLISHED, start) for name, run in others.items()}
    peaks = {name: float(rank_loads(PUBLISHED, place).max()) for name, place in example.items()}
    print("published example, fullest device:", ", ".join(f"{k} {v:.2f}" for k, v in peaks.items()), "\n")

    rows = balance_table(make_loads(layers) | {"recorded": recorded_loads()}, others)
    print("\ndrifting loads")
    moves = moves_table(layers, 3 if args.quick else 5, others)
    print("\nrounds of the policy")
    gated = rounds_table(layers, 8 if args.quick else 16)
    draw(rows)
    return finish(
        "eplb", judge_bars(peaks, rows, moves, gated, layers), quick=args.quick, layers=layers, example=peaks,
        rows=rows, moves=moves, rounds=gated, expert_bytes=EXPERT_BYTES,
    )  # fmt: skip


def draw(rows: list[dict]) -> None:
    """Mean peak over average of each policy, by ranks and slots, for loads with redundancy."""
    names = ["vLLM Default", "DynamicEplb", "DynamicEplbV2", "FlashLB", "ours"]
    figure, axes = canvas(1, 3, figsize=(11, 3.4), sharey=True)
    for axis, load in zip(axes, ("uniform", "Zipf", "few-hot"), strict=True):
        chosen = [row for row in rows if row["load"] == load and row["redundant"] and row["ranks"] >= 32]
        for nth, name in enumerate(names):
            heights = [100 * (row["par"][name][0] - 1) if row["par"].get(name) else 0 for row in chosen]
            places = np.arange(len(chosen)) + 0.16 * (nth - 2)
            axis.bar(places, heights, 0.16, label=name, color="black" if name == "ours" else f"C{nth}")
        ticks = [f"{row['ranks']} x {row['slots']}" for row in chosen]
        axis.set_xticks(range(len(chosen)), ticks, rotation=30)
        axis.set_title(f"{load}, 128 experts")
        axis.set_xlabel("ranks x slots")
    axes[0].set_ylabel("fullest rank over mean, %")
    axes[0].legend(fontsize=8)
    save(figure, "eplb")


def judge_bars(peaks, rows, moves, gated, layers) -> list:
    bars = [("published example: fullest device", peaks["ours"], "tokens", "= 196.67",
             abs(peaks["ours"] - OPTIMUM) < 1e-6)]  # fmt: skip
    for nth, what in enumerate(("mean", "worst")):
        margins = [
            (row["par"]["ours"][nth] / pair[nth] - 1, row)
            for row in rows for policy, pair in row["par"].items() if policy != "ours" and pair
        ]  # fmt: skip
        most = max(margin for margin, _ in margins)
        bars.append((f"{what} peak-to-average, ours over a peer's, of {len(margins)} comparisons the worst",
                     most * 100, "%", "<= 0", most < 1e-9))  # fmt: skip
    redundant = [row for row in rows if row["redundant"]]
    large = [row for row in redundant if row["load"] != "recorded"]
    for what, chosen in {
        "128 experts, 4 or more slots per rank": [row for row in large if row["slots"] >= 4],
        "128 experts, 3 slots": [row for row in large if row["slots"] == 3],
        "128 experts, 2 slots": [row for row in large if row["slots"] == 2],
        "8 experts, recorded": [row for row in redundant if row["load"] == "recorded"],
    }.items():
        mean, share = (np.mean([row["over"][nth] for row in chosen]) for nth in (0, 2))
        worst = max(row["over"][1] for row in chosen)
        what = f"{what}: over the bound, worst layer (mean {mean:.2%}, {share:.0%} above 0.5%)"
        bars.append(bar(what, worst * 100, "%", "<= 0.5"))
    slowest = max(row["ms"]["ours"] for row in rows)
    bars.append(bar(f"slowest case, {layers} layers, one thread", slowest, "ms", "< 100"))
    for row in moves:
        share = row["ours"] / row["theirs"] if row["theirs"] else 0.0
        ok = share <= 0.5 and row["our_par"][0] <= row["their_par"][0] * (1 + 1e-9)
        what = f"drift, {row['ranks']} ranks: bytes against {row['policy']}, no worse balance"
        bars.append((what, share, "", "<= 0.5", ok))
    for row in gated:
        where, still = f"{row['ranks']} x {row['slots']}", max(row["still"])
        what = f"rounds, {where}: experts copied a layer and round while popularity stays the same"
        bars.append(bar(what, still, "", "<= 0.1"))
        what = (
            f"rounds, {where}: peak over average after a shift ({row['before'][1]:.2f} before the policy ran)"
        )
        bars.append(bar(what, row["after"][1], "", "<= 1.05"))
    return bars


if __name__ == "__main__":
    sys.exit(main())
