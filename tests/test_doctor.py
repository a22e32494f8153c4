"""The node doctor: each check on facts that differ in one thing from those of a good node, and real nodes.

Real: this machine, with stubs for npu-smi and hccn_tool (tests/stubs/bin); two checkouts, each in its own
process; a Ray cluster of one node.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import socket
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from ascend_rl.lint.findings import Finding, as_json, render
from ascend_rl.preflight import cluster, doctor, node_facts, preflight
from ascend_rl.preflight.node_facts import collect, load_lock, rollout_facts

LOCK = load_lock()


def stub_env(root, machine: str, **more: str) -> dict[str, str]:
    """An environment in which npu-smi and hccn_tool print what they print on `machine`."""
    path = f"{root}/tests/stubs/bin:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "NPU_SAMPLES": str(root / "tests/samples" / machine), **more}


@pytest.fixture(scope="module")
def ascend(root, tmp_path_factory):
    """A function: facts of this machine with the dies, driver and CANN of a sample, without the trees."""
    empty = tmp_path_factory.mktemp("checkout")
    (empty / "patches").mkdir()
    shutil.copy(root / "patches/sources.py", empty / "patches")
    shutil.copy(root / "frameworks.lock", empty)

    def look(machine: str, **more: str) -> dict:
        home = tmp_path_factory.mktemp(machine)
        samples = root / "tests/samples" / machine
        toolkit = home / f"cann/{os.uname().machine}-linux"
        toolkit.mkdir(parents=True)
        (home / "driver").mkdir()
        if (samples / "driver_version.info").exists():
            shutil.copy(samples / "driver_version.info", home / "driver/version.info")
            shutil.copy(samples / "ascend_toolkit_install.info", toolkit)
        return collect(stub_env(root, machine, **more), root=empty, ascend=home)

    return look


@pytest.fixture(scope="module")
def good(root, ascend) -> dict:
    """Facts of a faultless node: dies, driver and CANN as the stubs show them, the rest made up."""
    facts = ascend("a3_healthy")
    lines = (root / "requirements.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if "==" in line)
    packages = {name.lower().replace("-", "_"): version.split(";")[0].strip() for name, version in pins}
    trees = {
        name: {"hash": table["tree"], "expected": f"/x/{name}", "imported": f"/x/{name}", "also": []}
        for name, table in LOCK.items()
        if "package" in table
    }
    disk = {"path": "/x", "free": 3e12, "total": 4e12}
    return facts | {
        "host": "node0",
        "address": "10.0.0.1",
        "packages": packages,
        "python": "3.11.9",
        "trees": trees,
        "devices": 16,
        "rollout": {
            "chip": facts["rollout"]["chip"],
            "series": "A3",
            "platforms": ["vllm_ascend"],
            "torch_npu": "",
        },
        "open_files": [1048576, 1048576],
        "disks": {"output": disk, "tmp": disk, "shm": disk},
        "ports": {},
        "memory": {"total": 2e12, "huge_free": 0, "transparent": "madvise"},
        "port_range": [32768, 59999],
        "reserved_ports": "",
        "env": {},
        "proxies": {},
        "absent": [],
    }


def found(findings: list[Finding]) -> set[tuple[str, str]]:
    return {(finding.severity, finding.check) for finding in findings}


# One node.


def test_a_good_node_has_no_findings(good):
    assert doctor.judge_node(good, LOCK) == []
    assert (len(good["dies"]), good["driver"], good["cann"]) == (16, "25.3.rc1", "8.5.0")
    assert good["rollout"]["chip"] == "ascend910_9391" and "mooncake" not in good["packages"]


def test_a_faulty_node(ascend, good):
    """Everything wrong in tests/samples/a3_faulty is found, on the right die, and nothing else."""
    facts = ascend("a3_faulty")
    facts = good | {name: facts[name] for name in ("dies", "processes", "driver", "cann")}
    findings = doctor.judge_node(facts, LOCK)
    assert [(f.severity, f.check, f.where.removeprefix("node0").strip()) for f in findings] == [
        ("error", "versions.cann", ""),
        ("error", "versions.driver", ""),
        ("error", "npu.health", "die 3 (NPU 1 chip 1)"),
        ("error", "npu.process", "die 6 (NPU 3 chip 0)"),
        ("error", "npu.process", "die 7 (NPU 3 chip 1)"),
        ("error", "npu.hbm", "die 10 (NPU 5 chip 0)"),
        ("warning", "npu.health", "die 12 (NPU 6 chip 0)"),
        ("error", "npu.firmware", "dies 0-15"),
        ("warning", "npu.link", "die 4"),
        ("warning", "npu.address", "die 14"),
        ("warning", "npu.net_health", "die 4"),
        ("error", "npu.tls", "die 9"),
    ]
    texts = {finding.where: finding.why for finding in findings}
    assert "80E01801" in texts["node0 die 3 (NPU 1 chip 1)"]
    assert "VLLMWorker_TP (pid 52417, 55010 MB)" in texts["node0 die 6 (NPU 3 chip 0)"]
    assert "61022 of 65536 MB" in texts["node0 die 10 (NPU 5 chip 0)"]
    assert "AI cores 71% busy" in texts["node0 die 10 (NPU 5 chip 0)"]


def test_an_a2_node_without_hccs(ascend, good):
    """Without HCCS to other nodes a RoCE link that is down is an error, when there are other nodes."""
    seen = ascend("a2_busy")
    facts = good | {"dies": seen["dies"], "processes": seen["processes"]}
    assert found(doctor.judge_node(facts, LOCK)) == {("error", "npu.process")}
    facts = copy.deepcopy(facts) | {"processes": []}
    facts["dies"][5] |= {"hbm_used_mb": 3400}
    facts["dies"][2]["network"] |= {"link": "DOWN"}
    assert found(doctor.judge_node(facts, LOCK)) == {("warning", "npu.link")}
    assert found(doctor.judge_node(facts | {"env": {"NNODES": "2"}}, LOCK)) == {("error", "npu.link")}


def test_only_visible_dies_count(ascend):
    """Another user's dies on a shared node are none of our business."""
    facts = ascend("a3_faulty", ASCEND_RT_VISIBLE_DEVICES="0,1,2,5")
    assert [die["index"] for die in facts["dies"]] == [0, 1, 2, 5] and facts["processes"] == []
    assert {die["health"] for die in facts["dies"]} == {"OK"}


def test_a_driver_that_lets_nobody_in(ascend, good):
    facts = ascend("no_driver")
    assert facts["dies"] == []
    assert {what for what, _ in facts["absent"]} == {"npu-smi", "driver", "CANN"}
    findings = doctor.judge_node(good | {"dies": [], "absent": facts["absent"]}, LOCK)
    assert found(findings) == {("error", "npu.driver"), ("info", "absent.driver"), ("info", "absent.CANN")}
    assert "ret is -8020" in findings[0].why


def test_absent_tools_cost_one_line_each(good):
    absent = [("npu-smi", "npu-smi is not on PATH"), ("hccn_tool", "hccn_tool is not on PATH")]
    findings = doctor.judge_node(good | {"absent": absent}, LOCK)
    assert [(f.severity, f.check) for f in findings] == [
        ("info", "absent.npu-smi"),
        ("info", "absent.hccn_tool"),
    ]


def disk(**sizes: float) -> dict:
    return {"path": "/x", "free": 3e12, "total": 4e12} | sizes


@pytest.mark.parametrize(
    "path, value, expected",
    [
        ("packages.torch", "2.9.1", ("error", "versions.package")),
        ("packages.torch", "2.8.0+cpu", None),
        ("packages.torch_npu", "2.8.0", ("error", "versions.package")),
        ("packages.transformers", "4.57.1", ("warning", "versions.package")),
        ("packages.vllm_ascend", "0.12.0", ("warning", "versions.package")),
        ("packages.triton", "3.2.0", ("warning", "versions.triton")),
        ("python", "3.10.1", ("error", "versions.package")),
        ("python", "3.110.0", ("error", "versions.package")),
        ("driver", "25.3.1", None),
        ("driver", "25.30", ("warning", "versions.driver")),
        ("driver", "24.1.rc3.7", ("error", "versions.driver")),
        ("cann", "8.5.1", ("error", "versions.cann")),
        ("trees.verl.hash", "0" * 64, ("error", "code.tree")),
        ("trees.mindspeed", None, ("error", "code.tree")),
        ("trees.roll", None, ("info", "code.tree")),
        ("trees.megatron.also", ["/usr/lib/megatron"], ("error", "code.import")),
        ("rollout.series", "A2", ("error", "rollout.build")),
        ("rollout.series", None, ("error", "rollout.build")),
        ("rollout.chip", None, None),
        ("rollout.platforms", [], ("error", "rollout.platform")),
        ("rollout.platforms", ["vllm_ascend", "vllm_other"], ("error", "rollout.platform")),
        ("rollout.torch_npu", "libatb.so: undefined symbol: x", ("error", "rollout.torch_npu")),
        ("trees.vllm_ascend.imported", "/usr/lib/vllm_ascend", ("error", "code.import")),
        ("trees.vllm_ascend.imported", None, ("error", "code.import")),
        ("env.NPUS_PER_NODE", "16", None),
        ("env.NPUS_PER_NODE", "32", ("error", "npu.count")),
        ("dies.0.network.vnic_link", "DOWN", ("error", "npu.hccs")),
        ("dies.0.network.net_health", "Init", None),
        ("dies.0.hbm_used_mb", None, None),
        ("open_files", [1024, 1048576], ("warning", "host.open_files")),
        ("open_files", [-1, -1], None),
        ("disks.shm", disk(total=64 * 2**20), ("error", "host.shm")),
        ("disks.shm", disk(total=32e9), ("warning", "host.shm")),
        ("disks.output", disk(free=1e9), ("error", "host.output")),
        ("disks.output", disk(free=100e9), ("warning", "host.output")),
        ("disks.tmp", disk(free=0.04 * 4e12), ("error", "host.tmp")),
        ("memory.huge_free", 0.5e12, ("warning", "host.huge_pages")),
        ("memory.transparent", "never", ("info", "host.huge_pages")),
        ("port_range", [32768, 60999], ("warning", "host.hccl_ports")),
        ("ports", {60015: "nginx (pid 7)"}, ("error", "host.hccl_ports")),
        ("ports", {60016: "nginx (pid 7)"}, None),
        ("proxies", {"https_proxy": "http://p:3128"}, ("warning", "host.proxy")),
        ("proxies", {"https_proxy": "http://p:3128", "no_proxy": "127.0.0.1,10.0.0.1"}, None),
        (
            "proxies",
            {"all_proxy": "http://p:1", "no_proxy": "127.0.0.1,10.0.0.0/8"},
            ("warning", "host.proxy"),
        ),
        ("proxies", {"no_proxy": "localhost"}, None),
    ],
)
def test_one_thing_is_wrong(good, path, value, expected):
    """And only that is reported."""
    facts = copy.deepcopy(good)
    *parents, last = path.split(".")
    place = facts
    for name in parents:
        place = place[int(name) if isinstance(place, list) else name]
    if value is None and parents == ["trees"]:
        del place[last]
    else:
        place[last] = value
    assert found(doctor.judge_node(facts, LOCK)) == ({expected} if expected else set())


def test_dies_that_are_wanted_need_device_nodes(good):
    bare = good | {"devices": 0}
    assert doctor.judge_node(bare, LOCK) == []
    wanted = bare | {"env": {"NPUS_PER_NODE": "16"}}
    assert found(doctor.judge_node(wanted, LOCK)) == {("error", "npu.devices")}
    assert "run_container.sh" in doctor.judge_node(wanted, LOCK)[0].fix


def test_atb_operators_that_do_not_load_are_told_from_the_outside(tmp_path):
    """As Ascend/pytorch#99 shows it: torch_npu imports, its ATB operators do not."""
    atb = tmp_path / "torch_npu/op_plugin/atb"
    atb.mkdir(parents=True)
    for package in (atb, atb.parent, atb.parent.parent):
        (package / "__init__.py").touch()
    module = atb / "_atb_ops.py"
    module.write_text("raise OSError('libtbe_adapter.so: undefined symbol: _ZN3Mki2Dl')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        facts = rollout_facts(env)
        module.write_text("")
        assert rollout_facts(env)["torch_npu"] == ""
    assert facts["torch_npu"] == "OSError: libtbe_adapter.so: undefined symbol: _ZN3Mki2Dl"


def test_ports_of_hccl_follow_the_setting(good):
    busy = good | {"port_range": [32768, 65535], "ports": {64030: "nginx (pid 7)"}}
    assert found(doctor.judge_node(busy | {"env": {"HCCL_IF_BASE_PORT": "64021"}}, LOCK)) == {
        ("error", "host.hccl_ports"),
        ("warning", "host.hccl_ports"),
    }
    kept = busy | {"env": {"HCCL_IF_BASE_PORT": "64021"}, "ports": {}, "reserved_ports": "22,64021-64036"}
    assert doctor.judge_node(kept, LOCK) == []
    assert found(doctor.judge_node(kept | {"reserved_ports": "64021-64035"}, LOCK)) == {
        ("warning", "host.hccl_ports")
    }
    auto = busy | {"env": {"HCCL_IF_BASE_PORT": "64021", "HCCL_HOST_SOCKET_PORT_RANGE": "auto"}}
    assert doctor.judge_node(auto, LOCK) == []


def test_rays_ports_matter_on_the_head_node_only(good):
    taken = good | {"env": {"MASTER_PORT": "6379"}, "ports": {6379: "gcs_server (pid 9)"}}
    [finding] = doctor.judge_node(taken, LOCK)
    assert finding.check == "host.port" and "gcs_server (pid 9)" in finding.why
    assert doctor.judge_node(taken | {"is_master": False}, LOCK) == []


# Looking at this machine.


def test_this_machine_is_seen_as_it_is(root, monkeypatch):
    """Against independent readings: git, a socket of ours, the resource limits of a child."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        facts = collect(dict(os.environ) | {"HTTP_PROXY": "http://p:1", "OUTPUT_DIR": "/nonexistent/x"})
    assert port in facts["ports"]
    limit = subprocess.run(["bash", "-c", "ulimit -Sn"], capture_output=True, text=True, check=True).stdout
    assert str(facts["open_files"][0]) == limit.strip() or limit.strip() == "unlimited"
    assert facts["disks"]["output"] == {
        "path": "/nonexistent/x",
        "free": facts["disks"]["output"]["free"],
        "total": shutil.disk_usage("/").total,
    }
    assert facts["proxies"]["http_proxy"] == "http://p:1"
    assert facts["packages"]["rich"]
    assert node_facts.is_local("127.0.0.1") and not node_facts.is_local("192.0.2.77")
    assert {name: tree["hash"] for name, tree in facts["trees"].items()} == {
        name: LOCK[name]["tree"] for name in facts["trees"]
    }
    assert len(facts["trees"]) >= 4
    json.dumps(facts)


def test_a_port_without_a_listener_and_one_with():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert node_facts.connect("127.0.0.1", port) == ""
    assert "refused" in node_facts.connect("127.0.0.1", port)


def test_clock_offset_takes_the_fastest_answer(monkeypatch):
    """A clock 100 s ahead, asked over a line whose way back is slow at times."""
    now = [1000.0]
    monkeypatch.setattr(node_facts.time, "time", lambda: now[0])
    delays = iter([(0.1, 3.0), (0.2, 0.2), (1.0, 0.1)])

    def ask() -> float:
        there, back = next(delays)
        now[0] += there
        answer = now[0] + 100.0
        now[0] += back
        return answer

    offset, uncertainty = node_facts.clock_offset(ask, tries=3)
    assert (offset, uncertainty) == (pytest.approx(100.0), pytest.approx(0.2))


def test_dies_ping_over_either_network(root, monkeypatch):
    """HCCS first, then RoCE; after partial loss a second try; a die with the same address is not a peer."""
    env = stub_env(root, "a3_healthy")
    die = {"index": 2, "network": {"vnic": "192.168.10.2", "ip": "29.1.100.2"}}
    peer = {"index": 2, "network": {"vnic": "192.168.11.2", "ip": "29.1.101.2"}}
    assert node_facts.ping_die(die, peer, env) == ""
    why = node_facts.ping_die(die, peer, stub_env(root, "a3_faulty"))
    assert why == "-hccs_ping 192.168.11.2: 100% of packets lost; -ping 29.1.101.2: 100% of packets lost"
    assert node_facts.ping_die(die, {"index": 2, "network": {"vnic": None, "ip": "29.1.101.2"}}, env) == ""
    assert "no addresses of one network" in node_facts.ping_die(die, die, env)


# Several nodes.


@pytest.fixture
def nodes(good) -> list[dict]:
    """Three good nodes that reach each other."""
    found = []
    for index in range(3):
        facts = copy.deepcopy(good) | {
            "host": f"node{index}",
            "address": f"10.0.0.{index + 1}",
            "ray_npus": 16,
            "clock_offset_s": 0.01 * index,
            "clock_error_s": 0.01,
        }
        facts["reach"] = [
            {"host": f"node{other}", "address": f"10.0.0.{other + 1}", "tcp": "", "icmp": None, "dies": {}}
            for other in range(3)
            if other != index
        ]
        for die in facts["dies"]:
            die["network"]["ip"] = f"29.1.{index}.{die['index'] + 1}"
        found.append(facts)
    return found


def test_good_nodes_have_no_findings(nodes):
    assert cluster.judge_cluster(nodes, LOCK) == []


def spoil_code(facts):
    facts["code"] = {"hash": "f" * 64, "commit": "abcdef1234"}


def spoil_package(facts):
    facts["packages"]["numpy"] = "1.26.3"


def spoil_clock(facts):
    facts["clock_offset_s"] = -90.0


def spoil_tls(facts):
    for die in facts["dies"]:
        die["network"]["tls"] = 1


def spoil_firmware(facts):
    facts["dies"][4]["firmware"] = "7.1.0.3.220"


def spoil_address(facts):
    facts["dies"][0]["network"]["ip"] = "29.1.0.1"


def spoil_kind(facts):
    facts |= {"target": "cpu", "dies": [], "driver": None, "cann": None}


def spoil_tcp(facts):
    facts["reach"][0] |= {"tcp": "No route to host", "icmp": False}


def spoil_ping(facts):
    facts["reach"][1]["dies"] = {
        0: "-ping 29.1.1.1: 100% of packets lost",
        1: "-ping 29.1.1.2: 100% of packets lost",
        7: "-ping 29.1.1.8: 33% of packets lost",
    }


@pytest.mark.parametrize(
    "spoil, check, where, said",
    [
        (spoil_code, "code", "node2", "(commit abcdef123)"),
        (lambda facts: facts["trees"].pop("verl"), "tree", "node2", "frameworks/verl is missing"),
        (spoil_package, "packages", "node2", "numpy 1.26.3 (most: "),
        (lambda facts: facts.update(os="another"), "os", "node2", "the system is another"),
        (lambda facts: facts.update(driver="25.3.1"), "driver", "node2", "is 25.3.1, on most nodes 25.3.rc1"),
        (lambda facts: facts["dies"].pop(), "dies", "node2", "is 15, on most nodes 16"),
        (spoil_clock, "clock", "node2", "90.0 s behind"),
        (spoil_tls, "tls", "node2", "TLS between dies is 1, on most nodes 0"),
        (spoil_firmware, "firmware", "node2", "7.1.0.3.220, 7.8.0.2.212, on most nodes 7.8.0.2.212"),
        (spoil_address, "address", "node0 die 0, node2 die 0", "29.1.0.1"),
        (spoil_kind, "kind", "node2", "cpu, on most nodes ascend"),
        (spoil_tcp, "tcp", "node2 -> node0 (10.0.0.1)", "No route to host; it does not answer ping either"),
        (spoil_ping, "npu_ping", "node2 -> node1 (10.0.0.2)", "dies 0-1 cannot reach"),
        (lambda facts: facts.update(ray_npus=0), "ray_npus", "node2", "Ray has 0 NPUs there, 16 dies"),
    ],
)
def test_the_odd_node_is_named(nodes, spoil, check, where, said):
    spoil(nodes[2])
    together = [f for f in cluster.judge_cluster(nodes, LOCK) if f.check.startswith("cluster.")]
    expected = [f for f in together if f.check == f"cluster.{check}" and f.where == where and said in f.why]
    assert expected, together
    others = {f.check for f in together} - {f"cluster.{check}"}
    assert others <= ({"cluster.ray_npus"} if check == "dies" else set())


def test_an_unknown_value_is_no_difference(nodes):
    """A node whose container hides the driver and hccn_tool."""
    nodes[1] |= {"driver": None, "absent": []}
    for die in nodes[1]["dies"]:
        die["network"] = {"failed": "hccn_tool is not on PATH"}
    assert cluster.judge_cluster(nodes, LOCK) == []


def test_equal_findings_of_nodes_are_joined(nodes):
    for facts in nodes[:2]:
        facts["open_files"] = [1024, 1024]
    [finding] = cluster.judge_cluster(nodes, LOCK)
    assert (finding.check, finding.where) == ("host.open_files", "node0, node1")


def test_two_checkouts_that_differ(root, tmp_path):
    """Each inspects itself in its own process; an uncommitted edit differs, a cache file does not."""
    lock = '[toy]\npackage = "toy"\ntag = "v1"\nversion = "1"\ntree = "TREE"\n'
    processes = []
    for name in ("a", "b"):
        checkout = tmp_path / name
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / "ascend_rl", checkout / "ascend_rl", ignore=ignore)
        (checkout / "patches").mkdir()
        shutil.copy(root / "patches/sources.py", checkout / "patches")
        (checkout / "frameworks.lock").write_text(lock)
        (checkout / "frameworks/toy/toy").mkdir(parents=True)
        (checkout / "frameworks/toy/toy/__init__.py").write_text("x = 1\n")
    (tmp_path / "b/frameworks/toy/toy/__init__.py").write_text("x = 2\n")
    (tmp_path / "b/ascend_rl/loss/gspo.py").open("a").write("# edited\n")
    (tmp_path / "a/ascend_rl/__pycache__").mkdir()
    (tmp_path / "a/ascend_rl/__pycache__/x.pyc").write_bytes(b"x")
    code = "import json; from ascend_rl.preflight.node_facts import collect; print(json.dumps(collect()))"
    for name in ("a", "b"):
        paths = f"{tmp_path / name}:{tmp_path / name}/frameworks/toy"
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                stdout=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": paths},
            )
        )
    seen = [json.loads(process.communicate(timeout=600)[0]) for process in processes]
    for index, facts in enumerate(seen):
        facts |= {"host": f"node{index}", "reach": [], "ray_npus": 0, "clock_offset_s": 0, "clock_error_s": 0}
        assert facts["trees"]["toy"]["imported"] == facts["trees"]["toy"]["expected"]
    findings = list(cluster.check_same(seen)) + list(cluster.check_packages(seen))
    assert [(f.check, f.where) for f in findings] == [("cluster.code", "node1"), ("cluster.tree", "node1")]


def test_nodes_reach_each_other(root, good, ascend, monkeypatch):
    """Over real connections, with stubs of dies: a good node to a faulty one, back, and to a dead one."""
    faulty = ascend("a3_faulty")
    with node_facts.listen("127.0.0.1") as server, node_facts.listen("127.0.0.1") as closed:
        port, dead = server.getsockname()[1], closed.getsockname()[1]
        closed.close()
        peers = [
            {"host": "a", "address": "127.0.0.1", "port": port, "dies": faulty["dies"]},
            {"host": "b", "address": "127.0.0.1", "port": dead, "dies": []},
        ]
        for name, value in stub_env(root, "a3_healthy").items():
            monkeypatch.setenv(name, value)
        there, lost = node_facts.reach(good["dies"], peers)
        monkeypatch.setenv("NPU_SAMPLES", str(root / "tests/samples/a3_faulty"))
        [back] = node_facts.reach(faulty["dies"], [peers[0] | {"dies": good["dies"]}])
    assert (there["host"], there["tcp"], there["dies"]) == ("a", "", {})
    assert "refused" in lost["tcp"] and lost["icmp"] in (True, None)
    assert sorted(back["dies"]) == list(range(16)) and "100% of packets lost" in back["dies"][3]


def test_a_ray_cluster(root, start_ray, monkeypatch):
    """One node with ten visible dies; then the same without time to answer."""
    import ray

    for name, value in stub_env(root, "a3_healthy", ASCEND_RT_VISIBLE_DEVICES="0,1,2,3,4,5,6,7,8,9").items():
        monkeypatch.setenv(name, value)
    context = start_ray(
        num_cpus=1, resources={"NPU": 10}, object_store_memory=80_000_000, include_dashboard=False
    )
    try:
        nodes, failed = node_facts.survey(deadline_s=60)
        none, late = node_facts.survey(deadline_s=0)
    finally:
        ray.shutdown()
    [facts] = nodes
    assert (failed, none, late) == ({}, [], {facts["host"]: "no answer within 0 s"})
    assert f"{facts['address']}:" in context.address_info["gcs_address"]
    assert [die["index"] for die in facts["dies"]] == list(range(10))
    assert (facts["ray_npus"], facts["reach"], facts["target"]) == (10, [], "ascend")
    assert abs(facts["clock_offset_s"]) <= facts["clock_error_s"] + 0.05
    assert not [f for f in cluster.judge_cluster(nodes, LOCK) if f.check.startswith(("cluster.", "npu."))]


def test_a_cluster_that_is_not_there():
    """Said at once, and not after Ray's own deadline."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    timer = threading.Timer(20, os._exit, [3])
    timer.start()
    [finding] = preflight.examine_cluster(f"127.0.0.1:{port}", LOCK)
    timer.cancel()
    assert finding.severity == "error" and "nothing answers" in finding.why
    assert "RAY_ADDRESS" in preflight.examine_cluster(None, LOCK)[0].where


# The command.


def test_the_command_fails_on_an_error_and_says_what_to_do(root, tmp_path):
    script = tmp_path / "run_env.sh"
    script.write_text("echo noise; export NPUS_PER_NODE=32\n")
    overrides = ["internal/train_grpo_qwen3_tiny_cpu.sh", str(script)]
    args = preflight.parse([*overrides, "trainer.x=1", "+a.b=2"])
    assert args.overrides == ["trainer.x=1", "+a.b=2"]
    env, problems = preflight.sourced(str(script))
    assert (env["NPUS_PER_NODE"], problems) == ("32", [])
    command = [sys.executable, "-m", "ascend_rl.preflight", "--json"]
    result = subprocess.run(
        command, env=stub_env(root, "a3_faulty"), capture_output=True, text=True, check=False, timeout=600
    )
    findings = [Finding(**finding) for finding in json.loads(result.stdout)]
    assert result.returncode == 1, result.stderr
    assert ("error", "npu.health") in found(findings) and ("info", "absent.driver") in found(findings)
    severities = [finding.severity for finding in findings]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)


def test_the_command_on_a_machine_without_npus(capsys):
    """No error is made of what a CPU does not have."""
    status = preflight.main(["--json"])
    findings = [Finding(**finding) for finding in json.loads(capsys.readouterr().out)]
    assert ("info", "absent.NPUs") in found(findings)
    assert status == any(finding.severity == "error" for finding in findings)
    assert not [f for f in findings if f.check.startswith(("npu.", "versions.", "code."))]


def test_an_environment_script_that_fails_is_a_finding(tmp_path):
    script = tmp_path / "bad_env.sh"
    script.write_text('export A="$NOT_SET_ANYWHERE"\n')
    _, [finding] = preflight.sourced(str(script))
    assert finding.check == "env.script" and "NOT_SET_ANYWHERE" in finding.why


def test_the_table_shows_everything_as_it_is(capsys):
    findings = [
        Finding("info", "a.b", "node1", "[bold]not markup[/]", "q" * 300),
        Finding("error", "c.d", "node0", "why", "fix"),
    ]
    render(findings, Console(width=100))
    shown = capsys.readouterr().out
    assert shown.index("a.b") < shown.index("c.d") and shown.count("q") == 300
    assert "[bold]not markup[/]" in shown
    assert shown.splitlines()[-1] == "1 error, 0 warnings, 1 info"
    assert [finding["check"] for finding in json.loads(as_json(findings))] == ["c.d", "a.b"]
