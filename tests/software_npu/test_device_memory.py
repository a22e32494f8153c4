"""Memory of the software NPU: what is counted and refused, several devices, generators, pinned memory."""

from __future__ import annotations

import copy

import pytest
import torch
from device_job import SITE, on_npu

MiB = 1 << 20


@on_npu()
def test_the_device_loads_itself_and_computes():
    a, b = torch.randn(4, 5), torch.randn(5, 3)
    product = a.npu() @ b.to("npu")
    assert product.device == torch.device("npu", 0) and product.is_npu
    torch.testing.assert_close(product.cpu(), a @ b)
    assert product.cpu().data_ptr() != product.data_ptr()


@on_npu()
def test_views_share_memory_and_out_arguments_are_written():
    x = torch.zeros(4, 6, device="npu")
    x.t()[2].add_(1)
    x.view(2, 2, 6)[0, 0, 0] = 5
    x.chunk(2, 1)[1][3].mul_(0).sub_(2)
    wanted = torch.zeros(4, 6)
    wanted[:, 2], wanted[0, 0], wanted[3, 3:] = 1, 5, -2
    assert torch.equal(x.cpu(), wanted)
    out = torch.empty(0, device="npu")
    assert torch.add(x, 1, out=out) is out and torch.equal(out.cpu(), wanted + 1)
    assert torch.equal(
        torch.view_as_complex(x.view(4, 3, 2)).conj().imag.cpu(), -wanted.view(4, 3, 2)[..., 1]
    )


@on_npu()
def test_a_model_learns_as_on_the_cpu():
    torch.manual_seed(0)
    host = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3)
    )
    x, y = torch.randn(10, 6), torch.randint(0, 3, (10,))
    device = copy.deepcopy(host).to("npu")
    losses = []
    for model, name in ((host, "cpu"), (device, "npu")):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(3):
            loss = torch.nn.functional.cross_entropy(model(x.to(name)), y.to(name))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] < 1.5
    for here, there in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(here, there.cpu())


@on_npu(SOFTWARE_NPU_MEMORY_MB="64")
def test_a_device_has_so_much_memory_and_says_what_is_missing():
    assert torch.npu.mem_get_info() == (64 * MiB, 64 * MiB)
    held = torch.empty(40 * MiB, dtype=torch.uint8, device="npu")
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(25 * MiB, dtype=torch.uint8, device="npu")
    wanted = (
        "NPU out of memory. Tried to allocate 25.00 MiB (NPU 0; 64.00 MiB total capacity; 40.00 MiB already "
        "allocated; 24.00 MiB free; 40.00 MiB reserved in total by PyTorch)"
    )
    assert wanted in str(error.value)
    assert torch.npu.memory_stats()["num_ooms"] == 1
    with pytest.raises(torch.OutOfMemoryError):
        torch.cat([held, held])  # what an operator returns counts too
    del held
    torch.empty(64 * MiB, dtype=torch.uint8, device="npu")
    torch.npu.set_per_process_memory_fraction(0.5)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(33 * MiB, dtype=torch.uint8, device="npu")


@on_npu(SOFTWARE_NPU_COUNT="2")
def test_figures_are_of_each_device():
    one = torch.zeros(1000, device="npu:1")  # 4000 bytes, in blocks of 512
    two = one * 2
    assert (torch.npu.memory_allocated(1), torch.npu.memory_allocated()) == (2 * 4096, 0)
    del one
    assert (torch.npu.memory_allocated(1), torch.npu.max_memory_allocated(1)) == (4096, 8192)
    assert (torch.npu.memory_reserved(1), torch.npu.max_memory_reserved(1)) == (8192, 8192)
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats(1)
    assert (torch.npu.memory_reserved(1), torch.npu.max_memory_reserved(1)) == (4096, 4096)
    assert torch.npu.max_memory_allocated("npu:1") == 4096
    assert torch.npu.mem_get_info(1)[0] == torch.npu.mem_get_info(1)[1] - 4096
    with torch.npu.device(1):
        assert torch.npu.memory_stats()["allocated_bytes.all.current"] == 4096
    view = two[3:]
    del two
    assert torch.npu.memory_allocated(1) == 4096
    del view
    assert torch.npu.memory_allocated(1) == 0


@on_npu()
def test_fresh_memory_is_garbage():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert torch.empty(3, dtype=dtype, device="npu").isnan().all()
        assert torch.empty_strided((2, 2), (2, 1), dtype=dtype, device="npu").isnan().all()
    assert torch.empty(3, dtype=torch.int64, device="npu").tolist() == [-1] * 3
    assert torch.empty(3, dtype=torch.bool, device="npu").tolist() == [True] * 3
    grown = torch.ones(2, device="npu").resize_(4)
    assert grown[:2].tolist() == [1, 1] and grown[2:].isnan().all()


@on_npu(SOFTWARE_NPU_COUNT="2")
def test_devices_do_not_mix():
    here = torch.ones(2, 2, device="npu")
    for other in (torch.ones(2, 2), torch.ones(2, 2, device="npu:1")):
        with pytest.raises(RuntimeError, match=r"same device.*npu:0 and (cpu|npu:1)! \(aten::mm"):
            here @ other
        with pytest.raises(RuntimeError, match=r"same device.*\(aten::cat"):
            torch.cat([here, other])
        with pytest.raises(RuntimeError, match="same device"):
            here + other
    assert (here + torch.tensor(1.0)).sum() == 8  # a number of the host is none
    assert here[torch.tensor([1])].shape == (1, 2)  # nor are indices
    assert here.to("npu:1").device.index == 1
    for wrong in (lambda: torch.empty(1, device="npu:2"), lambda: torch.npu.set_device(2)):
        with pytest.raises(RuntimeError, match="invalid device npu:2"):
            wrong()
    with pytest.raises(ValueError, match="npu device"):
        torch.npu.set_device("cpu")


@on_npu(SOFTWARE_NPU_COUNT="4", ASCEND_RT_VISIBLE_DEVICES="3,1,7,0")
def test_visible_devices_end_where_one_does_not_exist():
    assert torch.npu.device_count() == 2


@on_npu(ASCEND_RT_VISIBLE_DEVICES="")
def test_no_visible_device():
    assert torch.npu.device_count() == 0
    with pytest.raises(RuntimeError, match="there are 0 NPUs"):
        torch.empty(1, device="npu")


@on_npu(SOFTWARE_NPU_COUNT="2")
def test_each_device_draws_its_own_numbers():
    def draw(device):
        dropped = torch.nn.functional.dropout(torch.ones(64, device=device))
        return torch.cat([torch.rand(3, device=device), torch.randn(3, device=device), dropped]).tolist()

    torch.npu.manual_seed_all(7)
    state, hosts = torch.npu.get_rng_state(), torch.get_rng_state()
    first, other = draw("npu"), draw("npu:1")
    assert first == other and draw("npu") != first
    torch.rand(3)
    torch.npu.set_rng_state(state)
    assert draw("npu") == first  # the CPU's numbers have no part in it
    torch.set_rng_state(hosts)
    wanted = torch.rand(3)
    torch.set_rng_state(hosts)
    draw("npu")
    assert torch.equal(torch.rand(3), wanted)  # nor the other way round
    torch.manual_seed(7)  # seeds all devices
    assert draw("npu:1") == first
    own = torch.Generator("npu").manual_seed(5)
    again = torch.Generator("npu").manual_seed(5)
    assert torch.equal(
        torch.rand(3, device="npu", generator=own), torch.rand(3, device="npu", generator=again)
    )
    drawn = [torch.rand(3, device="npu", generator=own) for _ in range(2)]
    assert own.get_offset() == 12
    own.set_offset(own.get_offset() - 8)  # takes both back, as vLLM does with the tokens of a partial prefill
    assert all(torch.equal(torch.rand(3, device="npu", generator=own), numbers) for numbers in drawn)
    with pytest.raises(RuntimeError, match="goes back by whole draws"):
        own.set_offset(own.get_offset() + 4)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device="npu", generator=torch.Generator())


@on_npu()
def test_pinned_memory():
    assert torch.ones(3).pin_memory().is_pinned() and torch.empty(3, pin_memory=True).is_pinned()
    assert torch.ones(5, pin_memory=True)[2:].is_pinned() and not torch.ones(3).is_pinned()
    assert torch.ones(3).pin_memory().to("npu", non_blocking=True).sum().item() == 3


@on_npu()
def test_autocast_and_saving(tmp_path):
    a = torch.randn(4, 4, device="npu")
    with torch.autocast("npu", torch.bfloat16):
        assert (a @ a).dtype is torch.bfloat16 and (a @ a).softmax(-1).dtype is torch.float32
    assert (a @ a).dtype is torch.float32
    torch.save(a, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt").device.type == "npu" and torch.equal(
        torch.load(tmp_path / "a.pt", map_location="cpu"), a.cpu()
    )


@on_npu()
def test_what_has_no_kernel_is_named():
    library = torch.library.Library("soft_npu_test", "DEF")
    library.define("nothing(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match="no kernel for soft_npu_test::nothing"):
        torch.ops.soft_npu_test.nothing(torch.ones(1, device="npu"))


HOLDS = """
import sys, torch
held = torch.empty({mib} << 20, dtype=torch.uint8, device="npu:{device}")
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.mark.long
@on_npu()
def test_processes_that_share_a_die_share_its_memory(tmp_path):
    """What one holds the others have not, until it ends, however it ends."""
    import os
    import subprocess
    import sys

    environment = os.environ | {
        "PYTHONPATH": SITE,
        "SOFTWARE_NPU_MEMORY_MB": "64",
        "SOFTWARE_NPU_COUNT": "3",
        "SOFTWARE_NPU_MEMORY_FILE": str(tmp_path / "memory"),
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}

    def holder(mib, device, **more):
        command = [sys.executable, "-c", HOLDS.format(mib=mib, device=device)]
        return subprocess.Popen(command, env=environment | more, stderr=subprocess.STDOUT, **pipes)

    first = holder(40, 0, ASCEND_RT_VISIBLE_DEVICES="2,1")  # die 2 by its number
    assert first.stdout.readline() == "taken\n"
    elsewhere = holder(40, 0)
    assert elsewhere.stdout.readline() == "taken\n"
    elsewhere.communicate()
    refused = holder(30, 2)
    said = refused.communicate()[0]
    assert refused.returncode == 1
    assert (
        "Tried to allocate 30.00 MiB (NPU 2; 64.00 MiB total capacity; "
        "0.00 KiB already allocated; 24.00 MiB free; "
    ) in said
    assert "other processes hold 40.00 MiB" in said
    fits = holder(24, 2)
    assert fits.stdout.readline() == "taken\n"
    first.kill()
    first.communicate()
    second = holder(40, 2)
    assert second.stdout.readline() == "taken\n"
    os.environ |= environment  # this fork of a process that has only imported torch
    assert torch.npu.mem_get_info(2) == (0, 64 * MiB) and torch.npu.mem_get_info(0)[0] == 64 * MiB
    for process in (fits, second):
        process.communicate()
    assert torch.npu.mem_get_info(2)[0] == 64 * MiB
    from software_npu import _C

    assert [_C.die_peak_bytes(die) >> 20 for die in range(3)] == [40, 0, 64]


@on_npu()
def test_another_process_maps_what_a_tensor_shares():
    """By the functions verl's transfer of weights uses: both see what either writes; the first one pays."""
    import os
    import pickle
    import subprocess
    import sys

    from torch.multiprocessing.reductions import reduce_tensor

    buffer = torch.arange(6, dtype=torch.int32, device="npu:1").view(2, 3)
    view, used = buffer[1], torch.npu.memory_allocated(1)
    handle = reduce_tensor(view)
    assert reduce_tensor(buffer)[1][7] == handle[1][7] and torch.npu.memory_allocated(1) == used
    assert buffer.tolist() == [[0, 1, 2], [3, 4, 5]]
    program = """
import pickle, sys, torch
function, args = pickle.load(sys.stdin.buffer)
args = list(args)
args[6] = 0
seen = function(*args)
assert seen.device == torch.device("npu:0") and seen.tolist() == [3, 4, 5] and seen.dtype is torch.int32
assert torch.npu.memory_allocated(0) == 0
seen.mul_(2)
"""
    environment = os.environ | {"PYTHONPATH": SITE}
    command = [sys.executable, "-c", program]
    other = subprocess.run(
        command, env=environment, input=pickle.dumps(handle), capture_output=True, check=False
    )
    assert other.returncode == 0, other.stderr.decode()[-2000:]
    assert buffer.tolist() == [[0, 1, 2], [6, 8, 10]] and view.tolist() == [6, 8, 10]
    files = set(os.listdir("/proc/self/fd"))
    del buffer, view
    assert torch.npu.memory_allocated(1) == 0 and len(files - set(os.listdir("/proc/self/fd"))) == 1
    os.environ["SOFTWARE_NPU_DRIVER"] = "25.2.0"
    with pytest.raises(RuntimeError, match=r"driver 25\.2\.0 cannot share memory"):
        reduce_tensor(torch.ones(1, device="npu"))
