"""Suffix-automaton drafts in vLLM's CPU engine: steps and tokens/s, against n-grams and no speculation.

Usage:    python bench/bench_sam_engine.py [--quick]
Example:  python bench/bench_sam_engine.py          # about 5 minutes on 2 idle cores
Repetitive text: a 2-layer Qwen3 learns 8 pieces of Python's standard library by heart and writes each one
8 times (--quick: 2) at temperature 0.7. The samples of a prompt run one after another, as when more requests
wait than run: samples that run at the same time cannot help each other.
Non-repetitive text: random weights of a larger model, whose step takes some 20 ms, at a high temperature,
with a large vocabulary, and with 12 tokens, where short matches are everywhere and mean nothing.
The engines alternate in one process; each round starts with an empty automaton. Seconds are CPU seconds of
the process, which runs on one thread, so that other load matters less. The best round counts.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from pathlib import Path

from bars import bar, environment_of, finish, parser_of

DRAFT_TOKENS = 8
METHODS = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": DRAFT_TOKENS, "prompt_lookup_min": 2,
              "prompt_lookup_max": 5},
    "sam": {"method": "sam", "num_speculative_tokens": DRAFT_TOKENS},
}  # fmt: skip
PIECES, PIECE_TOKENS, PROMPT_TOKENS, SAMPLES, BATCH = 8, 200, 20, 8, 8
TRAINING_STEPS = 300
TINY = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
SMALL = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12,
         "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
SOURCES = ("argparse", "json.decoder", "heapq", "textwrap")


def corpus() -> tuple[list[list[int]], int]:
    """Pieces of code split into words, spaces and symbols: the token ids of each, and the vocabulary size."""
    import importlib

    ids: dict[str, int] = {}
    pieces = []
    for name in SOURCES:
        source = Path(importlib.import_module(name).__file__).read_text()
        words = re.findall(r"\w+|\s+|[^\w\s]", source)
        tokens = [ids.setdefault(word, len(ids) + 1) for word in words[: 2 * PIECE_TOKENS]]
        pieces += [tokens[:PIECE_TOKENS], tokens[PIECE_TOKENS:]]
    assert len(pieces) == PIECES
    return pieces, len(ids) + 1


def make_model(path: Path, vocabulary: int, pieces: list[list[int]] = ()) -> float:
    """Make a tiny Qwen3 that knows ``pieces`` by heart, or a larger random one. Returns the training loss."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=0,
            **(TINY if pieces else SMALL),
        )  # fmt: skip
    )
    loss = torch.tensor(0.0)
    if pieces:
        batch = torch.tensor(pieces)
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        for step in range(TRAINING_STEPS):
            loss = model(batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.param_groups[0]["lr"] = 4e-3 * min(1, 2 * (1 - step / TRAINING_STEPS))
            optimizer.step()
    model.save_pretrained(path)
    return loss.item()


def make_engine(path: Path, speculative_config: dict | None):
    from spec_engines import Engine

    return Engine(
        path, max_model_len=512, max_num_seqs=BATCH, num_gpu_blocks_override=64,
        speculative_config=speculative_config,
    )  # fmt: skip


def run(engine, prompts: list[list[int]], **sampling) -> dict:
    """Tokens, seconds and counts of one round that starts with an empty automaton and prefix cache."""
    from ascend_rl.speculation.sam_decoding import SamProposer
    from vllm import SamplingParams

    runner = engine.core.model_executor.driver_worker.worker.model_runner
    if isinstance(getattr(runner, "drafter", None), SamProposer):
        runner.drafter = SamProposer(DRAFT_TOKENS, runner.max_model_len)
    engine.llm.reset_prefix_cache()
    cpu, wall = time.process_time(), time.perf_counter()
    completions = engine.run(
        prompts, SamplingParams(ignore_eos=True, detokenize=False, logprobs=0, **sampling)
    )
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    tokens = sum(len(completion.token_ids) for completion in completions)
    return {"tokens": tokens, "cpu_s": cpu, "wall_s": wall, **engine.counts}


def compare(path: Path, prompts: list[list[int]], rounds: int, **sampling) -> dict[str, dict]:
    """The best of ``rounds`` alternating rounds of each method, on the same requests in the same order."""
    engines = {name: make_engine(path, config) for name, config in METHODS.items()}
    for engine in engines.values():
        run(engine, prompts[:2], **sampling | {"max_tokens": 40})  # compiles
    best: dict[str, dict] = {}
    for i in range(rounds):
        order = list(engines.items())
        for name, engine in order[i % 3 :] + order[: i % 3]:
            result = run(engine, prompts, **sampling)
            if name not in best or result["cpu_s"] < best[name]["cpu_s"]:
                best[name] = result
    return best


def show(text: str, methods: dict[str, dict]) -> None:
    """Add the speeds, in tokens per second, and print the results for one text."""
    for name, r in methods.items():
        r["speed"] = r["tokens"] / r["cpu_s"]
        r["wall_speed"] = r["tokens"] / r["wall_s"]
        print(f"{text:<18} {name:<6} {r['tokens']:>7} {r['steps']:>6} {r.get('drafted', 0):>8} "
              f"{r.get('accepted', 0):>8} {r['speed']:>12.0f} {r['wall_speed']:>9.0f}",
              flush=True)  # fmt: skip


def measure(quick: bool = False) -> tuple[list, dict]:
    """The bars and the data of all three texts."""
    import numpy as np

    rounds, samples = (1, 2) if quick else (5, SAMPLES)
    rng = np.random.default_rng(0)
    results, losses = {}, {}
    print(f"{'text':<18} {'method':<6} {'tokens':>7} {'steps':>6} {'drafted':>8} {'accepted':>8} "
          f"{'tokens/CPU s':>12} {'tokens/s':>9}")  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        pieces, vocabulary = corpus()
        losses["repetitive"] = make_model(path / "code", vocabulary, pieces)
        results["repetitive"] = compare(
            path / "code", [piece[:PROMPT_TOKENS] for piece in pieces] * samples, rounds,
            temperature=0.7, max_tokens=PIECE_TOKENS - PROMPT_TOKENS,
        )  # fmt: skip
        show("repetitive", results["repetitive"])
        for name, size in [("random", 4096), ("random, 12 tokens", 12)][: 0 if quick else 2]:
            make_model(path / name, size)
            prompts = rng.integers(1, size, (BATCH, PROMPT_TOKENS)).tolist()
            results[name] = compare(path / name, prompts, rounds, temperature=2.0,
                                    max_tokens=400)  # fmt: skip
            show(name, results[name])
    none, ngram, sam = (results["repetitive"][name] for name in METHODS)
    bars = []
    for name, peer in (("no speculation", none), ("ngram", ngram)):
        ratio = peer["steps"] / sam["steps"]
        bars.append(bar(f"engine: fewer steps than {name}", ratio, "x", "> 1"))
        ratio = sam["speed"] / peer["speed"]
        bars.append(bar(f"engine: faster than {name}", ratio, "x", "> 1"))
    for text in list(results)[1:]:
        slower = 100 * (1 - results[text]["sam"]["speed"] / results[text]["none"]["speed"])
        bars.append(bar(f"engine: slower on {text}", slower, "%", "<= 3"))
    return bars, {"engine": results, "engine_loss": losses}


def main() -> int:
    parser = parser_of(__doc__, "the repetitive text, fewer samples, one round")
    arguments = parser.parse_args()
    cpu_environment()
    bars, data = measure(arguments.quick)
    return finish("sam_engine", bars, **data)


def cpu_environment() -> None:
    """Set the variables of internal/cpu_env.sh, engine in this process; call before importing vllm."""
    os.environ |= environment_of("cpu_env.sh")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # vLLM's n-grams would bring more threads to all operators of the process.
    os.environ["NUMBA_NUM_THREADS"] = "1"


if __name__ == "__main__":
    sys.exit(main())
