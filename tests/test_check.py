"""launch/check.py: ray_start_npu.sh --check on the software NPU, and who is named as slow."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from ascend_rl.launch.check import judge, links

pytestmark = pytest.mark.long


def check(root, tmp_path, **variables: str) -> tuple[int, str]:
    """Status and output of a check of two dies of a software NPU, by the launcher's way."""
    script = tmp_path / "train_it.sh"
    script.write_text(f"touch {tmp_path}/trained\n")
    environ = os.environ | {
        "SMOKE": "1",
        "NPUS_PER_NODE": "2",
        "SKIP_PREFLIGHT": "1",  # which finds what a software NPU lacks of a node
        "OUTPUT_DIR": str(tmp_path / "out"),
        "LOG_DIR": str(tmp_path / "logs"),
    }
    command = ["bash", "ray_start_npu.sh", "--check", str(script)]
    result = subprocess.run(command, cwd=root, env=environ | variables, text=True, capture_output=True)
    assert not (tmp_path / "trained").exists()
    return result.returncode, result.stdout + result.stderr


@pytest.mark.weekly
def test_a_check_on_the_software_npu(root, tmp_path):
    """The dies sum over HCCL, and roll out on vllm-ascend."""
    status, text = check(root, tmp_path)
    assert status == 0, text
    assert "hccl: 2 dies of 1 node(s); all-reduce " in text and "within a node: 1 links, median " in text
    assert "between nodes" not in text and "check: 0 errors, " in text
    assert re.search(r"rollout: one token on 1 node\(s\), log-prob within 0\.0\d+ of Hugging Face's", text)


@pytest.mark.weekly
def test_a_node_whose_vllm_finds_no_platform_fails_the_check(root, tmp_path):
    """As without vllm-ascend's entry points: this vLLM then runs on the CPU, and computes the same."""
    status, text = check(root, tmp_path, VLLM_PLUGINS="none")
    assert status == 1 and "hccl: 2 dies" in text
    assert "ERROR: the rollout on " in text and "check: 1 errors" in text
    assert "vLLM runs on cpu and not on npu: it finds no vllm-ascend" in text


@pytest.mark.weekly
def test_a_check_asks_the_preflight_of_all_nodes_first(root, tiny, tmp_path):
    """On a CPU, where it finds nothing."""
    environ = os.environ | {
        "OUTPUT_DIR": str(tmp_path / "out"),
        "LOG_DIR": str(tmp_path / "logs"),
        "SKIP_PREFLIGHT": "0",
    }
    scripts = ["internal/train_gspo_qwen3_tiny_cpu.sh", "internal/cpu_env.sh"]
    command = ["bash", "ray_start_npu.sh", "--check", *scripts]
    result = subprocess.run(command, cwd=root, env=environ, text=True, capture_output=True)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert text.count("0 errors, ") == 3  # of this node, of the cluster, of the dies
    assert "gloo: 1 dies of 1 node(s); all-reduce " in text
    assert "rollout: one token on 1 node(s), log-prob within " in text


@pytest.mark.parametrize("places", [[0], [0, 0], [0, 1], [0] * 5, [0] * 3 + [1] * 3 + [2] * 3])
def test_links_cover_all_neighbours_in_disjoint_pairs(places):
    each = places.count(0)
    rounds = links(places)
    for _, pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    found = sorted(pair for _, pairs in rounds for pair in pairs)
    inside = [(r, r + 1) for r in range(len(places) - 1) if places[r] == places[r + 1]]
    assert found == sorted(inside + [(r, r + each) for r in range(len(places) - each)])


def test_the_slow_are_named():
    """A die whose links are all slow is one finding, not one a link; one slow link names both its ends."""
    names = [f"n die {i}" for i in range(6)]
    even = {(i, i + 1): 10e9 for i in range(5)}
    assert judge(names, [1.0] * 6, {"within a node": even}) == []
    sick = even | {(2, 3): 2e9, (3, 4): 3e9}
    assert judge(names, [1.0] * 6, {"within a node": sick}) == [
        "all links within a node of n die 3 are slow: the die, and not a cable"
    ]
    cable = even | {(1, 2): 4e9}
    assert judge(names, [1.0] * 6, {"within a node": cable}) == [
        "the link n die 1 - n die 2 has 4.0 of 10.0 GB/s, the median within a node"
    ]
    assert judge(names, [1.0] * 5 + [2.5], {}) == ["n die 5 computes at 0.40 of the median speed"]
