"""Every patch is needed by its test: leave the patch out, and the test named in its header fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

PATCHES = sorted((Path(__file__).resolve().parents[2] / "patches").glob("*/*.patch"))


@pytest.fixture(scope="module")
def outcomes(request, root, tree_without):
    """By patch: its tests, run on a tree that lacks it. Two at a time: imports keep one core busy."""

    def run(patch: Path) -> subprocess.CompletedProcess:
        tests = re.search(r"^Test: (.+)$", patch.read_text(), re.M).group(1).split()
        variant = tree_without(patch.parent.name, [patch.stem.split("-")[-1]])
        # vllm_ascend is no part of the ordinary environment: on its path, it would be vLLM's platform.
        place = "VLLM_ASCEND_TREE" if patch.parent.name == "vllm_ascend" else "PYTHONPATH"
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
            cwd=root, env=os.environ | {place: str(variant)},
            capture_output=True, text=True, timeout=300,
        )

    patches = [item.callspec.params["patch"] for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(2) as pool:
        yield {patch: pool.submit(run, patch) for patch in patches
               if (root / "frameworks" / patch.parent.name).is_dir()}
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_its_test_fails_without_it(patch, outcomes):
    if patch not in outcomes:
        pytest.skip(f"no {patch.parent.name} checkout")
    run = outcomes[patch].result()
    assert run.returncode == 1, (
        f"expected failing tests, got status {run.returncode}:\n{run.stdout[-3000:]}{run.stderr[-1000:]}"
    )
