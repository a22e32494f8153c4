"""What a move of a running request costs by replay and with its KV, by the length of what it has so far.

Usage:    python bench/bench_moved_kv.py [--tokens 1024 4096 8192] [--repeats 3] [--quick]
Example:  python bench/bench_moved_kv.py          # 5 minutes on 2 idle cores
Two vLLM engines in processes of their own, the CPU backend in float32, a random Qwen3 (4 layers, hidden size
256, 4 KB of KV a token). The first gives a request up; the second continues it, alternately with its KV
and without, its prefix cache empty. CPU time, as other work on the machine changes it least: with KV, of the
step that saves, of the check, and of the step with the next token; by replay, of the steps up to the next
token. Tokens computed are those that the second engine schedules up to it. A CPU computes far more slowly
than an NPU, so the ratio of the times does not hold for an NPU. Bars: one token computed, the same next
token, at most half the time.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bars import bar, finish, parser_of

DECODED = 4


def serve(pipe, path: str, directory: str, options: dict) -> None:
    """One engine: `give_up` and `go_on` as the other process asks."""
    from moving_engines import make_engine, sampling

    from ascend_rl.rollout.moved_kv import place

    engine = make_engine(path, directory, **options).llm_engine
    core = engine.engine_core.engine_core
    scheduler, computed, schedule = core.scheduler, [], core.scheduler.schedule

    def watched():
        output = schedule()
        computed.append(output.total_num_scheduled_tokens)
        return output

    scheduler.schedule = watched

    def tokens_of(name: str, prompt: list[int], count: int, **more) -> list[int]:
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling(100, **more))
        while True:
            for output in engine.step():
                if len(output.outputs[0].token_ids) >= count:
                    return list(output.outputs[0].token_ids)

    def give_up(name: str, prompt: list[int]):
        tokens = tokens_of(name, prompt, DECODED)
        Path(directory, place(name)).mkdir()
        engine.abort_request([name])
        began = time.process_time()
        core.step_fn()
        return tokens, time.process_time() - began

    def go_on(name: str, prompt: list[int], kv: dict | None):
        engine.reset_prefix_cache()
        computed.clear()
        began = time.process_time()
        tokens = tokens_of(name, prompt, 1, extra_args={"kv_transfer_params": kv} if kv else None)
        seconds = time.process_time() - began
        engine.abort_request([name])
        core.step_fn()
        return tokens, seconds, sum(computed)

    pipe.send("ready")
    while task := pipe.recv():
        pipe.send({"give_up": give_up, "go_on": go_on}[task[0]](*task[1:]))


def save_model(path: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from ascend_rl.recipe.tiny import make_tokenizer

    torch.manual_seed(0)
    make_tokenizer().save_pretrained(path)
    config = Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=16384,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)


def measure(lengths: list[int], repeats: int, base: Path) -> list[dict]:
    from ascend_rl.rollout.moved_kv import ABOUT, Depot, place

    save_model(base / "model")
    options = {"max_model_len": 16384, "num_gpu_blocks_override": 160, "max_num_batched_tokens": 16384}
    depots = [Depot(base, name, {}, 1) for name in ("source", "target")]
    depots[0]._own()
    context, pipes = multiprocessing.get_context("spawn"), []
    for depot in depots:
        ours, theirs = context.Pipe()
        arguments = (theirs, str(base / "model"), str(depot.directory), options)
        context.Process(target=serve, args=arguments, daemon=True).start()
        pipes.append(ours)
    assert [pipe.recv() for pipe in pipes] == ["ready"] * 2

    def ask(pipe, *task):
        pipe.send(task)
        return pipe.recv()

    rng, rows = random.Random(0), []
    for tokens in lengths:
        taken = {"save": [], "check": [], "load": [], "kv": [], "replay": []}
        for repeat in range(repeats + 1):  # the first is not measured
            prompt, name = [rng.randrange(512) for _ in range(tokens)], f"movable/{tokens}-{repeat}/0"
            so_far, save = ask(pipes[0], "give_up", name, prompt)
            directory = depots[0].directory / place(name)
            (directory / ABOUT).write_text(depots[0]._about(None))
            size = (directory / "0.kv").stat().st_size
            began = time.process_time()
            kv = asyncio.run(depots[1].take(str(directory), None))
            check = time.process_time() - began
            with_kv, load, one = ask(pipes[1], "go_on", f"{name}k", prompt + so_far, kv)
            without, replay, all_of = ask(pipes[1], "go_on", f"{name}r", prompt + so_far, None)
            assert with_kv == without, "the two ways continue differently"
            if repeat:
                found = (save, check, load, save + check + load, replay)
                for column, seconds in zip(taken, found, strict=True):
                    taken[column].append(seconds)
        medians = {column: statistics.median(values) for column, values in taken.items()}
        rows.append({"tokens": tokens, "bytes": size, "computed": (all_of, one), **medians, "all": taken})
    for pipe, depot in zip(pipes, depots, strict=True):
        pipe.send(None)
        depot.clear()
    return rows


def main() -> int:
    parser = parser_of(__doc__, "once, 1024 tokens")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192], help="of the prefix")
    parser.add_argument("--repeats", type=int, default=3, help="of each, alternating; medians are printed")
    arguments = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    for variable, value in {
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():  # fmt: skip
        os.environ.setdefault(variable, value)
    if arguments.quick:
        arguments.tokens, arguments.repeats = [1024], 1

    with tempfile.TemporaryDirectory(dir="/dev/shm") as base:
        rows = measure(arguments.tokens, arguments.repeats, Path(base))
    print(f"{'tokens':>6} {'MB of KV':>9} {'computed':>14} {'ms: replay':>11} {'KV':>6} (save, check, load)")
    bars = []
    for row in rows:
        replay, kv, *parts = (1e3 * row[key] for key in ("replay", "kv", "save", "check", "load"))
        computed = "{} -> {}".format(*row["computed"])
        shown = ", ".join(f"{part:.1f}" for part in parts)
        print(
            f"{row['tokens']:>6} {row['bytes'] / 1e6:>9.1f} {computed:>14} {replay:>11.1f} {kv:>6.1f} "
            f"({shown})"
        )
        one, share = row["computed"][1], kv / replay
        bars.append((f"computed, {row['tokens']} tokens", one, "tokens", "1", one == 1))
        bars.append(bar(f"KV / replay, {row['tokens']} tokens", share, "of the time", "<= 0.5"))
    return finish("moved_kv", bars, rows=rows)


if __name__ == "__main__":
    sys.exit(main())
