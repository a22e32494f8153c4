"""The rejection sampler against vllm-ascend 0.13's own: time per call, and how often it keeps a token.

Usage:    python bench/bench_rejection_sampler.py [--quick]
Both run in torch on this CPU (vllm-ascend's path without Triton; its Triton kernels need an NPU), one thread,
on the same inputs, alternating; medians. Qwen3's vocabulary. About a minute, most of it imports.
Bars: no case more than 10% slower; and the first draft token, of probability 0.5, is kept in half of the
cases regardless of what follows (vllm-ascend's sampler verifies whole blocks from 3 draft tokens on).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bars import bar, finish, parser_of

VOCABULARY = 151936
CASES = {  # requests, drafted tokens of each, temperature
    "greedy, 64 x 2": (64, 2, 0.0),
    "sampled, 64 x 2": (64, 2, 1.0),
    "sampled, 16 x 7": (16, 7, 1.0),
    "mixed, 64 x 2": (64, 2, None),
}


def measure(cases: dict, repeats: int) -> dict:
    """Runs in the NPU runner's process. By case: seconds of each call, vllm-ascend's and ours."""
    import time
    from types import SimpleNamespace

    import torch

    from ascend_rl.speculation.rejection_sampler import vllm_rejection_sample
    from vllm_ascend.sample.rejection_sampler import rejection_sample

    samplers = {"vllm-ascend": rejection_sample, "ours": vllm_rejection_sample}
    torch.manual_seed(0)

    def inputs(requests: int, drafted: int, temperature: float | None, probs: torch.Tensor) -> dict:
        temperatures = torch.full((requests,), temperature if temperature is not None else 1.0)
        if temperature is None:
            temperatures[::2] = 0.0
        return {
            "draft_token_ids": probs.argmax(-1).to(torch.int32),
            "num_draft_tokens": [drafted] * requests,
            "max_spec_len": drafted,
            "cu_num_draft_tokens": torch.arange(1, requests + 1, dtype=torch.int32) * drafted,
            "draft_probs": None,
            "target_probs": probs,
            "bonus_token_ids": torch.zeros(requests, 1, dtype=torch.int32),
            "sampling_metadata": SimpleNamespace(
                all_greedy=temperature == 0,
                all_random=temperature == 1,
                temperature=temperatures,
                generators={},
            ),  # fmt: skip
        }

    seconds = {}
    for name, (requests, drafted, temperature) in cases.items():
        probs = (3 * torch.randn(requests * drafted, VOCABULARY)).softmax(-1)
        given, times = inputs(requests, drafted, temperature, probs), {sampler: [] for sampler in samplers}
        for repeat in range(repeats + 1):
            for sampler, sample in samplers.items():
                begin = time.perf_counter()
                sample(**given)
                if repeat:  # the first one warms up
                    times[sampler].append(time.perf_counter() - begin)
        seconds[name] = times
    probs = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]).repeat(20000, 1)
    given = inputs(20000, 3, 1.0, probs)
    kept = {name: (sample(**given)[:, 1] >= 0).float().mean().item() for name, sample in samplers.items()}
    return {"seconds": seconds, "kept": kept}


def main() -> int:
    parser = parser_of(__doc__, "fewer repetitions")
    args = parser.parse_args()
    os.environ |= {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}

    from statistics import median

    from bench_rejection_sampler import measure
    from npu_ground import Ground

    with Ground() as ground:
        result = ground.run(measure, CASES, 3 if args.quick else 9, seconds=900)
    bars = []
    print(f"{'requests x drafted':20} {'vllm-ascend ms':>15} {'ours ms':>9} {'speed-up':>9}")
    for name, times in result["seconds"].items():
        theirs, ours = (1e3 * median(times[sampler]) for sampler in ("vllm-ascend", "ours"))
        print(f"{name:20} {theirs:15.2f} {ours:9.2f} {theirs / ours:8.2f}x")
        bars.append(bar(f"speed-up, {name}", theirs / ours, "x", ">= 0.9"))
    theirs, ours = (result["kept"][sampler] for sampler in ("vllm-ascend", "ours"))
    print(f"a token of probability 0.5 before two certain ones is kept: theirs {theirs:.3f}, ours {ours:.3f}")
    bars.append(("kept, of probability 0.5", ours, "", "0.5 +- 0.015", abs(ours - 0.5) < 0.015))
    return finish("rejection_sampler", bars, **result)


if __name__ == "__main__":
    sys.exit(main())
