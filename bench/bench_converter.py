"""The converter against `cp` and against verl 0.7.1's own script: speed, memory, exactness.

Usage:    python bench/bench_converter.py [--quick] [--directory DIR] [--layers 6] Example:  python
bench/bench_converter.py              # 8.7 GB, about 6 minutes, 36 GB of disk, 16 GB of memory Inputs are
synthetic Qwen3-30B-A3B weights (its shapes, fewer layers), seeded. Times are wall-clock times of whole
processes, start-up included, and end when the data is on the disk. Everything written is deleted at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
from bars import ROOT, bar, canvas, finish, parser_of, save

from ascend_rl.settings.model import Model
from ascend_rl.weights import converter, qwen3

CONVERTER = ROOT / "converter_hf_to_mcore.py"
CONFIG = dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=2048, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, vocab_size=151936, intermediate_size=6144, moe_intermediate_size=768,
    num_experts=128, num_experts_per_tok=8, tie_word_embeddings=False, torch_dtype="bfloat16",
    max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6, norm_topk_prob=True,
)  # fmt: skip
QUICK = CONFIG | dict(vocab_size=20000, num_experts=16)


def synthesize(directory: Path, config: dict, layers: int) -> int:
    """Make a Hugging Face directory of random bf16 weights, all tensors different; return its bytes."""
    directory.mkdir(parents=True)
    config = config | {"num_hidden_layers": layers}
    (directory / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    # sign and mantissa at random, exponents around 2**-6: finite values such as weights are
    pool = (random.integers(0, 1 << 16, 1 << 24, np.uint16) & 0x80FF) | 0x3C00
    pool = np.concatenate([pool, pool])
    files: list[list[str]] = [[]]
    shapes = qwen3.hf_tensors(Model.from_config(config))
    for name in shapes:
        if sum(int(np.prod(shapes[n])) for n in files[-1]) * 2 > 4e9:
            files.append([])
        files[-1].append(name)
    where = {}
    for nth, names in enumerate(files):
        file = f"model-{nth + 1:05}-of-{len(files):05}.safetensors"
        header, position = {}, 0
        for name in names:
            size = int(np.prod(shapes[name])) * 2
            header[name] = {
                "dtype": "BF16",
                "shape": shapes[name],
                "data_offsets": [position, position + size],
            }
            position, where[name] = position + size, file
        text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
        text += b" " * (-len(text) % 8)
        with open(directory / file, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                left = int(np.prod(shapes[name]))
                start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:3], "little")
                while left:
                    count = min(left, 1 << 24)
                    stream.write(memoryview(pool[start : start + count]).cast("B"))
                    left -= count
            stream.flush()
            os.fsync(stream.fileno())
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(int(np.prod(shape)) for shape in shapes.values()) * 2


# Linux counts the memory of the process that forked towards the peak of the one that is started; so a small
# one forks.
LAUNCHER = """
import json, os, sys
status, usage = os.wait4(os.spawnv(os.P_NOWAIT, sys.argv[2], sys.argv[2:]), 0)[1:]
with open(sys.argv[1], "w") as report:
    json.dump([os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024], report)
"""


def measure(
    work: Path, command: list[str], env: dict | None = None, seconds: float = 900
) -> tuple[float, float]:
    """Wall-clock seconds and peak RSS in bytes of a process that must succeed."""
    report, begun = work / "report.json", time.monotonic()
    launcher = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(report), *command]
    result = subprocess.run(
        launcher, stdin=subprocess.DEVNULL, capture_output=True, env=env, text=True, timeout=seconds
    )
    elapsed = time.monotonic() - begun
    code, rss_bytes = json.loads(report.read_text())
    if code:
        raise SystemExit(f"{' '.join(command[:3])} ... failed:\n{(result.stdout + result.stderr)[-3000:]}")
    return elapsed, rss_bytes


def ours(work: Path, *arguments: object) -> tuple[float, float]:
    return measure(
        work, [sys.executable, str(ROOT / "converter_hf_to_mcore.py"), "--quiet", *map(str, arguments)]
    )


def remove(*paths: Path) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def killed_and_resumed(work: Path, hf: Path, out: Path, expected: Path) -> int:
    """Chunks safely written before kill -9; after a second run the result must equal ``expected``."""
    process = subprocess.Popen([sys.executable, str(CONVERTER), "--quiet", "--workers", "1",
                                "--hf_model_path", str(hf), "--output_path", str(out)])  # fmt: skip
    journal = out.with_name(out.name + ".partial.journal")
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if journal.exists() and journal.read_bytes().count(b"\n") > 1:
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0
    if process.returncode != -signal.SIGKILL or not kept:
        raise SystemExit("the kill came too early or too late to say anything; run again with more --layers")
    ours(work, "--hf_model_path", hf, "--output_path", out)
    for path in sorted(expected.iterdir()):
        with open(path, "rb") as one, open(out / path.name, "rb") as other:
            if hashlib.file_digest(one, "sha256").digest() != hashlib.file_digest(other, "sha256").digest():
                raise SystemExit(f"{path.name} differs after a kill and a resume")
    return kept


def same_tensors(one: Path, other: Path) -> int:
    """Number of tensors; all must be equal in both directories, as read by the safetensors library."""
    import torch
    from safetensors import safe_open

    def names(directory: Path) -> dict[str, Path]:
        found = {}
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                found |= dict.fromkeys(file.keys(), path)
        return found

    first, second = names(one), names(other)
    if first.keys() != second.keys():
        raise SystemExit("the round trip changed the set of tensors")
    for name, path in first.items():
        with safe_open(path, "pt") as a, safe_open(second[name], "pt") as b:
            x, y = a.get_tensor(name), b.get_tensor(name)
            if x.dtype != y.dtype or not torch.equal(x.view(torch.int16), y.view(torch.int16)):
                raise SystemExit(f"the round trip changed {name}")
    return len(first)


def load_and_save(rank: int, hf: str, mcore: str, out: str, layout: dict) -> float:
    """In each rank: verl's Megatron model, filled by dist_checkpointing.load (timed), saved again."""
    import megatron_cpu
    import torch

    from megatron.core import dist_checkpointing

    model = megatron_cpu.build(hf, dtype=torch.bfloat16, **layout)
    begun = time.monotonic()
    loaded = dist_checkpointing.load(model.sharded_state_dict(), mcore)
    model.load_state_dict(loaded)
    seconds = time.monotonic() - begun
    del loaded
    if rank == 0:
        os.makedirs(out)
    torch.distributed.barrier()
    dist_checkpointing.save(model.sharded_state_dict(), out)
    return seconds


def verl_script(directory: Path) -> Path:
    """verl's script from the pinned wheel (frameworks/ keeps the package only)."""
    sys.path.append(str(ROOT / "patches"))
    import sources

    project = sources.Project.load(ROOT)
    wheel = sources.pip_download(project, project.framework("verl"), sources.machine(), directory, 300)
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract("scripts/converter_hf_to_mcore.py", directory))


def plot(rows: list[dict]) -> None:
    figure, axes = canvas(figsize=(6, 3.2))
    for who in dict.fromkeys(row["who"] for row in rows):
        points = [(row["gb"], row["rss_gb"]) for row in rows if row["who"] == who]
        axes.plot(*zip(*points, strict=True), "o-", label=who)
    axes.axhline(2, color="gray", linestyle=":", label="bar: 2 GB")
    axes.set(
        xlabel="weights, GB",
        ylabel="peak RSS, GB",
        xlim=0,
        ylim=0,
        title="Memory to convert Qwen3-MoE weights",
    )
    axes.legend()
    save(figure, "converter")


def main() -> int:
    parser = parser_of(__doc__, "0.5 GB instead of 8.7 GB; under a minute; no bar on speed")
    parser.add_argument("--layers", type=int, default=6, help="layers of the large model, 1.25 GB each")
    parser.add_argument(
        "--directory", type=Path, default=ROOT / "data/bench_converter", help="where the data goes"
    )
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    config, small, large = (QUICK, 2, 3) if args.quick else (CONFIG, 2, args.layers)
    repeat = 1 if args.quick else args.repeat
    remove(args.directory)
    args.directory.mkdir(parents=True)
    needed = (5 * large + 10) * 1.25e9 if not args.quick else 4e9
    if shutil.disk_usage(args.directory).free < needed:
        raise SystemExit(f"{args.directory} needs {needed / 1e9:.0f} GB of free disk")
    try:
        return bench(args, config, small, large, repeat)
    finally:
        remove(args.directory)


def bench(args: argparse.Namespace, config: dict, small: int, large: int, repeat: int) -> int:
    work = args.directory
    rows: list[dict] = []
    data: dict = {"sizes_bytes": {}, "seconds": {}, "loads_seconds": {}}

    def note(what: str, seconds: float, size: int, rss: float | None = None, who: str = "converter") -> None:
        shown = f"{rss / 1e9:8.2f}" if rss else " " * 8
        print(
            f"{what:<52} {size / 1e9:7.2f} GB {seconds:8.2f} s {size / seconds / 1e9:7.2f} GB/s {shown}",
            flush=True,
        )
        data["seconds"].setdefault(what, []).append(seconds)
        if rss:
            rows.append({"who": who, "what": what, "gb": size / 1e9, "rss_gb": rss / 1e9})

    print(f"{'':<52} {'weights':>10} {'time':>10} {'speed':>12} {'RSS, GB':>8}")
    hf, mcore, back, copy = (work / name for name in ("hf", "mcore", "back", "copy"))

    # 1. the large model: interleaved with cp, then back
    size = data["sizes_bytes"]["large"] = synthesize(hf, config, large)
    rates: dict[str, list[float]] = {"cp": [], "cp and sync": [], "converter": []}
    for _ in range(repeat):
        begun = time.monotonic()
        subprocess.run(["cp", "-r", hf, copy], check=True)
        rates["cp"].append(size / (time.monotonic() - begun))
        note("cp", size / rates["cp"][-1], size)
        subprocess.run(["sync", *copy.iterdir()], check=True)
        rates["cp and sync"].append(size / (time.monotonic() - begun))
        note("cp and sync", size / rates["cp and sync"][-1], size)
        remove(copy, mcore)
        seconds, rss = ours(work, "--hf_model_path", hf, "--output_path", mcore)
        rates["converter"].append(size / seconds)
        note("converter, to mcore", seconds, size, rss)
    seconds, rss = ours(work, "--hf_model_path", hf, "--mcore_path", mcore, "--verify_only")
    note("converter, verify", seconds, size, rss)
    seconds, rss = ours(
        work, "--to", "hf", "--hf_model_path", hf, "--mcore_path", mcore, "--output_path", back
    )
    note("converter, to hf", seconds, size, rss)
    tensors = same_tensors(hf, back)
    remove(hf, mcore, back)

    # 2. the small model: memory, verl's script, a kill, real Megatron models
    size = data["sizes_bytes"]["small"] = synthesize(hf, config, small)
    seconds, rss_small = ours(work, "--hf_model_path", hf, "--output_path", mcore)
    note("converter, to mcore", seconds, size, rss_small)
    kept = 0.0
    if not args.quick:
        kept = killed_and_resumed(work, hf, back, mcore)
        remove(back)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "WORLD_SIZE": "1",
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29617",
    }
    script = verl_script(work / "wheel")
    runner = str(ROOT / "bench/verl_converter_on_cpu.py")
    command = [sys.executable, runner, str(script), "--hf_model_path", str(hf),
               "--output_path", str(back), "--use_cpu_initialization"]  # fmt: skip
    seconds, rss_verl = measure(work, command, environment)
    note("verl's script, to mcore", seconds, size, rss_verl, "verl 0.7.1")
    converter.verify(hf, back, converter.Options(workers=2, quiet=True))
    remove(back)

    from bench_converter import load_and_save as by_name  # ranks find it by the name of its module
    from ranks import run_ranks

    layouts = ({"tp": 2}, {"pp": 2}, {"ep": 2, "experts": "grouped"})[2 if args.quick else 0 :]
    loaded = 0
    for layout in layouts:
        name = " ".join(f"{key}={value}" for key, value in layout.items())
        times = run_ranks(2, by_name, str(hf), str(mcore), str(back), layout)
        data["loads_seconds"][name] = max(times)
        note(f"dist_checkpointing.load, {name}", max(times), size)
        converter.verify(hf, back, converter.Options(workers=2, quiet=True))  # what Megatron saved, sharded
        loaded += 1
        remove(back)

    ours_rss = [row["rss_gb"] for row in rows if row["who"] == "converter"]
    share = {
        peer: statistics.median(rates["converter"]) / statistics.median(rates[peer])
        for peer in ("cp", "cp and sync")
    }
    bars = [
        bar("peak RSS, largest of all runs at both sizes", max(ours_rss), "GB", "<= 2"),
        ("tensors equal after the round trip", tensors, "", "all", True),
        ("verl's script writes the same tensors", 1, "", "yes", True),
        bar("real Megatron layouts that load it", loaded, "", f"= {len(layouts)}"),
    ]
    if not args.quick:
        bars.insert(0, bar("speed against cp (not synced)", share["cp"], "x", ">= 0.6"))
        bars.insert(1, bar("speed against cp and sync", share["cp and sync"], "x", ">= 0.6"))
        less = rss_verl / rss_small
        bars.append(bar("memory of verl's script / ours, same weights", less, "x", ">= 5"))
        bars.append(bar("chunks kept by a kill -9, same hashes after it", kept, "", ">= 1"))
    status = finish("converter", bars, quick=args.quick, rates_bytes_per_second=rates, memory=rows, **data)
    plot(rows)
    return status


if __name__ == "__main__":
    sys.exit(main())
