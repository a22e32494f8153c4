"""A Ray that a test starts runs until its agents have started, as on a busy machine."""

from __future__ import annotations

import os

LATE = """
import sys, time
if any(name in " ".join(sys.orig_argv) for name in ("dashboard/agent.py", "runtime_env/agent")):
    time.sleep(20)
"""


def test_agents_may_take_longer_than_a_raylet_waits_for_them(start_ray, tmp_path, monkeypatch):
    import ray

    (tmp_path / "sitecustomize.py").write_text(LATE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    start_ray(num_cpus=1, include_dashboard=False)

    @ray.remote
    def answer():
        return 7

    assert ray.get(answer.remote(), timeout=300) == 7
