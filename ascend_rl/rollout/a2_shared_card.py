"""No fused collectives (with computation) on an Atlas A2 that the rollout shares with the trainer.

Problem: on Atlas A2 these operators of vllm-ascend (dispatch and combine of experts, MC2; matmul with
reduce-scatter) do not support several processes on a card (verl#5560), and there the trainer is another.
Idea: an engine that can sleep shares its card; verl asks every engine for it, a server of its own has it off.
Such an engine takes what vllm-ascend takes in other setups: all-gather, and matmul followed by a collective.
Invariants: on other chips, and without sleep mode, nothing changes; with SWITCH off, nothing does.
Cost: O(1) per step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ascend_rl.settings.switch import switched_on

SWITCH = "VERL_NPU_ENABLE_A2_PATCH_VLLM_ASCEND_MC2"  # of later releases of verl, on by default there too


def may_fuse(chip: str, sleeps: bool, environ: Mapping[str, str] | None = None) -> bool:
    """Whether an engine may run the fused operators.

    Args:
        chip: name of vllm-ascend's AscendDeviceType.
        sleeps: vLLM's enable_sleep_mode.
        environ: default os.environ.

    >>> may_fuse("A3", True, {}), may_fuse("A2", False, {}), may_fuse("A2", True, {})
    (True, True, False)
    >>> may_fuse("A2", True, {SWITCH: "0"})
    True
    """
    environ = os.environ if environ is None else environ  # looked up now: datasets.map replaces it
    return chip != "A2" or not sleeps or (SWITCH in environ and not switched_on(SWITCH, environ))
