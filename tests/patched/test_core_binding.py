"""verl's and vLLM's processes are bound when they start: their own code, in Ray, on two cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

# As if the two cores of the machine were two NUMA nodes with a device each.
TOPOLOGY = json.dumps({"cpus": {"0": [0], "1": [1]}, "devices": {"0": 0, "1": 1}, "source": "a test"})
RUN = """
import contextlib, json, multiprocessing, os, ray


@ray.remote(resources={"NPU": 1})
class Process:
    def device(self):
        return os.environ["ASCEND_RT_VISIBLE_DEVICES"]

    def cpus_after(self, start, **variables):
        os.environ.update({"ASCEND_RT_VISIBLE_DEVICES": "1"} | variables)
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), [0, 1])
        with contextlib.suppress(AttributeError, KeyError, OSError, ValueError):  # without a model
            getattr(self, start)()
        return sorted({cpu for thread in os.listdir("/proc/self/task")
                       for cpu in os.sched_getaffinity(int(thread))})

    def trainer(self):
        from verl.single_controller.base.worker import Worker
        Worker()

    def server(self):
        from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
        vLLMHttpServer(*[None] * 8, cuda_visible_devices=os.environ["ASCEND_RT_VISIBLE_DEVICES"])

    def worker(self):
        from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
        vLLMColocateWorkerExtension.__new__(vLLMColocateWorkerExtension, local_rank=1)

    def engine(self):
        from ascend_rl.settings.stack import DEFAULT, NAME
        from vllm.v1.engine.core import EngineCore, EngineCoreProc
        if NAME == DEFAULT:
            EngineCoreProc.run_engine_core.__wrapped__()  # without ending the process where it fails
        multiprocessing.current_process().name = "EngineCore"  # as vLLM starts it
        EngineCore(None, None, False)


ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)
processes = [Process.remote() for _ in range(2)]
process = next(one for one in processes if ray.get(one.device.remote()) == "1")
found = {"trainer": process.cpus_after.remote("trainer"),
         "server": process.cpus_after.remote("server", ASCEND_RT_VISIBLE_DEVICES="0"),
         "worker": process.cpus_after.remote("worker", ASCEND_RT_VISIBLE_DEVICES="0,1"),
         "engine": process.cpus_after.remote("engine", ASCEND_RT_VISIBLE_DEVICES="0")}
found |= {start + " off": process.cpus_after.remote(start, CORE_BINDING="0") for start in found}
print(json.dumps({start: ray.get(cpus) for start, cpus in found.items()}))
"""


@pytest.fixture(scope="module")
def found(start_ray):
    """CPUs of all threads of a process after its start, by what starts."""
    if not {0, 1} <= os.sched_getaffinity(0):
        pytest.skip("needs CPUs 0 and 1")
    binding = {
        "CORE_BINDING": "1",
        "CORE_BINDING_TOPOLOGY": TOPOLOGY,
        "CPU_AFFINITY_CONF": "0",
        "WORLD_SIZE": "1",
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in binding.items():
            patch.setenv(name, value)
        context = start_ray(num_cpus=2, resources={"NPU": 2}, include_dashboard=False)
    env = os.environ | {"RAY_ADDRESS": context.address_info["address"]}
    command = [sys.executable, "-c", RUN]
    run = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    return json.loads(run.stdout.splitlines()[-1])


def test_a_training_worker_is_beside_the_device_ray_gave_it(found):
    assert found["trainer"] == [1]


def test_processes_of_the_rollout_are_beside_their_devices(found):
    assert found["server"] == [0] and found["engine"] == [0]
    assert found["worker"] == [1]  # its device is number 1 of those it sees


def test_off_they_are_left_where_they_are(found):
    assert {start: cpus for start, cpus in found.items() if start.endswith("off")} == dict.fromkeys(
        ("trainer off", "server off", "worker off", "engine off"), [0, 1]
    )
