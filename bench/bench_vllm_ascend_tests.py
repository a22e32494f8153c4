"""vllm-ascend's own unit tests, of the pinned tag, on the software NPU.

    python bench/bench_vllm_ascend_tests.py [--patched] [TEST_FILE...]      # about a minute of a core
    python bench/bench_vllm_ascend_tests.py tests/ut/test_utils.py

Upstream runs them with torch_npu on a machine without an NPU and mocks what they call. Here torch_npu is the
software NPU; nothing else is replaced. They are those of the stack's frameworks/vllm_ascend, or where it has
none they are fetched from the git URL of frameworks.lock into a temporary directory. They are run on
vllm-ascend as it was released, or (--patched) on that tree. What upstream's CI leaves out is left out:
IGNORED, of .github/workflows/_unit_test.yaml in 0.13; in 0.23 the folders a2, a3_2 ... are for real NPUs.
APART replaces torch.npu for all files of its process, so it has one of its own.
Bars: none fails, and of all files as many pass as before: of 0.13 as many as with mocks (17 are skipped by
marks in the tests), of 0.23 all but 30, which are skipped.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from bars import ROOT, bar, finish, parser_of
from wheels import CHIPS, sites, wheels_file

from ascend_rl.host.npu_tools import built_for
from ascend_rl.settings.stack import DIRECTORY, NAME

sys.path.append(str(ROOT / "patches"))
from sources import BASE_TAG, Project  # noqa: E402

IGNORED = (
    "model_loader/netloader/test_netloader_elastic.py",
    "kv_connector/test_remote_prefill_lifecycle.py",
    "kv_connector/test_remote_decode_lifecycle.py",
    "core/test_scheduler_dynamic_batch.py",
    "kv_connector/test_mooncake_connector.py",
    "worker/test_worker_v1.py",
)
FOR_DEVICES = ("a2", "a2_2", "a3_2", "a3_4", "310p")
APART = ("tests/ut/distributed", "tests/ut/kv_offload/test_mooncake_layerwise_connector.py")
PASSED = {"cann8.5": 509, "cann9.1": 1696}[NAME]
TREE = DIRECTORY / "frameworks/vllm_ascend"
QUICK, PASSED_OF_QUICK = ("test_utils.py", "compilation", "device_allocator"), 51


def unpack(repository: Path, commit: str, directory: Path, *paths: str) -> None:
    command = ["git", "-C", str(repository), "archive", "--format=tar", commit, *paths]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(directory, filter="data")


def fetch_tests(directory: Path) -> None:
    """directory/tests of the pinned commit."""
    if (TREE / "tests/ut").is_dir():
        unpack(TREE, BASE_TAG, directory, "tests/ut", "tests/__init__.py")
        return
    framework = Project.load(DIRECTORY).framework("vllm_ascend")
    clone = directory / "upstream"
    fetch = ["git", "clone", "-q", "--bare", "--depth", "1", "--branch", framework.tag, framework.url]
    subprocess.run([*fetch, str(clone)], check=True, timeout=600)
    unpack(clone, framework.commit, directory, "tests/ut", "tests/__init__.py")


def released(directory: Path) -> Path:
    """The stack's tree without the patches; what the build made stays where it is."""
    tree = TREE
    target = directory / "released"
    target.mkdir()
    unpack(tree, BASE_TAG, target)
    for made in (*tree.glob("vllm_ascend/*.so"), *tree.glob("*.dist-info")):
        if not (target / made.relative_to(tree)).exists():
            (target / made.relative_to(tree)).symlink_to(made)
    return target


def run(tests: Path, tree: Path, files: list[str], seconds: float) -> list[ElementTree.Element]:
    """What became of each test, by JUnit.

    Raises:
        subprocess.TimeoutExpired: the tests did not end in ``seconds``.
        SystemExit: pytest could not run them.
    """
    ignored = [f"tests/ut/{file}" for file in IGNORED]
    ignored += [
        path.relative_to(tests) for name in FOR_DEVICES for path in tests.glob(f"tests/ut/**/{name}/")
    ]
    for name in ("vllm_ascend", "tools"):  # tests name their files from the directory they run in
        if (tree / name).is_dir():
            (tests / name).symlink_to(tree / name)
    series = built_for(tree / "vllm_ascend")
    node = ROOT / "software_npu/node"
    environment = os.environ | {
        "PATH": f"{node}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ASCEND_HOME_PATH": f"{node}/cann",
        "PYTHONPATH": os.pathsep.join(map(str, (*sites(), tree, tests))),
        "SOFTWARE_NPU_WHEELS": str(wheels_file()),
        "SOFTWARE_NPU_CHIP": CHIPS[series or "A3"],
        "SOFTWARE_NPU_VLLM_ASCEND": str(int(series is None)),  # from git, nothing is compiled
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "OMP_NUM_THREADS": "1",
    }
    apart = [name for name in APART if (tests / name).exists()]
    cases = []
    for number, own in enumerate([files] if files else [["tests/ut"], *([name] for name in apart)]):
        report = tests / f"report{number}.xml"
        left = ignored + (apart if own == ["tests/ut"] else [])
        options = ["-q", "-p", "no:cacheprovider", f"--rootdir={tests}", f"--junitxml={report}"]
        options += ["--timeout=300", *(f"--ignore={path}" for path in left)]
        command = [sys.executable, "-m", "pytest", *options, *own]
        ran = subprocess.run(
            command, cwd=tests, env=environment, text=True, capture_output=True, timeout=seconds
        )
        if ran.returncode not in (0, 1) or not report.exists():
            sys.exit(f"pytest ended with {ran.returncode}:\n{ran.stdout[-4000:]}{ran.stderr[-2000:]}")
        cases += ElementTree.parse(report).iter("testcase")
    return cases


def outcome(case: ElementTree.Element) -> tuple[str, str]:
    """passed, skipped or failed, and why."""
    for kind, name in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (found := case.find(kind)) is not None:
            return name, (found.get("message") or "").strip().partition("\n")[0]
    return "passed", ""


def main() -> int:
    parser = parser_of(__doc__, "only those of graphs, sleep and utilities")
    parser.add_argument("--patched", action="store_true", help="on the patched tree")
    parser.add_argument("--seconds", type=float, default=3600, help="pytest is ended then")
    parser.add_argument("files", nargs="*", help="tests/ut/...; all without")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.files = [f"tests/ut/{name}" for name in QUICK]
    with tempfile.TemporaryDirectory(prefix="vllm-ascend-tests-") as directory:
        place = Path(directory)
        fetch_tests(place)
        tree = TREE if arguments.patched else released(place)
        cases = run(place, tree, arguments.files, arguments.seconds)
    outcomes = {f"{case.get('classname')}.{case.get('name')}": outcome(case) for case in cases}
    counts = dict.fromkeys(("passed", "skipped", "failed"), 0)
    for name, (kind, why) in outcomes.items():
        counts[kind] += 1
        if kind != "passed":
            print(f"{kind:<8} {name}: {why}")
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()))
    passed, failed = counts["passed"], counts["failed"]
    wanted = PASSED_OF_QUICK if arguments.quick else 1 if arguments.files else PASSED
    return finish(
        "vllm_ascend_tests_part" if arguments.files else "vllm_ascend_tests",
        [
            bar("unit tests of vllm-ascend that pass", passed, "tests", f">= {wanted}"),
            ("unit tests of vllm-ascend that fail", failed, "tests", "0", failed == 0),
        ],
        patched=arguments.patched,
        counts=counts,
        files=arguments.files,
        outcomes={name: both for name, both in outcomes.items() if both[0] != "passed"},
    )


if __name__ == "__main__":
    sys.exit(main())
