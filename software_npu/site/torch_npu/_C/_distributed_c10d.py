"""The process group of HCCL and its options."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.distributed  # noqa: F401
from software_npu._C import ProcessGroupHCCL


class Options:
    """What a group is made with. A name that HCCL does not know is refused.

    The names are those in the "HCCL options" of the file that SOFTWARE_NPU_WHEELS names, and "group_name";
    without a file, all are taken.
    """

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream
        self.global_ranks_in_group = []
        self.group_id = self.group_name = ""
        self._config = {}

    @property
    def hccl_config(self) -> dict:
        return self._config

    @hccl_config.setter
    def hccl_config(self, config: dict) -> None:
        if not isinstance(config, dict):
            raise TypeError(f"hccl_config is a dict, not {type(config).__name__}")
        file = os.environ.get("SOFTWARE_NPU_WHEELS")
        if file and (
            unknown := config.keys() - {*json.loads(Path(file).read_text())["HCCL options"], "group_name"}
        ):
            raise ValueError(f"HCCL has no option {', '.join(sorted(unknown))}")
        self._config = dict(config)


ProcessGroupHCCL.Options = Options
