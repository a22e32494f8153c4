"""The environment of every test: a CPU run as internal/cpu_env.sh sets it, and the tiny model."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import warm
from hypothesis import HealthCheck, settings

from ascend_rl.process.counts import VARIABLE, counted
from ascend_rl.process.ports import free_port
from ascend_rl.settings.stack import DATA, DEFAULT, DIRECTORY, NAME

ROOT = Path(__file__).resolve().parent.parent
SERVERS, REAL_RUNS = "rollout servers", ("long real runs", "real runs")
# What one process runs, by a sign in the file: what forks for these tests starts once, and no two at a time
# have several rollout servers: those of three files took 19 of 24 GiB, and Ray ends processes where memory
# runs short.
TOGETHER = {
    SERVERS: "start_ray",
    "ranks with MindSpeed": "stubs=(MINDSPEED,)",
    "ranks": "run_ranks",
    "NPU engines": "npu_ground",
    "software NPU": "device_job",
}
CPU_S = pytest.StashKey[float]()
# Of another stack its own folder, and the files that both stacks run. The default one runs all other tests.
FOLDERS = {"cann9.1": "cann9_1"}
BOTH = set(Path(__file__).with_name("both_stacks.txt").read_text().splitlines())
CLONE_NEWNS = 0x00020000  # of linux/sched.h; os.unshare comes with Python 3.12

# Also with PYTHONDONTWRITEBYTECODE: compiling its tests is much of what pytest does before the first one.
sys.dont_write_bytecode = False

# Before anything imports vllm or torch: the variables of internal/cpu_env.sh.
_printed = subprocess.run(
    ["bash", "-c", f". {ROOT}/internal/cpu_env.sh && env -0"], check=True, capture_output=True
)
os.environ.update(entry.split("=", 1) for entry in _printed.stdout.decode().split("\0") if "=" in entry)
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
del os.environ["WARM_START"]  # for a launcher whose script sources cpu_env.sh
# On a loaded machine Ray's workers take minutes to start. By itself Ray lets all other processes go first.
os.environ |= {"RAY_worker_register_timeout_seconds": "600", "RAY_worker_niceness": "0"}

# Of several processes that run tests each has its own TMPDIR, as verl's weight sync names its socket there by
# the device, and where that is permitted its own /dev/shm: what killed processes leave is no other test's.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="t")
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)
    if ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)

# No limits of time in tests of properties: beside other load all is slow.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])

# On the path for this import alone: patches/megatron and patches/vllm_ascend would pass for these packages.
sys.path.append(str(ROOT / "patches"))
importlib.import_module("install")  # and with it ascend_build and sources
sys.path.remove(str(ROOT / "patches"))


def pytest_runtest_logreport(report):
    """Name what fails at once: a run that is cut off has no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} failed", file=sys.stderr, flush=True)


@pytest.fixture(autouse=True, scope="session")
def plugins():
    """Of a stack with plug-ins: those that vLLM loads when it starts an engine."""
    if NAME != DEFAULT:
        from vllm.plugins import load_general_plugins

        load_general_plugins()


@pytest.fixture(autouse=True)
def same_environment():
    """Each test starts with the same variables: Megatron (NVTE_*) and Ray (RAY_AUTH_MODE) leave some."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    before["PYTEST_CURRENT_TEST"] = after["PYTEST_CURRENT_TEST"]
    for name in after.keys() - before.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if after.get(name) != value})


@pytest.fixture(autouse=True, scope="module")
def no_groups_left():
    """After each file, destroy vLLM's groups: those of a dense model's engine have none for experts."""
    yield
    state = sys.modules.get("vllm.distributed.parallel_state")
    if state and state._WORLD:
        state.cleanup_dist_env_and_memory()


@pytest.fixture
def counts(tmp_path, monkeypatch):
    """Called, what features have counted so far in this test, without what never happened."""
    file = tmp_path / "counts"
    monkeypatch.setenv(VARIABLE, str(file))
    return lambda: {name: times for name, times in counted(file).items() if times}


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def frameworks() -> Path:
    """The sources of this stack."""
    return DIRECTORY / "frameworks"


@pytest.fixture
def short_tmp():
    """A TMPDIR in which Ray's sockets have room; tmp_path is too long for them."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def tiny() -> Path:
    """data/tiny of this stack: the tiny Qwen3, its tokenizer and its task."""
    path = DATA / "tiny"
    subprocess.run([sys.executable, "-m", "ascend_rl.tiny", "--out", str(path)], check=True)
    return path


@contextlib.contextmanager
def importing_from_here():
    """Processes started meanwhile import from here too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "patched"), prepend=os.pathsep)
        yield


FILED_PORT = "dashboard_agent_listen_port"  # which a raylet reads from a file
AGENT_PORTS = (FILED_PORT, "metrics_agent_port", "metrics_export_port", "runtime_env_agent_port")


@contextlib.contextmanager
def late_agents():
    """Raylets started meanwhile run until their agents, Python programs, have started, on a busy machine too.

    By itself a raylet ends after 15 s without their ports, and, even if it is told these, without a file in
    which the dashboard's agent writes its own (see ascend_rl/launch/launch_node.py).
    """
    from ray._private import services

    start = services.start_raylet
    signature = inspect.signature(start)

    def start_raylet(*args, **given):
        arguments = signature.bind(*args, **given).arguments | {name: free_port() for name in AGENT_PORTS}
        file = Path(arguments["session_dir"], f"{FILED_PORT}_{arguments['node_id']}")
        file.write_text(str(arguments[FILED_PORT]))
        return start(**arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "start_raylet", start_raylet)
        patch.setenv("RAY_agent_register_timeout_ms", "300000")
        patch.setenv("RAY_raylet_start_wait_time_s", "300")
        yield


@pytest.fixture(scope="module")
def start_ray():
    """Called with the arguments of ray.init: Ray, whose processes import from here too, for one module."""
    import ray

    def start(address: str = "local", **given):
        return ray.init(address, log_to_driver=False, **given)

    with importing_from_here(), late_agents():
        yield start
    ray.shutdown()


@pytest.fixture(scope="session")
def forked():
    """For ``runtime_env`` of start_ray: its processes, and vLLM's, are forks of one that imported vLLM."""
    import psutil

    from ascend_rl.launch import warm_start

    with tempfile.TemporaryDirectory(prefix="warm-") as folder:  # a socket's path is short
        with importing_from_here():
            program = str(warm_start.start(Path(folder), warm_start.MODULES))
        yield {"py_executable": program}
        for process in psutil.Process().children():
            if program in process.cmdline():
                process.kill()
                process.wait()


@pytest.fixture(scope="session")
def npu_ground(frameworks):
    """A process with vllm-ascend's runner on the software NPU, see tests/npu_ground.py."""
    from npu_ground import Ground

    if not (frameworks / "vllm_ascend").is_dir():
        pytest.skip("no vllm_ascend checkout")

    with Ground() as ground:
        yield ground


@pytest.fixture(scope="session")
def tree_without(root, tmp_path_factory):
    """A function that copies frameworks/NAME as patched, less the named patches, for use on PYTHONPATH."""

    def copy(framework: str, names: list[str]) -> Path:
        source, destination = root / "frameworks" / framework, tmp_path_factory.mktemp(framework)
        shutil.copytree(
            source,
            destination,
            ignore=shutil.ignore_patterns(".git"),
            copy_function=link_or_copy,
            dirs_exist_ok=True,
        )
        for patch in sorted((root / "patches" / framework).glob("*.patch"), reverse=True):
            if patch.stem.split("-")[-1] in names:
                subprocess.run(["git", "apply", "-R", patch], check=True, cwd=destination)
        return destination

    return copy


def link_or_copy(source: str, destination: str) -> None:
    """A link, which git replaces where it changes the file; on another disk a copy with the same time."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy2(source, destination)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore tests of other stacks; None leaves it to pytest."""
    if collection_path.suffix != ".py":
        return None
    folder = collection_path.parent.name
    name = collection_path.relative_to(Path(__file__).parent).as_posix()
    own = folder == FOLDERS.get(NAME) or name in BOTH
    return True if (NAME != DEFAULT or folder in FOLDERS.values()) and not own else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--prove", action="store_true", help="prove again that each patch is needed by its test")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item):
    item.stash[CPU_S] = processor_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item):
    """Note the processor time of a test and of the processes that ended in it, for summary.py."""
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu_s", f"{processor_s() - item.stash[CPU_S]:.2f}"))


def processor_s() -> float:
    """Of this process, of its children that ended, and of the jobs of those that fork for it."""
    return sum(os.times()[:4]) + warm.cpu_s[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first, real runs last: a mistake shows early. Of several processes, some begin with them,
    and one with the rollout servers: beside quick tests, not beside others that need as much.

    Of the patched frameworks, first Megatron's models in this process: a vLLM engine in it keeps the default
    process group, of which there can be one.
    """
    order = ["tests", "software_npu", "patched", *FOLDERS.values(), "e2e"]
    several = "PYTEST_XDIST_WORKER" in os.environ
    files = {"test_memory_plan.py": 0, "test_left_out.py": 3}
    long = ("test_mindspeed_hdp.py", "test_npu_eplb.py", "test_quickstart.py", "test_resume.py")
    files |= dict.fromkeys(long, 1)  # not at the end

    def place(item: pytest.Item) -> tuple[int, int, int]:
        first = (SERVERS, *REAL_RUNS)
        group = together(item.path) if several else ""
        turn = first.index(group) if group in first else len(first)
        folder = order.index(item.path.parent.name)
        return turn, -folder if group in REAL_RUNS else folder, files.get(item.path.name, 2)

    items.sort(key=place)


@functools.cache
def together(path: Path) -> str:
    """What a file belongs to: of TOGETHER, of REAL_RUNS those that are all long or the others, or itself."""
    text = path.read_text()
    if path.parent.name == "e2e" or "from runs import" in text:
        long = path.name == "test_bench.py" or "pytestmark = [pytest.mark.long" in text
        return REAL_RUNS[0 if long else 1]
    return next((name for name, sign in TOGETHER.items() if sign in text), str(path))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """For pytest -n: one process runs all tests of a file, which share fixtures, and all of TOGETHER.

    Real runs, which wait for much of their time, are never more than two at a time. Proofs share nothing.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = ROOT / nodeid.partition("::")[0]
            return nodeid if file.name == "test_left_out.py" else together(file)

    config.option.loadscopereorder = False  # in the order above
    return ByFile(config, log)
