"""From a checkpoint of verl's trainer to Hugging Face safetensors.

    python -m ascend_rl.export outputs/gspo_qwen3_32b --out Qwen3-32B-gspo

What verl leaves in global_step_N/actor differs: FSDP shards (`fsdp`), a Megatron distributed checkpoint in
dist_ckpt (`torch_dist`, whatever the layout of the experts), or, with mbridge, safetensors in huggingface/;
verl 0.9.1 has Megatron's two in model/.
Each is a `Source` of tensors by Hugging Face's names; `converter.write_hf` writes any of them. Names and
shapes are compared with config.json before anything is written, and every value is read back from both sides
before the output appears, by one rename. A killed export is continued by the same command (`journal`).

Cost: O(bytes), two reads and one write; memory O(workers * block), whatever the size of the model.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from pathlib import Path

from ascend_rl.settings.model import Model
from ascend_rl.settings.numbers import real, whole
from ascend_rl.settings.switch import CannotWork, ending
from ascend_rl.weights import converter
from ascend_rl.weights.checkpoints import complete, newest, step_of
from ascend_rl.weights.fsdp import FsdpShards
from ascend_rl.weights.journal import place_of
from ascend_rl.weights.qwen3 import read_model
from ascend_rl.weights.safetensors import Safetensors, Source
from ascend_rl.weights.torch_dist import ITEMSIZE, Checkpoint

EMBEDDING = "embedding.word_embeddings.weight"  # a Megatron checkpoint of weights has it


def of_model(actor: Path) -> Path:
    """Where the weights are apart from the optimizer's states, in verl 0.9.1's checkpoints of Megatron."""
    return actor / "model" if (actor / "model").is_dir() else actor


def find(directory: Path, step: int | None = None) -> Path:
    """The actor's checkpoint in ``directory``: of a run, of its checkpoints, of one of them, or itself.

    Args:
        step: which one; None: the one that verl's tracker names, else the newest complete one.

    Raises:
        CannotWork: there is no checkpoint, or not that one.
    """
    directory = directory.absolute()
    if directory.name == "actor" or (of_model(directory) / "huggingface").is_dir():
        return directory
    if step_of(directory) >= 0:
        return directory / "actor"
    root = directory / "checkpoints" if (directory / "checkpoints").is_dir() else directory
    there = {step_of(path): path for path in complete(root)}
    if not there:
        raise CannotWork(
            f"{directory} has no global_step_N; give the output directory of a run, its checkpoints, or one"
        )
    if step is not None and step not in there:
        raise CannotWork(f"{root} has no global_step_{step}, but the steps {', '.join(map(str, there))}")
    return (newest(root) if step is None else there[step]) / "actor"


def open_weights(actor: Path, model: Model) -> tuple[Source, str]:
    """The weights of an actor's checkpoint, checked against ``model``, and in a word what holds them."""
    if list(actor.glob("model_world_size_*_rank_*.pt")):
        shards = FsdpShards(actor)
        with contextlib.ExitStack() as stack:
            stack.callback(shards.close)
            if lora := next((name for name in shards.tensors if "lora_" in name), None):
                raise CannotWork(
                    f"{actor} holds a LoRA adapter ({lora}); merge it with verl's model merger first"
                )
            converter.check_hf(model, shards)
            stack.pop_all()
        return shards, f"FSDP shards of {shards.world_size} ranks"
    weights = of_model(actor)
    if (weights / "dist_ckpt/metadata.json").exists():
        checkpoint = Checkpoint(weights / "dist_ckpt")
        if EMBEDDING in checkpoint.tensors:
            converter.check_checkpoint(model, checkpoint)
            return converter.MegatronWeights(model, checkpoint), "Megatron checkpoint"
        checkpoint.close()
    if list((weights / "huggingface").glob("*.safetensors")):
        source = Safetensors(weights / "huggingface")
        converter.check_hf(model, source)
        return source, "safetensors of mbridge"
    raise CannotWork(
        f"{actor} holds no weights: neither model_world_size_*.pt, nor those in dist_ckpt, nor "
        "huggingface/*.safetensors; was 'model' in actor.checkpoint.save_contents?"
    )


def export(actor: Path, out: Path, options: converter.Options, hf_path: Path | None = None) -> str:
    """Write the weights of ``actor`` to ``out``; returns what was done, in a sentence.

    Args:
        hf_path: where config.json and the tokenizer are, if not in huggingface/ of the checkpoint.

    Raises:
        CannotWork: something is missing or does not fit; or ``out`` exists.
    """
    if not actor.is_dir():
        raise CannotWork(f"{actor} does not exist; give a complete checkpoint")
    place_of(out, [actor.parent if step_of(actor.parent) >= 0 else actor])  # else it goes with the checkpoint
    hf_path = hf_path or of_model(actor) / "huggingface"
    if not (hf_path / "config.json").exists():  # verl 0.9.1 writes it only beside Hugging Face's weights
        raise CannotWork(f"{hf_path} has no config.json; give the directory of the model with --hf")
    model = read_model(hf_path)
    source, kind = open_weights(actor, model)
    with contextlib.closing(source):
        have = sorted({tensor.dtype for tensor in source.tensors.values()})
        if options.dtype is None and len(have) == 1:  # so that config.json says it, too
            options = dataclasses.replace(options, dtype=have[0])
        converter.write_hf(model, source, hf_path, out, options)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    return (
        f"{out}: {size / 1e9:.2f} GB of {options.dtype or 'mixed'} weights from {kind} ({', '.join(have)}), "
        "read back and equal"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ascend_rl.export",
        description="Turn a checkpoint of a run into Hugging Face safetensors. Needs no accelerator.",
        epilog="""Examples:
  python -m ascend_rl.export outputs/gspo_qwen3_32b --out Qwen3-32B-gspo
  python -m ascend_rl.export outputs/gspo_qwen3_32b --step 40 --out Qwen3-32B-gspo-40 --dtype float32

Writes --out with safetensors, config.json and the tokenizer; if it is killed, the same command continues.
Beside it, until it is complete: OUT.partial and OUT.partial.journal.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkpoint", type=Path, help="a run's output directory, its checkpoints, or one global_step_N"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to make; never overwritten")
    parser.add_argument("--step", type=whole(0), help="which global_step_N (the latest)")
    parser.add_argument(
        "--hf", type=Path, metavar="DIR", help="where config.json and the tokenizer are (the checkpoint's)"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", *ITEMSIZE),
        default="bfloat16",
        help="auto keeps the stored one (bfloat16)",
    )
    parser.add_argument("--shard-gb", type=real(1e-9), default=5.0, help="size of a safetensors file (5)")
    parser.add_argument(
        "--workers", type=whole(), default=min(8, os.cpu_count() or 1), help="threads (%(default)s)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args()
    options = converter.Options(
        dtype=None if args.dtype == "auto" else args.dtype,
        workers=args.workers,
        verify=True,
        shard_bytes=int(args.shard_gb * 1e9),
        quiet=args.quiet,
    )
    with ending() as status:
        actor = find(args.checkpoint, args.step)
        print(f"exporting {actor}", flush=True)
        print(export(actor, args.out, options, args.hf))
    return status.code
