"""The parsers of npu-smi and hccn_tool on sample output, and running the tools (tests/stubs/bin)."""

from __future__ import annotations

import os
import time

import pytest

from ascend_rl.host import npu_tools
from ascend_rl.host.npu_tools import Process, ToolError
from ascend_rl.launch import supervise


@pytest.fixture
def sample(root):
    return lambda name: (root / "tests/samples" / name).read_text()


@pytest.fixture
def env(root):
    path = f"{root}/tests/stubs/bin:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "NPU_SAMPLES": str(root / "tests/samples/a3_faulty")}


def test_an_a3_node_has_two_dies_an_npu(sample):
    dies, processes = npu_tools.parse_npu_smi(sample("a3_healthy/npu_smi_info.txt"))
    assert [(die.npu, die.chip, die.index) for die in dies] == [(i // 2, i % 2, i) for i in range(16)]
    assert {(die.name, die.health, die.hbm_total_mb) for die in dies} == {("Ascend910", "OK", 65536)}
    assert [die.hbm_used_mb for die in dies[:2]] == [3184, 2896]
    assert processes == []


def test_an_unhealthy_a3_node(sample):
    dies, processes = npu_tools.parse_npu_smi(sample("a3_faulty/npu_smi_info.txt"))
    assert {die.index: die.health for die in dies if die.health != "OK"} == {3: "Alarm", 12: "Warning"}
    assert {die.index: die.hbm_used_mb for die in dies if die.hbm_used_mb > 4096} == {
        6: 58211,
        7: 57940,
        10: 61022,
    }
    assert processes == [
        Process(3, 0, 52417, "VLLMWorker_TP", 55010),
        Process(3, 1, 52418, "VLLMWorker_TP", 55012),
    ]


def test_an_a2_node_of_a_newer_tool(sample):
    """No Phy-ID, no blank before the slash, a process without a name, one more column."""
    dies, processes = npu_tools.parse_npu_smi(sample("a2_busy/npu_smi_info.txt"))
    assert [(die.npu, die.chip, die.index) for die in dies] == [(i, 0, i) for i in range(8)]
    assert [die.hbm_used_mb for die in dies] == [3412] * 5 + [54873] + [3412] * 2
    assert processes == [Process(5, 0, 731942, "", 51410)]


def test_the_chip_is_named_as_its_compiler_names_it(env, root):
    for name, chip in (("a3_healthy", "ascend910_9391"), ("a2_busy", "ascend910b3")):
        assert npu_tools.chip_name(env | {"NPU_SAMPLES": str(root / "tests/samples" / name)}) == chip
    with pytest.raises(ToolError, match="dcmi"):
        npu_tools.chip_name(env | {"NPU_SAMPLES": str(root / "tests/samples/no_driver")})


def test_what_is_not_a_table_is_refused(sample):
    with pytest.raises(ToolError, match="dcmi model initialized failed"):
        npu_tools.parse_npu_smi(sample("no_driver/npu_smi_info.txt"))
    table = sample("a3_healthy/npu_smi_info.txt").splitlines()
    with pytest.raises(ToolError, match="no table of dies"):  # cut in the middle of the second die
        npu_tools.parse_npu_smi("\n".join(table[:10]))


def test_a_die_that_reports_no_memory_is_still_seen(sample):
    text = sample("a3_healthy/npu_smi_info.txt").replace("2896 / 65536", "NA   / NA   ", 1)
    dies, _ = npu_tools.parse_npu_smi(text)
    assert len(dies) == 16 and dies[1].hbm_used_mb is None and dies[3].hbm_used_mb == 2896


def test_fields_of_boards_and_chips(sample):
    [board] = npu_tools.parse_fields(sample("a3_faulty/npu_smi_board.txt"))
    assert (board["Firmware Version"], board["Compatibility"]) == ("7.7.0.1.231", "NOK")
    assert board["PCIe Bus Info"] == "0000:9D:00.0"  # a value may have colons
    chips = npu_tools.parse_fields(sample("a3_faulty/npu_smi_usages.txt"))
    assert [(chip["Chip ID"], chip["Aicore Usage Rate(%)"], chip["Chip Count"]) for chip in chips] == [
        ("0", "71", "2"),
        ("1", "0", "2"),
    ]
    [health] = npu_tools.parse_fields(sample("a3_faulty/npu_smi_health.txt"))
    assert (health["Health Status"], health["Error Code"]) == ("Alarm", "80E01801")


def test_version_files(sample):
    assert npu_tools.parse_equals(sample("a3_healthy/driver_version.info"))["version"] == "25.3.rc1"
    assert npu_tools.parse_equals(sample("a3_faulty/ascend_toolkit_install.info"))["version"] == "8.3.RC2"


@pytest.mark.parametrize(
    "reader, name, expected",
    [
        (npu_tools.parse_link, "a3_healthy/hccn_link.txt", "UP"),
        (npu_tools.parse_link, "a3_faulty/hccn_4_link.txt", "DOWN"),
        (npu_tools.parse_link, "a3_healthy/hccn_vnic.txt", "UP"),
        (npu_tools.parse_address, "a3_faulty/hccn_14_ip.txt", None),
        (npu_tools.parse_tls, "a3_healthy/hccn_tls.txt", 0),
        (npu_tools.parse_tls, "a3_faulty/hccn_9_tls.txt", 1),
        (npu_tools.parse_net_health, "a3_healthy/hccn_net_health.txt", "Success"),
        (npu_tools.parse_net_health, "a3_faulty/hccn_8_net_health.txt", "Init"),
        (npu_tools.parse_ping, "a3_healthy/hccn_ping.txt", 0),
        (npu_tools.parse_ping, "a3_healthy/hccn_hccs_ping.txt", 0),
        (npu_tools.parse_ping, "a3_faulty/hccn_ping.txt", 1),
        (npu_tools.parse_ping, "a3_faulty/hccn_hccs_ping.txt", 1),
    ],
)
def test_hccn_tool(sample, reader, name, expected):
    assert reader(sample(name)) == expected
    assert reader("") is None


def test_counters_of_hbm_and_links(sample):
    none = {"single_bit": 0, "double_bit": 0, "isolated_pages": 0, "pages_to_isolate": 0}
    assert npu_tools.parse_ecc(sample("a3_healthy/npu_smi_ecc.txt")) == {0: none, 1: none}
    assert npu_tools.parse_ecc(sample("a2_busy/npu_smi_ecc.txt")) == {0: none | {"single_bit": 3}}
    assert npu_tools.parse_link_stat(sample("a3_healthy/hccn_link_stat.txt")) == {
        "link_ups": 2,
        "link_downs": 1,
    }
    assert npu_tools.parse_link_stat(sample("a2_busy/hccn_link_stat.txt")) == {"link_ups": 2}
    assert npu_tools.parse_packet_errors(sample("a2_busy/hccn_stat.txt")) == 7
    unknown = "This device does not support querying ecc.\n"
    assert npu_tools.parse_ecc(unknown) == npu_tools.parse_link_stat(unknown) == {}
    assert npu_tools.parse_packet_errors(unknown) is None


def test_addresses_and_partial_loss():
    assert npu_tools.parse_address("ipaddr:29.1.100.3\nnetmask:255.255.0.0\n") == "29.1.100.3"
    assert npu_tools.parse_address("vnic link status: UP\nvnic ipaddr: 192.168.2.199\n") == "192.168.2.199"
    lossy = "recv time out seq=0\n3 packets transmitted, 2 received, 33.33% packet loss\n"
    assert npu_tools.parse_ping(lossy) == pytest.approx(1 / 3)


def test_tools_are_run_with_their_arguments(env):
    assert npu_tools.parse_tls(npu_tools.run(["hccn_tool", "-i", "9", "-tls", "-g"], env)) == 1
    assert npu_tools.parse_tls(npu_tools.run(["hccn_tool", "-i", "3", "-tls", "-g"], env)) == 0
    ping = ["hccn_tool", "-i", "3", "-ping", "-g", "address", "1.2.3.4"]
    assert "device 3 PING 1.2.3.4" in npu_tools.run(ping, env)


def test_a_tool_that_fails_or_is_absent(env):
    with pytest.raises(ToolError, match="status 1: hccn_tool: this device does not support this function"):
        npu_tools.run(["hccn_tool", "-i", "3", "-lldp", "-g"], env)
    with pytest.raises(ToolError, match="npu-smi is not on PATH"):
        npu_tools.run(["npu-smi", "info"], {"PATH": "/nonexistent"})


def test_a_tool_that_hangs_is_killed_with_its_children(env, tmp_path):
    started = time.monotonic()
    with pytest.raises(ToolError, match="did not answer within 0 s"):
        npu_tools.run(["npu-smi", "info"], {**env, "NPU_SMI_HANGS": str(tmp_path / "pid")}, deadline_s=0.3)
    assert time.monotonic() - started < 100
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 300
    while child in supervise.processes():
        assert time.monotonic() < deadline, "the child of the tool is still there"
        time.sleep(0.02)
