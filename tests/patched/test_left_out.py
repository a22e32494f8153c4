"""Every patch is needed by its test: leave the patch out, and the test named in its header fails.

A proof that ran is remembered in data/proofs, by a hash of all it depends on, and repeated when that changes,
or with pytest's option --prove. proofs.txt beside this file has those that ran before a commit, so that on a
fresh machine, too, only those run that a change concerns; it is written by

    PYTHONPATH=tests python tests/patched/test_left_out.py

Each is a pytest run of its own, forked from a process that has imported what the frameworks import, but no
framework. That of vllm-ascend's has the software NPU.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest
from warm import Warm
from wheels import wheels_file

ROOT = Path(__file__).resolve().parents[2]
PATCHES = sorted((ROOT / "patches").glob("*/*.patch"))
REMEMBERED = ROOT / "data/proofs"
COMMITTED = Path(__file__).with_name("proofs.txt")
HELPERS = [ROOT / "tests", ROOT / "tests/patched"]
# On every proof's path: the stubs, the fixtures, the variables of a CPU run, the packages.
SHARED = [
    "tests/stubs", "tests/conftest.py", "tests/patched/conftest.py", "internal/cpu_env.sh",
    "requirements-cpu.txt",
]  # fmt: skip
LIBRARIES = (
    "pytest torch torchvision transformers tensordict datasets ray hydra numba scipy.stats accelerate peft "
    "fastapi openai compressed_tensors"
).split()


def named_tests(patch: Path) -> list[str]:
    return re.search(r"^Test: (.+)$", patch.read_text(), re.M).group(1).split()


def with_helpers(paths: set[Path]) -> set[Path]:
    """Test files and the helper modules of tests/ that they import, directly or not."""
    found, left = set(), set(paths)
    while left:
        found.add(path := left.pop())
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            left |= {f for name in names for d in HELPERS if (f := d / f"{name}.py").is_file()} - found
    return found


@functools.cache
def mentioned(file: Path) -> frozenset[Path]:
    """Modules of ascend_rl that a file names: in an import, a string, or a line of a patch."""
    text, names = file.read_text(), set()
    for package, given in re.findall(r"from (ascend_rl[.\w]*) import (\([^)]*\)|[^\n]*)", text):
        names |= {package} | {f"{package}.{name}" for name in re.findall(r"\w+", given)}
    names |= set(re.findall(r"ascend_rl(?:\.\w+)+", text))
    parts = [name.split(".") for name in names]
    paths = {ROOT.joinpath(*part[:end]) for part in parts for end in range(1, len(part) + 1)}
    found = {place for path in paths for place in (path.with_suffix(".py"), path / "__init__.py")}
    return frozenset(place for place in found if place.is_file())


def with_algorithms(files: set[Path]) -> set[Path]:
    """The files, and the modules of ascend_rl that they name, directly or not."""
    found, left = set(), set(files)
    while left:
        found.add(path := left.pop())
        left |= mentioned(path) - found
    return found


def fingerprint(patch: Path) -> str:
    """A hash of the patch, its tests with their helpers and algorithms, what is shared, and the pins.

    The lock's hashes of patched trees are left out: they change with every patch.
    """
    files = {patch, Path(__file__)} | with_helpers({ROOT / test for test in named_tests(patch)})
    files = with_algorithms(files | {ROOT / "tests/conftest.py", ROOT / "tests/patched/conftest.py"})
    for place in SHARED:
        path = ROOT / place
        files |= {f for f in path.rglob("*") if f.suffix in (".py", ".yaml")} if path.is_dir() else {path}
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(ROOT)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    pins = re.sub(r"^tree = .*$", "", (ROOT / "frameworks.lock").read_text(), flags=re.M)
    digest.update(pins.encode())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def ordinary():
    warm = Warm(LIBRARIES)
    yield warm
    warm.stop()


@pytest.fixture(scope="module")
def with_npu():
    warm = Warm(LIBRARIES, str(ROOT / "software_npu/site"))
    yield warm
    warm.stop()


def run_pytest(_, tests: list[str], variant: str, log: str) -> int:
    """In a forked process: the status of pytest, with the variant first on the path if it is given."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    if variant:
        sys.path.insert(0, variant)
    os.chdir(ROOT)
    # A folder of its own: in the common one each session would look for folders of others to remove.
    with tempfile.TemporaryDirectory(prefix="p") as folder:
        return int(pytest.main(["-q", "-x", "-s", "-p", "no:cacheprovider", f"--basetemp={folder}", *tests]))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_its_test_fails_without_it(patch, request, tmp_path, monkeypatch, tree_without, ordinary, with_npu):
    key, remembered = fingerprint(patch), REMEMBERED / patch.stem
    known = {remembered.read_text() if remembered.is_file() else "", committed().get(patch.stem)}
    if not request.config.getoption("prove") and key in known:
        return
    if not (ROOT / "frameworks" / patch.parent.name).is_dir():
        pytest.skip(f"no {patch.parent.name} checkout")
    variant, log = str(tree_without(patch.parent.name, [patch.stem.split("-")[-1]])), tmp_path / "log"
    tests = named_tests(patch)
    if patch.parent.name == "vllm_ascend":  # on the path it would be the platform of any vLLM
        monkeypatch.setenv("SOFTWARE_NPU_WHEELS", str(wheels_file()))
        places = {"VLLM_ASCEND_TREE": variant, "PYTHONPATH": ""}
        (status,) = with_npu.run(1, run_pytest, tests, "", str(log), **places)
    else:
        (status,) = ordinary.run(1, run_pytest, tests, variant, str(log), PYTHONPATH=variant)
    assert status == pytest.ExitCode.TESTS_FAILED, (
        f"expected failing tests, got {status}:\n{log.read_text()[-4000:]}"
    )
    REMEMBERED.mkdir(parents=True, exist_ok=True)
    remembered.write_text(key)


def committed() -> dict[str, str]:
    """Of each patch, what its last proof before a commit depended on."""
    return dict(line.split() for line in COMMITTED.read_text().splitlines())


def test_what_a_proof_rests_on_includes_the_algorithms_that_a_patch_names():
    (patch,) = ROOT.glob("patches/verl/*-compute_old_log_prob.patch")
    found = with_algorithms({patch})
    assert ROOT / "ascend_rl/loss/old_log_prob.py" in found  # named in the patch
    assert ROOT / "ascend_rl/settings/switch.py" in found  # which that module imports
    assert ROOT / "ascend_rl/host/core_binding.py" not in found


def test_what_a_proof_rests_on_includes_the_helpers_of_its_test():
    files = {f.name for f in with_helpers({ROOT / "tests/patched/test_megatron_models.py"})}
    helpers = {"megatron_tiny.py", "megatron_defaults.py", "ranks.py", "warm.py", "wheels.py"}
    assert files == {"test_megatron_models.py"} | helpers


if __name__ == "__main__":
    ran = committed() | {path.name: path.read_text() for path in REMEMBERED.glob("*")}
    valid = {patch.stem: key for patch in PATCHES if ran.get(patch.stem) == (key := fingerprint(patch))}
    COMMITTED.write_text("".join(f"{name} {key}\n" for name, key in sorted(valid.items())))
    print(f"{len(valid)} of {len(PATCHES)} proofs are in {COMMITTED.relative_to(ROOT)}")
