"""What the software NPU costs: the start of a vLLM engine on it, and an FSDP step next to the CPU device's.

Usage:    python bench/bench_software_npu.py [--quick]
Example:  python bench/bench_software_npu.py            # about 3 minutes on 2 idle cores

Engine: vllm-ascend's worker and runner with the tiny Qwen3 and decode graphs, from the call of LLM() to the
end of its first token; each in a process of its own, without its imports, which are shown beside it.
FSDP step: forward, backward, clipping and AdamW of the tiny Qwen3 with fully_shard on two ranks, on "npu"
over hccl and on "cpu" over gloo, alternating in the same two processes. With few tokens the overhead of a
call counts most, so a small and a usual micro-batch are measured.
Seconds are CPU seconds of processes with one thread for operators, so that other load matters less. The
median of the rounds counts for a step, the best for an engine; wall seconds are in the JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from bars import ROOT, bar, environment_of, finish, parser_of

START_S, STEP_RATIO = 10.0, 2.5
SHAPES = {"small": (2, 16), "usual": (8, 128)}  # sequences, tokens of each
ENGINE = """
import json, os, sys, time
def now(): return time.process_time(), time.perf_counter()
begin = now()
import torch
from vllm import LLM, SamplingParams
import vllm_ascend.worker.worker
imported = now()
llm = LLM(sys.argv[1], dtype="float32", max_model_len=512, num_gpu_blocks_override=64,
          compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]})
llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=1), use_tqdm=False)
started = now()
assert next(llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
            .parameters()).is_npu
print("ANSWER", json.dumps({
    "import_cpu_s": imported[0] - begin[0], "import_wall_s": imported[1] - begin[1],
    "start_cpu_s": started[0] - imported[0], "start_wall_s": started[1] - imported[1]}))
"""


def environment() -> dict[str, str]:
    """Of a process that has the device and vllm-ascend's tree."""
    from wheels import CHIPS, wheels_file

    from ascend_rl.host.npu_tools import built_for

    tree = ROOT / "frameworks/vllm_ascend"
    series = built_for(tree / "vllm_ascend")
    return environment_of("cpu_env.sh") | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "software_npu/site", tree))),
        "SOFTWARE_NPU_WHEELS": str(wheels_file()),
        "SOFTWARE_NPU_CHIP": CHIPS[series or "A3"],
        "SOFTWARE_NPU_VLLM_ASCEND": str(int(series is None)),  # from git, nothing is compiled
        "VLLM_ASCEND_ENABLE_NZ": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
    }


def answers(command: list[str], number: int = 1, **own: str) -> list[dict]:
    """What ``number`` processes of the command answer; each knows its RANK.

    Raises:
        RuntimeError: one did not answer, with its output.
    """
    processes = [
        subprocess.Popen(
            command,
            env=environment() | own | {"RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(number)
    ]
    try:
        said = [process.communicate(timeout=900)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = [[line for line in text.splitlines() if line.startswith("ANSWER ")] for text in said]
    if not all(found):
        raise RuntimeError(f"no answer from {command[:3]}: {said[0][-3000:]}")
    return [json.loads(lines[-1].removeprefix("ANSWER ")) for lines in found]


def engine(rounds: int) -> list[dict]:
    model = str(ROOT / "data/tiny/model")
    return [answers([sys.executable, "-c", ENGINE, model])[0] for _ in range(rounds)]


def train(steps: int) -> None:
    """A rank: CPU seconds of each step, by shape and device; those of both devices alternate."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, Qwen3ForCausalLM

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    config = AutoConfig.from_pretrained(ROOT / "data/tiny/model")
    models = {}
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).to(device)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh)
        assert next(model.parameters()).device.type == device
        models[device] = model, torch.optim.AdamW(model.parameters(), 1e-3)

    def step(device: str, ids: torch.Tensor) -> tuple[float, float]:
        model, optimizer = models[device]
        ids = ids.to(device)
        dist.barrier()
        before = time.process_time()
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - before, loss.item()

    results = {}
    for name, shape in SHAPES.items():
        seconds = {device: [] for device in models}
        for i in range(steps + 2):
            ids = torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(i))
            losses = {}
            for device in models:
                taken, losses[device] = step(device, ids)
                if i >= 2:  # the first ones allocate
                    seconds[device].append(taken)
            assert abs(losses["cpu"] - losses["npu"]) < 1e-3, losses
        results[name] = seconds
    print("ANSWER", json.dumps(results), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = parser_of(__doc__, "fewer rounds")
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps:
        train(arguments.steps)
        return 0

    from ascend_rl.process.ports import free_port
    from software_npu import build

    build.build()
    starts = engine(1 if arguments.quick else 3)
    best = min(starts, key=lambda each: each["start_cpu_s"])
    print("engine on the software NPU     CPU s   wall s")
    for what in ("import", "start"):
        print(f"{what:<28}{best[f'{what}_cpu_s']:>8.1f}{best[f'{what}_wall_s']:>9.1f}")
    steps = 10 if arguments.quick else 40
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = answers([sys.executable, __file__, "--steps", str(steps)], 2, **place)
    print("\nFSDP step, two ranks    cpu ms   npu ms   ratio")
    start = best["start_cpu_s"]
    met = [bar("engine: start to first token", start, "CPU s", f"<= {START_S:g}")]
    for name, (sequences, tokens) in SHAPES.items():
        ms = {
            device: 1e3 * statistics.median(s for rank in ranks for s in rank[name][device])
            for device in ("cpu", "npu")
        }
        ratio = ms["npu"] / ms["cpu"]
        print(f"{f'{sequences} x {tokens} tokens':<20}{ms['cpu']:>10.1f}{ms['npu']:>9.1f}{ratio:>8.2f}")
        met.append(bar(f"FSDP step of {sequences} x {tokens} tokens", ratio, "x cpu", f"<= {STEP_RATIO:g}"))
    return finish("software_npu", met, engine=starts, fsdp_step_cpu_s=ranks)


if __name__ == "__main__":
    sys.exit(main())
