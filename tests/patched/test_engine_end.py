"""The process of an engine that fails ends, also with a message that nobody takes any more."""

from __future__ import annotations

import subprocess
import sys

FAILS = """
import multiprocessing, os, sys, time
import zmq

class Config:
    @property
    def parallel_config(self):
        context = zmq.Context()  # freed with the exception
        socket = context.socket(zmq.PUSH)
        socket.connect("tcp://127.0.0.1:1")
        socket.send(b"to nobody")
        open("failed", "x").close()
        raise RuntimeError("no engine")

if __name__ == "__main__":
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    from vllm.v1.engine.core import EngineCoreProc
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=EngineCoreProc.run_engine_core, kwargs={"vllm_config": Config()})
    process.start()
    while process.is_alive() and not os.path.exists("failed"):
        time.sleep(0.1)
    process.join(20)
    print("STATUS", process.exitcode)
    process.kill()
"""


def test_an_engine_that_fails_ends(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    run = subprocess.run([sys.executable, "fails.py"], cwd=tmp_path, capture_output=True, text=True)
    assert "STATUS 1\n" in run.stdout and "no engine" in run.stderr, run.stdout[-500:] + run.stderr[-3000:]
