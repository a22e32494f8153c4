"""A place to run build_project.sh --target npu: what the Ascend image would hold, with stubs for CANN.

The Python has the packages of requirements.txt and no other, with software_npu/ in the place of torch_npu.
The checkout and its frameworks are copied. vllm_ascend comes from a git repository with the files of the pin;
its submodule, which is not at hand, is an empty one. Of CANN, the compilers are replaced by `cmake` and
`bisheng`, which record how they are called and leave files of the names that the real ones make.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from wheels import wheels_file

import sources
from ascend_rl.settings.stack import DIRECTORY, NAME

ROOT = Path(__file__).resolve().parent.parent
PLACE = DIRECTORY.relative_to(ROOT)  # of this stack's pins and frameworks
SUBMODULE = "csrc/third_party/catlass"

CMAKE = """#!/bin/bash
# Records each call. Configuring remembers the prefix; the package of csrc/build.sh is a script that installs.
[ "$1" != --version ] || exec echo "cmake version 3.28.0"
echo "SOC=$SOC_VERSION CANN=$ASCEND_HOME_PATH $(basename "$PWD"): $*" >>"@LOG@"
case " $* " in
*" --target package "*)
    mkdir -p ../output
    for made in ../output/CANN-custom_ops.run cann-ops-transformer.run; do  # by vllm-ascend's release
        printf '#!/bin/bash\\nmkdir -p ${1#*=}/vendors && touch ${1#*=}/vendors/op.so\\n' >$made
        chmod +x $made
    done
    ;;
*" --build "*)
    [ ! -e "@LOG@.fails" ] || { echo "error: no space left" >&2; exit 2; }
    echo compiled >>objects
    ;;
*" --install "*) cp objects "$(cat prefix)/vllm_ascend_C.@TAG@-$(uname -m)-linux-gnu.so" ;;
*) for word in "$@"; do case $word in -DCMAKE_INSTALL_PREFIX=*) echo "${word#*=}" >prefix ;; esac; done ;;
esac
"""


def git(directory: Path, *arguments: str) -> str:
    settings = [
        "-c",
        "user.name=test",
        "-c",
        "user.email=test@example.com",
        "-c",
        "advice.detachedHead=false",
    ]
    command = ["git", *settings, "-C", directory, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@dataclass(frozen=True)
class Host:
    """`root`: a checkout; `python`: that of a new environment; `env`: with CANN; `calls`: those of cmake."""

    root: Path
    python: Path
    env: dict[str, str]
    log: Path

    @property
    def tree(self) -> Path:
        return self.root / PLACE / "frameworks/vllm_ascend"

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def run(self, *command: object, tools: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, command)),
            cwd=self.root,
            env=self.env | {"PATH": f"{self.env['PATH']}:{tools}"} | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=1200,
        )

    def build(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run("bash", "build_project.sh", "--target", "npu", *arguments, **env)

    def says(self, code: str, **env: str) -> list[str]:
        """What a new process of the environment prints."""
        result = replace(self, root=Path("/")).run(self.python, "-c", code, **env)
        assert result.returncode == 0, result.stderr
        return result.stdout.split()


def from_git() -> bool:
    """Whether frameworks/vllm_ascend has the commit of the pin, not files of the wheel."""
    commit = sources.Project.load(DIRECTORY).framework("vllm_ascend").commit
    command = ["git", "-C", DIRECTORY / "frameworks/vllm_ascend", "cat-file", "-e", commit]
    return subprocess.run(command, capture_output=True).returncode == 0


needs_git = pytest.mark.skipif(
    not from_git(),
    reason="frameworks/vllm_ascend is the wheel's; ./download_frameworks_source_code.sh --only vllm_ascend "
    "--source git fetches it from git",
)


def make_upstream(directory: Path) -> str:
    """A repository like vllm-ascend's at the pin, with another submodule; returns its commit."""
    submodule = directory.with_name("catlass")
    (submodule / "include").mkdir(parents=True)
    (submodule / "include/catlass.hpp").touch()
    git(submodule, "init", "-q")
    git(submodule, "config", "uploadpack.allowAnySHA1InWant", "true")
    git(submodule, "add", ".")
    git(submodule, "commit", "-qm", "catlass")
    tree, pin = DIRECTORY / "frameworks/vllm_ascend", sources.Project.load(DIRECTORY).framework("vllm_ascend")
    subprocess.run(["git", "clone", "-qn", tree, directory], check=True, capture_output=True)
    git(directory, "checkout", "-qB", "main", pin.commit)
    git(directory, "update-index", "--cacheinfo", f"160000,{git(submodule, 'rev-parse', 'HEAD')},{SUBMODULE}")
    git(directory, "config", "-f", ".gitmodules", f"submodule.{SUBMODULE}.url", str(submodule))
    git(directory, "commit", "-qam", "Another submodule")
    git(directory, "tag", "-f", pin.tag)
    return git(directory, "rev-parse", "HEAD")


def names_in(requirements: str) -> set[str]:
    """The distributions that a file of requirements names."""
    lines = (line.partition("#")[0].strip() for line in (DIRECTORY / requirements).read_text().splitlines())
    return {canonicalize_name(Requirement(line).name) for line in lines if line}


def make_python(environment: Path) -> Path:
    """A new environment with links to this one's packages, those that the image has; returns its Python.

    torch for x86_64 links to CUDA's libraries, and pip belongs to the image's Python.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site,) = environment.glob("lib/python3*/site-packages")
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    wanted, files = names_in("requirements.txt") | {"pip"}, set()
    for distribution in importlib.metadata.distributions(path=[packages]):
        name = canonicalize_name(distribution.metadata["Name"])
        if name in wanted or name.startswith("nvidia-"):
            files |= {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
    for file in files - {"__pycache__"}:
        (site / file).symlink_to(Path(packages, file))
    return environment / "bin/python"


def make_host(directory: Path) -> Host:
    """Everything but vllm_ascend itself, which `download_frameworks_source_code.sh` then fetches."""
    commit = make_upstream(directory / "upstream")
    framework = sources.Project.load(DIRECTORY).framework("vllm_ascend")
    root, environment, cann = directory / "checkout", directory / "python", directory / "cann"
    shutil.copytree(
        ROOT,
        root,
        ignore=shutil.ignore_patterns(
            ".git", ".venv*", "frameworks", "data", "outputs", "logs", "checkpoints", ".*_cache"
        ),
    )
    lock = root / PLACE / "frameworks.lock"
    lock.write_text(
        lock.read_text().replace(framework.commit, commit).replace(framework.url, str(directory / "upstream"))
    )
    shutil.copytree(
        DIRECTORY / "frameworks",
        root / PLACE / "frameworks",
        symlinks=True,
        ignore=lambda path, names: [
            name
            for name in names
            if Path(path).name == "frameworks" and (name[0] == "." or name == "vllm_ascend")
        ],
    )
    python = make_python(environment)
    (site,) = environment.glob("lib/python3*/site-packages")
    (site / "torch_npu.pth").write_text(f"{root}/software_npu/site\n")
    cann.mkdir()
    (cann / "moe_distribute_base.h").write_text("struct HcclOpResParam {\n")
    log = directory / "cmake.log"
    cmake = CMAKE.replace("@LOG@", str(log)).replace("@TAG@", sys.implementation.cache_tag)
    for name, text in (
        ("cmake", cmake),
        ("bisheng", "#!/bin/sh\n"),
    ):
        (environment / "bin" / name).write_text(text)
        (environment / "bin" / name).chmod(0o755)
    env = {
        "PATH": f"{environment}/bin:/usr/bin:/bin",
        "HOME": str(directory),
        "LANG": "C.UTF-8",
        "STACK": NAME,
        "ASCEND_TOOLKIT_HOME": str(cann),
        "ASCEND_HOME_PATH": str(cann),
        "SOFTWARE_NPU_BUILD": str(ROOT / "data/software_npu"),
        "SOFTWARE_NPU_WHEELS": str(wheels_file()),
        **{
            name: os.environ[name]
            for name in os.environ
            if name.lower().endswith("_proxy") or name.startswith("PIP_")
        },
    }
    return Host(root, python, env, log)
