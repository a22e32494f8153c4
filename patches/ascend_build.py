"""Compile vllm-ascend for the chip at hand, and say for which chip what is there was compiled.

Problem: the released wheel is compiled for one series (frameworks.lock: `device`), and on another NPUWorker
refuses to start; a tree from git holds nothing compiled at all.
Idea: where the wheel's series fits, take its files. Elsewhere run the setup.py of the pin in a directory of
its own, frameworks/.build-vllm_ascend, since it edits its sources and the user's git settings; then copy what
it made into the tree. CMake continues where an interrupted build stopped.
Invariants: the tree stays as it was until the build has succeeded and says the right series; what was built
from the same pin for the same chip, CANN and torch_npu is not built again.
Cost: the build is that of vllm-ascend's own image. Limits: it needs CANN, so here only its command line, its
environment and what happens afterwards are tested.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from sources import (
    BASE_TAG,
    SOURCE_FILE,
    Framework,
    Project,
    ToolError,
    git,
    init_repository,
    isolated_env,
    last_line,
    machine,
    network_git,
    pip_download,
    read_json,
    say,
    wanted,
    write_file,
    write_json,
)
from sources import run as run_tool

sys.path.append(str(Path(__file__).resolve().parent.parent))
from ascend_rl.host import npu_tools  # noqa: E402
from ascend_rl.host.npu_tools import built_for  # noqa: E402

BUILT_FILE = "ascend-rl-built"  # in .git: what the compiled files were built from, and for
INSTALLER = b"ascend-rl\n"  # in the dist-info directories that are ours to remove
PRODUCTS = ("*.so", "*.so.*", "_cann_ops_custom/**/*", "_build_info.py", "_version.py")
EXAMPLES = "ascend910_9391 (Atlas A3), ascend910b1 (Atlas A2)"


def series(soc: str) -> str:
    """The series of a chip, as NPUWorker compares it: ascend910_9391 -> A3.

    Raises:
        ToolError: vllm-ascend cannot be compiled for it.
    """
    found = npu_tools.series(soc)
    if not found:
        raise ToolError(f"vllm-ascend cannot be compiled for the chip {soc!r}; known are e.g. {EXAMPLES}")
    return found


def chip(asked: str, env: Mapping[str, str]) -> str:
    """The chip to compile for: the one asked for, or that of the first NPU that npu-smi shows.

    Raises:
        ToolError: none is asked for and none is found, or it is unknown.
    """
    try:
        found = asked.lower() or npu_tools.chip_name(env)
    except npu_tools.ToolError as error:
        raise ToolError(
            f"no NPU tells for which chip to compile vllm-ascend ({error}): on a build server name it, "
            f"e.g. --soc {EXAMPLES}"
        ) from None
    series(found)
    return found


def compiled_for(
    project: Project, framework: Framework, soc: str, site: Path, env: Mapping[str, str]
) -> None:
    """Make the compiled part and the metadata of vllm_ascend fit the chip.

    Raises:
        ToolError: the sources or CANN are missing, or the build fails; the tree is as before.
    """
    tree = project.tree(framework.name)
    package, needed = tree / framework.package, series(soc)
    if read_json(tree / ".git" / SOURCE_FILE)["source"] == "pypi":
        if built_for(package) != needed:
            raise ToolError(
                f"the wheel of {framework.dist} is compiled for {built_for(package)}, and {soc} is {needed}: "
                "it must be compiled here. Get its sources, then run this again:\n"
                f"  ./download_frameworks_source_code.sh --only {framework.name} --source git"
            )
        return
    from_wheel = project.tables[framework.name]["device"] == needed
    key = {"base": git(tree, "rev-parse", BASE_TAG), "series": needed}
    if not from_wheel:
        key |= {"soc": soc, "cann": str(cann(env)), "torch_npu": version_of("torch-npu")}
    there = (
        any(place.glob(name))
        for place, name in ((package, "*.so"), (site, f"{framework.package}-*.dist-info"))
    )
    if read_json(tree / ".git" / BUILT_FILE) == key and all(there):
        return
    (tree / ".git" / BUILT_FILE).unlink(missing_ok=True)
    if from_wheel:
        made = unpack_wheel(project, framework)
    else:
        made = build(project, framework, soc, key, env)
    package_made, (info,) = made / framework.package, made.glob("*.dist-info")
    if (found := built_for(package_made)) != needed or not any(package_made.glob("*.so")):
        raise ToolError(f"what was built in {made} is for {found}, not for {needed}, or holds no *.so")
    for old in products(package):
        old.unlink()
    for path in products(package_made):
        (package / path.relative_to(package_made)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, package / path.relative_to(package_made))
    remove_metadata(site, framework)
    shutil.rmtree(site / info.name, ignore_errors=True)
    shutil.copytree(info, site / info.name)
    write_file(site / info.name / "INSTALLER", INSTALLER)
    if from_wheel:
        shutil.rmtree(made)
    write_json(tree / ".git" / BUILT_FILE, key)


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cann(env: Mapping[str, str]) -> Path:
    """The directory of CANN, links resolved, so that another version is another one.

    Raises:
        ToolError: its set_env.sh was not sourced.
    """
    for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"):
        if env.get(name) and Path(env[name]).is_dir():
            return Path(env[name]).resolve()
    raise ToolError(
        "vllm-ascend must be compiled for this chip, which needs CANN: "
        "source /usr/local/Ascend/ascend-toolkit/set_env.sh first, or build in the image of this repository"
    )


def unpack_wheel(project: Project, framework: Framework) -> Path:
    """The pinned wheel, in a directory that the caller removes."""
    scratch = project.scratch(framework.name)
    shutil.rmtree(scratch, ignore_errors=True)
    wheel = pip_download(project, framework, machine(), scratch / "wheel", 600)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch, [name for name in archive.namelist() if wanted(name, framework.package)])
    say(f"{framework.name}: compiled files taken from {wheel.name}")
    return scratch


def unpack_sources(project: Project, framework: Framework, key: dict) -> Path:
    """The pin's files and submodules, without our patches, which touch nothing that is compiled.

    What an earlier build left there stays, if it was for the same chip and CANN.
    """
    tree, directory = project.tree(framework.name), project.directory / f".build-{framework.name}"
    base = key["base"]
    if read_json(directory / ".key") == key:
        return directory
    scratch = project.scratch(framework.name)
    for stale in (scratch, directory):
        shutil.rmtree(stale, ignore_errors=True)
    scratch.mkdir(parents=True)
    files = run_tool(["git", f"--git-dir={tree}/.git", "archive", base], env=isolated_env())
    with tarfile.open(fileobj=io.BytesIO(files.stdout)) as archive:
        archive.extractall(scratch, filter="tar")
    modules = scratch / ".gitmodules"
    for path, url in re.findall(
        r"path = (\S+)\s+url = (\S+)", modules.read_text() if modules.exists() else ""
    ):
        commit = git(tree, "ls-tree", base, "--", path).split()[2]
        say(f"{framework.name}: fetching {path} from {url}")
        shutil.rmtree(scratch / path, ignore_errors=True)
        init_repository(scratch / path)
        try:
            network_git(scratch / path, "fetch", "-q", "--depth=1", url, commit, seconds=600)
        except ToolError as error:
            raise ToolError(
                f"{framework.name}: its submodule {path} cannot be had from {url}: {error}"
            ) from None
        git(scratch / path, "reset", "-q", "--hard", commit)
    write_json(scratch / ".key", key)
    scratch.rename(directory)
    return directory


def setup_environment(
    framework: Framework, soc: str, directory: Path, env: Mapping[str, str]
) -> dict[str, str]:
    """What setup.py reads. It asks `python3` for torch_npu, and adds to the user's git settings.

    Without a driver, as on a build server, CANN's devlib has what the linker wants of it.
    """
    home = cann(env)
    libraries = [env.get("LD_LIBRARY_PATH", "")]
    if not Path("/usr/local/Ascend/driver").exists():
        libraries.append(str(home / f"{machine()}-linux/devlib"))
    return {
        **env,
        "ASCEND_HOME_PATH": str(home),
        "ASCEND_TOOLKIT_HOME": str(home),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        "SOC_VERSION": soc,
        "MAX_JOBS": env.get("MAX_JOBS") or str(len(os.sched_getaffinity(0))),
        "SETUPTOOLS_SCM_PRETEND_VERSION": framework.version,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")]),
        "GIT_CONFIG_GLOBAL": str(directory / ".gitconfig"),
    }


def build(project: Project, framework: Framework, soc: str, key: dict, env: Mapping[str, str]) -> Path:
    """Run vllm-ascend's setup.py; returns the directory with the package and its dist-info."""
    directory = unpack_sources(project, framework, key)
    environment = setup_environment(framework, soc, directory, env)
    setup = [sys.executable, "setup.py"]
    for stale in directory.glob("*.dist-info"):
        shutil.rmtree(stale)
    listed = subprocess.run([*setup, "-q", "dist_info"], cwd=directory, env=environment, capture_output=True)
    if listed.returncode:
        raise ToolError(f"setup.py of {framework.name} fails: {last_line(listed.stderr)}")
    say(f"{framework.name}: compiling for {soc} with {environment['MAX_JOBS']} jobs; MAX_JOBS changes that")
    # Its own output, live: in the log of an image's build it is all there is.
    command = [*setup, "build_py", "build_ext"]
    status = subprocess.run(command, cwd=directory, env=environment, stdin=subprocess.DEVNULL).returncode
    if status:
        raise ToolError(
            f"compiling vllm-ascend for {soc} failed with status {status}, see above. What is compiled "
            f"stays in {directory}: run this again to continue, with MAX_JOBS=2 if memory ran out"
        )
    return directory


def products(package: Path) -> list[Path]:
    """The files that a build makes, or that the wheel has in their place."""
    found = {path for pattern in PRODUCTS for path in package.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.name != ".gitkeep")


def remove_metadata(site: Path, framework: Framework) -> None:
    """Remove the dist-info that this tool wrote, of any version."""
    for stale in site.glob(f"{framework.package}-*.dist-info"):
        if (stale / "INSTALLER").is_file() and (stale / "INSTALLER").read_bytes() == INSTALLER:
            shutil.rmtree(stale)
