"""What surrounds the device: npu-smi, CANN's version, vllm-ascend's build info, the record of a process."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time

import pytest
from device_job import ROOT, SITE, on_npu
from wheels import CHIPS, wheels_file

from ascend_rl.host import npu_tools
from ascend_rl.preflight import node_facts
from ascend_rl.settings import stack

NODE = ROOT / "software_npu/node"


def node(chip: str, count: int) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}  # of CPU runs
    return ours | {
        "PATH": f"{NODE}/bin:{os.environ['PATH']}",
        "SOFTWARE_NPU_CHIP": chip,
        "SOFTWARE_NPU_COUNT": str(count),
        "ASCEND_HOME_PATH": f"{NODE}/cann",
        "SOFTWARE_NPU_WHEELS": str(wheels_file()),
        "PYTHONPATH": f"{SITE}:{stack.DIRECTORY}/frameworks/vllm_ascend",
    }


def run(program: str, **environment: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, text=True, capture_output=True, check=True).stdout


@pytest.mark.parametrize(("series", "npus"), [("A3", 2), ("A2", 3)])
def test_npu_smi_shows_the_dies(series, npus):
    """As the launcher and preflight read it; two dies make an NPU of an A3."""
    environment = node(CHIPS[series], 3)
    dies, processes = npu_tools.parse_npu_smi(npu_tools.run(["npu-smi", "info"], environment))
    assert [die.index for die in dies] == [0, 1, 2] and not processes
    assert len({die.npu for die in dies}) == npus
    assert npu_tools.series(npu_tools.chip_name(environment)) == series
    listed = npu_tools.run(["npu-smi", "info", "-l"], environment)
    assert int(npu_tools.parse_fields(listed)[0]["Total Count"]) == npus


@pytest.mark.parametrize("series", CHIPS)
def test_hccn_tool_tells_the_network_of_each_die(series):
    """As preflight asks for it; an Atlas A2 has no network of a super node."""
    environment = node(CHIPS[series], 3) | {"SOFTWARE_NPU_UNLINKED": "2"}
    absent = []
    dies, _ = node_facts.die_facts(environment, absent)
    assert not absent and [die["network"]["link"] for die in dies] == ["UP", "UP", "DOWN"]
    assert [die["network"]["net_health"] for die in dies] == ["Success", "Success", "Fault"]
    networks = [die["network"] for die in dies]
    assert {network["tls"] for network in networks} == {0} and len({n["ip"] for n in networks}) == 3
    assert len({network["vnic"] for network in networks} - {None}) == (3 if series == "A3" else 0)
    assert node_facts.ping_die(dies[0], dies[1], environment) == ""
    lost = node_facts.ping_die(dies[0], dies[2], environment)
    assert "100% of packets lost" in lost and ("-hccs_ping" in lost) == (series == "A3")
    without = [die | {"network": die["network"] | {"vnic": None}} for die in dies]  # over RoCE alone
    assert node_facts.ping_die(without[1], without[0], environment) == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("-i 3 -link -g", "no device 3"), ("-i 0 -speed -g", "no -speed"), ("-i 0 -ping -g", "usage")],
)
def test_hccn_tool_refuses_what_is_not_there(arguments, message):
    with pytest.raises(npu_tools.ToolError, match=message):
        npu_tools.run(["hccn_tool", *arguments.split()], node(CHIPS["A3"], 3))


SENDS = """
import asyncio, sys
from verl.utils.device import is_support_ipc
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer
import torch
place, shared = sys.argv[1:]
assert is_support_ipc() == (shared == "True")
weights = [(f"w{i}", torch.arange(70_000, device="npu:1").bfloat16() * i) for i in range(20)]  # 2.8 MB
torch.npu.set_device(1)
sender = transfer.BucketedWeightSender(place, bucket_size_mb=1, use_shm=not is_support_ipc())
asyncio.run(sender.async_send_weights(iter(weights)))
"""
RECEIVES = """
import sys
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer
import torch
place, shared = sys.argv[1:]
buckets = []
receiver = transfer.BucketedWeightReceiver(place, torch.device("npu:0"), use_shm=shared == "False")
def take(weights, *last):  # verl 0.9.1 says which is, and writes the next one to the same place
    buckets.append([(name, weight.clone()) for name, weight in weights])
receiver.receive_weights(take)
received = dict(weight for bucket in buckets for weight in bucket)
assert len(buckets) > 2 and len(received) == 20
for i in range(20):
    weight = received[f"w{i}"]
    assert weight.device == torch.device("npu:0") and torch.equal(
        weight.cpu(), (torch.arange(70_000).bfloat16() * i)
    ), i
print("received", torch.npu.memory_allocated(0))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("driver", "shared"), [("25.3.rc1", True), pytest.param("25.2.0", False, marks=pytest.mark.weekly)]
)
def test_verl_sends_weights_as_the_driver_permits(driver, shared, tmp_path):
    """By handles of device memory, or through memory of the host; npu-smi says which, as verl asks it."""
    place, environment = f"ipc://{tmp_path}/s", node(CHIPS["A3"], 4) | {"SOFTWARE_NPU_DRIVER": driver}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program, place, str(shared)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for program in (SENDS, RECEIVES)
    ]
    while all(process.poll() is None for process in both):
        time.sleep(0.1)
    if any(process.poll() for process in both):  # the other one would wait forever
        [process.kill() for process in both]
    said = [process.communicate(timeout=600) for process in both]
    assert [process.returncode for process in both] == [0, 0], "".join(error[-1500:] for _, error in said)
    assert said[1][0].split()[-2:] == ["received", str(20 * 140_288)]


@pytest.mark.parametrize(("version", "said"), [("8.2.RC1", "8.2.RC1"), (None, "not known")])
def test_cann_says_its_version(version, said, tmp_path):
    """Where torch, vllm-ascend (find_hccl_library) and MindSpeed look for it."""
    if version:
        home = tmp_path / f"{platform.machine()}-linux"
        home.mkdir()
        (home / "ascend_toolkit_install.info").write_text(f"package_name=toolkit\nversion={version}\n")
    asked = """
import torch
from torch_npu.utils.collect_env import get_cann_version
assert torch.version.cann == get_cann_version()
print(torch.version.cann)
"""
    assert run(asked, **node(CHIPS["A3"], 2) | {"ASCEND_HOME_PATH": str(tmp_path)}).strip() == said


def test_an_npu_that_is_not_there_is_an_error():
    with pytest.raises(npu_tools.ToolError, match="no NPU 1"):
        npu_tools.run(["npu-smi", "info", "-t", "board", "-i", "1"], node(CHIPS["A3"], 2))


@pytest.mark.parametrize("series", CHIPS)
def test_vllm_ascend_is_compiled_for_the_chip_only_where_that_is_asked_for(series):
    asked = "import torch; from vllm_ascend._build_info import __device_type__ as series; print(series)"
    own = npu_tools.built_for(stack.DIRECTORY / "frameworks/vllm_ascend/vllm_ascend")
    environment = node(CHIPS[series], 2)
    assert run(asked, **environment, SOFTWARE_NPU_VLLM_ASCEND="1").split()[-1] == series
    if own:
        assert run(asked, **environment).split()[-1] == own


def test_a_process_records_what_it_did(tmp_path):
    program = """
import time, torch, torch_npu
torch_npu.npu_swiglu(torch.ones(4, 4, device="npu:1"))
time.sleep(3)
"""
    run(program, **node(CHIPS["A3"], 2), SOFTWARE_NPU_RECORD=str(tmp_path))
    (record,) = [json.loads(file.read_text()) for file in tmp_path.glob("[0-9]*.json")]
    assert record["calls"] == {"npu_swiglu": 1} and "torch_npu.npu_swiglu" in record["process"]
    assert list(record["peak_bytes"]) == ["1"] and record["woken"] == 0
    assert record["die_peak_bytes"] == record["peak_bytes"]


def test_the_thread_that_records_does_not_settle_which_devices_are_seen(tmp_path):
    """A Ray worker is told its device when its actor starts, on a loaded machine seconds after the fork."""
    program = """
import os, time, torch, torch_npu
time.sleep(2.5)
os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "1"
torch_npu.npu_swiglu(torch.ones(4, 4, device="npu"))
time.sleep(3)
"""
    run(program, **node(CHIPS["A3"], 2), SOFTWARE_NPU_RECORD=str(tmp_path))
    (record,) = [json.loads(file.read_text()) for file in tmp_path.glob("[0-9]*.json")]
    assert (list(record["peak_bytes"]), list(record["die_peak_bytes"])) == (["0"], ["1"])


def test_the_thread_that_records_opens_no_file_as_a_fork_begins(tmp_path):
    """A fork that takes the place of a program (launch.warm_start) puts its files in place then."""
    program = """
import os, pathlib, sys, threading, time
opened = []
def hook(event, arguments):
    if event == "open" and threading.current_thread().name == "npu-record":
        opened.append(arguments[0])
sys.addaudithook(hook)
import torch, torch_npu
if not (pid := os.fork()):
    time.sleep(0.5)
    names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    print(names.count("npu-record"), opened, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""
    said = run(program, **node(CHIPS["A3"], 1), SOFTWARE_NPU_RECORD=str(tmp_path))
    assert said.split("\n")[0] == "1 []"


@on_npu(ranks=2)
def test_products_that_communicate_equal_a_product_and_a_collective(rank):
    import torch
    import torch.distributed as dist
    import torch_npu

    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 6, 4, generator=generator), torch.randn(2, 4, 5, generator=generator)
    whole = sum(a[r].double() @ b[r].double() for r in range(2))
    group = dist.group.WORLD._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    x1, x2 = a[rank].npu(), b[rank].npu()
    reduced = torch_npu.npu_mm_all_reduce_base(x1, x2, group)
    torch.testing.assert_close(reduced.cpu().double(), whole, atol=1e-5, rtol=1e-5)
    scattered = torch_npu.npu_mm_reduce_scatter_base(x1, x2, group, 2)
    torch.testing.assert_close(scattered.cpu().double(), whole.chunk(2)[rank], atol=1e-5, rtol=1e-5)
    product, rows = torch_npu.npu_all_gather_base_mm(x1, x2, group, 2)
    assert torch.equal(rows.cpu(), torch.cat([a[0], a[1]]))
    expected = torch.cat([a[0], a[1]]).double() @ b[rank].double()
    torch.testing.assert_close(product.cpu().double(), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(KeyError, match="HCCL has no group"):
        torch_npu.npu_mm_all_reduce_base(x1, x2, "none")
    with pytest.raises(RuntimeError, match="offset"):
        torch_npu.npu_prefetch(x1, None, 10, offset=10**6)


@pytest.mark.parametrize("first", ["torch", "torch_npu"])
def test_either_may_be_imported_first_and_processes_keep_their_titles(first):
    """A title is written over the process's own environment, which must still be where it was."""
    title = "open('/proc/self/cmdline').read().rstrip(chr(0))"
    program = f"import os, {first}, torch, setproctitle; setproctitle.setproctitle('VLLM::Worker_TP0'); "
    program += f"print({title}, torch.npu.is_available(), os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD'))"
    assert run(program, **node(CHIPS["A3"], 1)).split() == ["VLLM::Worker_TP0", "True", "None"]
