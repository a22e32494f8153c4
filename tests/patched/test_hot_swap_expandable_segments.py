"""Expandable segments of training on NPUs: switched by verl, unless that costs options of the environment.

The processes do what verl's workers do around two weight syncs. The options in force are those of the
software NPU, which reads them as torch_npu 2.8.0.post2 does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from ranks import SITE

PROGRAM = """
import json, torch
from verl.utils.device import get_device_name, set_expandable_segments
found = [dict(torch.npu.memory.allocator_options())]
for enable in (False, True, False, True):
    set_expandable_segments(enable)
    found.append(dict(torch.npu.memory.allocator_options()))
print(json.dumps([get_device_name(), found]))
"""


def options_in_force(root, conf: str | None) -> list[dict[str, str]]:
    """At the start of a worker, and within and after each of two weight syncs."""
    source = "unset PYTORCH_NPU_ALLOC_CONF" if conf is None else f"export PYTORCH_NPU_ALLOC_CONF={conf!r}"
    script = f"{source}; . internal/qwen3_235b_env.sh >/dev/null; exec {sys.executable} -c '{PROGRAM}'"
    path = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        ["bash", "-c", script],
        cwd=root,
        env=os.environ | {"PYTHONPATH": path, "VERL_PLATFORM": ""},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    device, found = json.loads(run.stdout.splitlines()[-1])
    assert device == "npu"
    return found


@pytest.mark.parametrize("others", [{}, pytest.param({"base_addr_aligned_kb": "16"}, marks=pytest.mark.long)])
def test_segments_are_switched_where_the_environment_leaves_them_free(root, others):
    conf = ",".join(f"{name}:{value}" for name, value in others.items())
    start, *switched = options_in_force(root, conf)
    assert start == others
    assert switched == [others | {"expandable_segments": value} for value in ("False", "True") * 2]


@pytest.mark.parametrize(
    ("conf", "options"),
    [
        (None, {"garbage_collection_threshold": "0.6", "max_split_size_mb": "24"}),  # the recipes
        pytest.param(
            "page_size:1g, expandable_segments:False",
            {"page_size": "1g", "expandable_segments": "False"},
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_the_environment_asks_for_holds_after_weight_syncs(root, conf, options):
    assert options_in_force(root, conf) == [options] * 5


def test_a_machine_without_accelerator_does_nothing():
    from verl.utils.device import set_expandable_segments

    set_expandable_segments(True)
