"""What megatron-core 0.12.1 needs of torch 2.8 to save a checkpoint: Ascend has 2.8, the CPU 2.9."""

from __future__ import annotations

import dataclasses
import sys
import types


def install() -> None:
    from torch.distributed.checkpoint import filesystem

    write_item = filesystem._write_item

    def write_item_in_either_form(*args):  # without the format that torch 2.9 asks for
        return (
            write_item(*args)
            if len(args) == 6
            else write_item(*args, filesystem.SerializationFormat.TORCH_SAVE)
        )

    def replace_all(
        metadata, **changes
    ):  # torch 2.9 copies the metadata, and drops what megatron-core added to it
        copy = dataclasses.replace(metadata, **changes)
        vars(copy).update({k: v for k, v in vars(metadata).items() if k not in vars(copy)})
        return copy

    filesystem._write_item = write_item_in_either_form
    if writer := sys.modules.get("megatron.core.dist_checkpointing.strategies.filesystem_async"):
        writer._write_item = write_item_in_either_form
    filesystem.dataclasses = types.SimpleNamespace(**vars(dataclasses) | {"replace": replace_all})
