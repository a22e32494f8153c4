#!/usr/bin/env python3
"""Convert Qwen2 and Qwen3 weights between Hugging Face safetensors and a Megatron distributed checkpoint.

    python converter_hf_to_mcore.py --hf_model_path Qwen3-30B-A3B --output_path Qwen3-30B-A3B-mcore --verify
    python converter_hf_to_mcore.py --to hf --mcore_path Qwen3-30B-A3B-mcore --hf_model_path Qwen3-30B-A3B \\
        --output_path back

Needs neither an accelerator nor Megatron, and below 2 GB of memory for any model. The checkpoint loads at any
TP/PP/EP layout. Killed? Run the same command again. USE_ALLTOALL_OVERLAP=1 chooses --layout grouped.
Under torchrun, rank 0 converts and the other ranks end at once. See docs/converter.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ascend_rl.settings.numbers import real, whole
from ascend_rl.settings.switch import CannotWork, ending, switched_on

DTYPES = ("bfloat16", "float16", "float32")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hf_model_path",
        required=True,
        help="Hugging Face model; with --to hf, where config.json and the tokenizer are",
    )
    parser.add_argument("--output_path", help="directory to create; never overwritten")
    parser.add_argument(
        "--to", choices=("mcore", "hf"), default="mcore", help="direction, default: %(default)s"
    )
    parser.add_argument("--mcore_path", help="with --to hf or --verify_only: the checkpoint to read")
    parser.add_argument(
        "--layout",
        choices=("auto", "default", "grouped"),
        default="auto",
        help="grouped: experts of an EP rank in one chunk (weight1/weight2); auto: by USE_ALLTOALL_OVERLAP",
    )
    parser.add_argument(
        "--ep_size",
        type=whole(),
        default=None,
        help="with grouped: at which EP size a chunk is one rank's experts (32)",
    )
    parser.add_argument(
        "--dtype", choices=("auto", *DTYPES), default="auto", help="auto keeps the dtype of the source"
    )
    parser.add_argument(
        "--workers", type=whole(), default=min(8, os.cpu_count() or 1), help="threads, default: %(default)s"
    )
    parser.add_argument(
        "--verify",
        "--test",
        action="store_true",
        help="read back and compare every tensor before the output appears",
    )
    parser.add_argument(
        "--verify_only", action="store_true", help="only compare --mcore_path with --hf_model_path"
    )
    parser.add_argument(
        "--shard_gb",
        type=real(1e-9),
        default=5.0,
        help="with --to hf: size of a safetensors file, default: %(default)s",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    for flag in ("--trust_remote_code", "--use_cpu_initialization"):
        parser.add_argument(
            flag, action="store_true", help="accepted for compatibility; no code is run and no model is built"
        )
    parser.add_argument(
        "--pp_size",
        type=whole(),
        help="accepted for compatibility; every pipeline layout can load the result",
    )
    args = parser.parse_args(argv)
    if (args.to == "hf" or args.verify_only) and not args.mcore_path:
        parser.error("--to hf and --verify_only need --mcore_path")
    if args.to == "mcore" and args.mcore_path and not args.verify_only:
        parser.error("--mcore_path goes with --to hf or --verify_only")
    if not args.verify_only and not args.output_path:
        parser.error("--output_path is needed")
    if args.layout == "auto":
        try:
            args.layout = "grouped" if switched_on("USE_ALLTOALL_OVERLAP") else "default"
        except CannotWork as error:
            parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        print(f"rank {rank}: rank 0 converts, with {args.workers} workers", file=sys.stderr)
        return 0
    from ascend_rl.weights import converter  # after the ranks that do nothing left

    with ending() as status:
        options = converter.Options(
            layout=args.layout,
            ep_size=args.ep_size or 0,
            dtype=None if args.dtype == "auto" else args.dtype,
            workers=args.workers,
            verify=args.verify,
            shard_bytes=int(args.shard_gb * 1e9),
            quiet=args.quiet,
        )
        if args.verify_only:
            converter.verify(args.hf_model_path, args.mcore_path, options)
            print(f"{args.mcore_path} holds the weights of {args.hf_model_path}")
        elif args.to == "hf":
            print(
                f"complete: {converter.to_hf(args.mcore_path, args.hf_model_path, args.output_path, options)}"
            )
        else:
            written = converter.to_mcore(args.hf_model_path, args.output_path, options)
            print(f"complete: {written} ({options.layout} layout)")
    return status.code


if __name__ == "__main__":
    sys.exit(main())
