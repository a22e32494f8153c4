"""launch/agreement.py: launchers on several hosts, of which one has something else than the head.

All is real but the hosts, which are network namespaces (test_launcher.py). No Ray is started: who differs is
refused before.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from test_launcher import Hosts, Launch, need_netns

from ascend_rl.launch import agreement
from ascend_rl.launch.rendezvous import Head, RendezvousError, Worker

SCRIPTS = ("internal/train_gspo_qwen3_tiny_cpu.sh", "internal/cpu_env.sh")
EDIT = """
    mount -t tmpfs none {layer} && mkdir {layer}/upper {layer}/work {layer}/data {layer}/data-work
    mount -t overlay none -o lowerdir={root},upperdir={layer}/upper,workdir={layer}/work {root}
    mount -t overlay none -o lowerdir=/usr/local,upperdir={layer}/data,workdir={layer}/data-work /usr/local
    cd {root}
    for what in driver firmware; do
        mkdir -p /usr/local/Ascend/$what
        echo "version=25.9.9" >/usr/local/Ascend/$what/version.info
    done
    echo "# edited" | tee -a ascend_rl/recipe/tiny.py frameworks/verl/verl/__init__.py >>{script}
    echo more >>data/tiny/train.parquet
"""


@pytest.fixture
def hosts(root, tiny, tmp_path):
    need_netns()
    made = Hosts(root, tmp_path, 2)
    yield made
    made.close()


def start(h: Hosts, host: int, *overrides: str, before: str = "", **variables) -> Launch:
    """The recipe on a host, after some lines of bash in a mount namespace of its own."""
    console = h.directory / f"console-{len(h.launches)}"
    command = f"{before}\nexec bash ray_start_npu.sh {' '.join([*SCRIPTS, *overrides])}"
    given = {"MASTER_ADDR": h.address(1), "NNODES": 4, "SKIP_PREFLIGHT": 0} | variables
    process = h.inside(host, "unshare", "-m", "bash", "-euc", command, console=console, **given)
    h.launches.append(Launch(process, console))
    return h.launches[-1]


def test_a_node_that_differs_is_refused_before_ray_starts(hosts, root, tmp_path):
    """By what, on which node, with both values; the head waits on, and takes it once it is corrected."""
    h, saves = hosts, "trainer.save_freq=5"
    quick = {"SKIP_PREFLIGHT": 1}  # of a worker: no preflight there, but the head compares all the same
    head = start(h, 1, saves)
    head.until("1 of 4 nodes are here")
    offered = list((tmp_path / "out/checkpoints").iterdir())
    assert len(offered) == 1

    layer = tmp_path / "layer"
    layer.mkdir()
    edit = EDIT.format(root=root, layer=layer, script=SCRIPTS[0])
    code, text = start(h, 2, saves, before=edit, **quick).end()
    assert code == 1
    for name in (
        "this repository",
        "frameworks/verl",
        "TRAIN_SCRIPT",
        f"path {root}/data/tiny/train.parquet",
    ):
        assert f"\n  {name} is " in text, text
    for name in ("driver", "firmware"):
        assert f"\n  {name} is 25.9.9 there and none on the head: install one HDK release" in text, text
    for name in ("frameworks/vllm is", "override ", "variable "):
        assert f"\n  {name}" not in text, text

    other = {
        "VLLM_CPU_KVCACHE_SPACE": "7",
        "HCCL_BUFFSIZE": "99",
        "VLLM_API_KEY": "hush",
        "HCCL_IF_IP": "1.1.1.1",
    }
    code, text = start(h, 2, saves, "data.train_batch_size=8", "algorithm.gamma=0.5", **other, **quick).end()
    assert code == 1 and "hush" not in text + head.text() and "_IP" not in text
    for sentence in (
        "variable VLLM_CPU_KVCACHE_SPACE is 7 there and 1 on the head: set it alike on all nodes",
        "variable HCCL_BUFFSIZE is 99 there and none on the head",
        "override data.train_batch_size is 8 there and 16 on the head: give the same overrides",
        "override algorithm.gamma is 0.5 there and none on the head",
    ):
        assert f"\n  {sentence}" in text, text
    assert f"{h.address(2)} was refused: \n  " in head.until("HCCL_BUFFSIZE is 99")

    away = f"mount -t tmpfs none {tmp_path}/out"
    code, text = start(h, 2, saves, before=away, **quick).end()
    assert code == 1 and f"{tmp_path}/out/checkpoints is not the head's: a file written there is" in text, (
        text
    )
    assert "on tmpfs (local to the container)" in text
    read_only = f"mount --bind {tmp_path}/out {tmp_path}/out; mount -o remount,bind,ro {tmp_path}/out"
    code, text = start(h, 2, saves, before=read_only, **quick).end()
    assert code == 1 and f"no checkpoint can be written to {tmp_path}/out/checkpoints here: Read-only" in text

    late = tmp_path / "late"
    late.mkdir()
    (late / "sitecustomize.py").write_text("import time\nnow = time.time\ntime.time = lambda: now() - 60\n")
    code, text = start(h, 2, saves, PYTHONPATH=late, **quick).end()
    assert code == 1 and "s behind the head's: set both by NTP" in text, text

    same = start(h, 2, saves, HCCL_IF_IP="1.1.1.1", RAY_num_x_PATH="here", **quick)
    head.until(f"2 of 4 nodes are here: {os.uname().nodename} ({h.address(1)}), ")
    for launch in (head, same):
        launch.send(signal.SIGTERM)
    head.end()
    same.end()
    assert not offered[0].exists()


def test_a_head_that_cannot_write_checkpoints_ends_immediately(hosts, tmp_path):
    (tmp_path / "file").touch()
    where = f"trainer.default_local_dir={tmp_path}/file/checkpoints"
    plain = (tmp_path / "out").exists()
    code, text = start(hosts, 1, "trainer.save_freq=5", where, SKIP_PREFLIGHT=0).end()
    assert code == 1 and f"no checkpoint can be written to {tmp_path}/file/checkpoints: Not a dir" in text, (
        text
    )
    assert not plain


HEAD = {
    "this repository": "aa",
    "frameworks/vllm": "bb",
    "package torch": "2.9.1",
    "driver": "25.5",
    "firmware": "7.8",
    "CANN": "8.5",
    "TRAIN_SCRIPT": "x.sh cc",
    "ENV_SCRIPT": "none",
    "override n": "4",
    "variable HCCL_BUFFSIZE": "512",
    "path /model": "9 files of 99 bytes",
}


@pytest.mark.parametrize("name", [*HEAD, "clock", "nothing"])
def test_the_rendezvous_refuses_for_each_alone(name):
    """Over a connection, with a judge as the launcher's."""
    node = {key: "other" if key == name else value for key, value in HEAD.items()}
    head = Head(
        "127.0.0.1",
        0,
        "x" * 16,
        {"name": "h", "address": "a", "rank": "", "has": "", "must_equal": {}},
        3,
        5,
        "facts",
        lambda there, ahead_s: agreement.differences(HEAD, there["answer"], ahead_s + 60 * (name == "clock")),
    )
    me = {"name": "w", "address": "b", "rank": "", "has": "", "must_equal": {}}
    worker = Worker("127.0.0.1", head.listener.getsockname()[1], "x" * 16, me, 5, lambda ask: node)
    try:
        if name == "nothing":
            assert worker._connect()
        else:
            what = "its clock is 60 s ahead of" if name == "clock" else f"{name} is other there and"
            with pytest.raises(RendezvousError, match=what) as refused:
                worker._connect()
            assert str(refused.value).count("\n") == 1
    finally:
        head.finish(1, "", 0)


def test_sizes_see_what_a_copy_lacks(tmp_path):
    """Files in folders count; hidden ones, which a download leaves, do not."""
    (tmp_path / "model/part").mkdir(parents=True)
    (tmp_path / "model/part/a").write_bytes(bytes(5))
    (tmp_path / "model/.cache").mkdir()
    (tmp_path / "model/.cache/b").write_bytes(bytes(7))
    assert agreement.size(tmp_path / "model") == "1 files of 5 bytes"
    assert agreement.size(tmp_path / "model/part/a") == "5 bytes"
    assert agreement.size(tmp_path / "nothing") == "none"
    assert agreement.filesystem(Path("/proc/self")) == "proc"
