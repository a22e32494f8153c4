"""vllm-ascend's own unit tests, of the pinned tag, on the software NPU.

    python bench/bench_vllm_ascend_tests.py [--patched] [TEST_FILE...]      # about a minute of a core
    python bench/bench_vllm_ascend_tests.py tests/ut/test_utils.py

Upstream runs them with torch_npu on a machine without an NPU and mocks what they call. Here torch_npu is the
software NPU; nothing else is replaced. They are fetched from the git URL of frameworks.lock into a temporary
directory, and are run on vllm-ascend as it was released, or (--patched) on frameworks/vllm_ascend.
What upstream's CI leaves out is left out: IGNORED, of .github/workflows/_unit_test.yaml.
Bars: none fails, and of all files as many pass as with mocks (and 17 are skipped, by marks in the tests).
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
from wheels import CHIPS, wheels_file

from ascend_rl.host.npu_tools import built_for

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
PASSED_WITH_MOCKS = 509
QUICK, PASSED_OF_QUICK = ("test_utils.py", "compilation", "device_allocator"), 51


def unpack(repository: Path, commit: str, directory: Path, *paths: str) -> None:
    command = ["git", "-C", str(repository), "archive", "--format=tar", commit, *paths]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(directory, filter="data")


def fetch_tests(directory: Path) -> None:
    """directory/tests of the pinned commit."""
    framework = Project.load(ROOT).framework("vllm_ascend")
    clone = directory / "upstream"
    fetch = ["git", "clone", "-q", "--bare", "--depth", "1", "--branch", framework.tag, framework.url]
    subprocess.run([*fetch, str(clone)], check=True, timeout=600)
    unpack(clone, framework.commit, directory, "tests/ut", "tests/__init__.py")


def released(directory: Path) -> Path:
    """frameworks/vllm_ascend without the patches; what the build made stays where it is."""
    tree = ROOT / "frameworks/vllm_ascend"
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
    report = tests / "report.xml"
    ignored = [f"--ignore=tests/ut/{file}" for file in IGNORED]
    series = built_for(tree / "vllm_ascend")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "software_npu/site", tree, tests))),
        "SOFTWARE_NPU_WHEELS": str(wheels_file()),
        "SOFTWARE_NPU_CHIP": CHIPS[series or "A3"],
        "SOFTWARE_NPU_VLLM_ASCEND": str(int(series is None)),  # from git, nothing is compiled
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "OMP_NUM_THREADS": "1",
    }
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={tests}", f"--junitxml={report}", "--timeout=300"]
    command = [sys.executable, "-m", "pytest", *options, *ignored, *(files or ["tests/ut"])]
    ran = subprocess.run(command, cwd=tests, env=environment, text=True, capture_output=True, timeout=seconds)
    if ran.returncode not in (0, 1) or not report.exists():
        sys.exit(f"pytest ended with {ran.returncode}:\n{ran.stdout[-4000:]}{ran.stderr[-2000:]}")
    return list(ElementTree.parse(report).iter("testcase"))


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
        tree = ROOT / "frameworks/vllm_ascend" if arguments.patched else released(place)
        cases = run(place, tree, arguments.files, arguments.seconds)
    outcomes = {f"{case.get('classname')}.{case.get('name')}": outcome(case) for case in cases}
    counts = dict.fromkeys(("passed", "skipped", "failed"), 0)
    for name, (kind, why) in outcomes.items():
        counts[kind] += 1
        if kind != "passed":
            print(f"{kind:<8} {name}: {why}")
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()))
    passed, failed = counts["passed"], counts["failed"]
    wanted = PASSED_OF_QUICK if arguments.quick else 1 if arguments.files else PASSED_WITH_MOCKS
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
