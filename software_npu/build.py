"""Compile the device once; a process with site/ on its path loads what is there, or compiles it first.

    python -m software_npu.build [--directory DIR]        # prints the directory of the libraries

They are in DIR (SOFTWARE_NPU_BUILD, or data/software_npu beside this folder) under a name made from all
that goes into them: the sources, Python, torch, and the compiler. The directory appears whole or not at
all; of several processes one compiles and the others wait. Takes about 40 s of one core.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"
# Compiled as two files, for torch's headers take longer than what is written here.
UNITS = {
    "device": [
        "memory.cpp", "streams.cpp", "races.cpp", "device.cpp", "graphs.cpp", "fallback.cpp", "aten.cpp",
    ],
    "python": ["hccl.cpp", "hccl_c.cpp", "bindings.cpp"],
}  # fmt: skip
DRIVER = "libsoftware_npu_driver.so"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
FLAGS = [
    "-std=c++17", "-O1", "-fPIC", "-pthread", "-Wall", "-Wno-unknown-pragmas", "-Wno-attributes",
    "-DTORCH_EXTENSION_NAME=_C", "-DAT_PER_OPERATOR_HEADERS",
]  # fmt: skip


class CannotBuild(RuntimeError):
    """What is missing, or what the compiler said."""


def find_compiler() -> str | None:
    names = [os.environ.get("CXX"), "g++", "c++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(str(len(data)).encode() + b":" + data)
    return total.hexdigest()[:16]


def name_of(compiler: str | None) -> str:
    """SOURCES-COMPILER; a pattern for any compiler where there is none: what was built elsewhere will do."""
    import torch

    files = [path.name.encode() + path.read_bytes() for path in sorted(SOURCES.iterdir())]
    built_for = [torch.__version__, platform.machine(), SUFFIX, repr(FLAGS), repr(UNITS)]
    sources = digest(*built_for, *files)
    if compiler is None:
        return f"{sources}-*"
    said = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    return f"{sources}-{digest(said)}"


def build(directory: Path | None = None) -> Path:
    """The directory of the libraries, which are compiled if they are not there.

    Raises:
        CannotBuild: no compiler, or it failed.
    """
    directory = Path(directory or os.environ.get("SOFTWARE_NPU_BUILD") or HERE.parent / "data/software_npu")
    compiler = find_compiler()
    name = name_of(compiler)
    if found := sorted(directory.glob(name)):
        return found[0]
    if compiler is None:
        raise CannotBuild(
            "the software NPU needs a C++ compiler and finds none: install g++ (apt-get install g++, or "
            "yum install gcc-c++), or set CXX"
        )
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # freed by the kernel when the process ends
        target = directory / name
        if not target.exists():  # another process may have made it meanwhile
            print(f"compiling the software NPU into {target} (once, about a minute)", file=sys.stderr)
            with tempfile.TemporaryDirectory(dir=directory, prefix=".new-") as scratch:
                made = Path(scratch, "made")
                made.mkdir()
                compile_into(made, compiler)
                os.replace(made, target)
    return target


def run_all(commands: list[list[str]], at_once: int) -> None:
    """Run the commands, so many at a time; the first that fails ends the others."""
    waiting, running = list(commands), []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                command = waiting.pop(0)
                log = tempfile.TemporaryFile("w+")
                running.append((subprocess.Popen(command, stdout=log, stderr=log), command, log))
            process, command, log = running.pop(0)
            if process.wait():
                log.seek(0)
                raise CannotBuild(f"{' '.join(command)}\n{log.read()[-8000:]}")
            log.close()
    finally:
        for process, *_ in running:
            process.kill()
            process.wait()


def compile_into(made: Path, compiler: str) -> None:
    import torch
    from torch.utils import cpp_extension

    includes = [
        f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"), SOURCES)
    ]
    torch_flags = [*FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", *includes]
    libraries = Path(torch.__file__).parent / "lib"
    driver = [f"-L{made}", "-lsoftware_npu_driver", "-Wl,-rpath,$ORIGIN"]
    objects, commands = [], []
    for unit, files in UNITS.items():
        source = made / f"{unit}.cpp"
        source.write_text("".join(f'#include "{SOURCES / name}"\n' for name in files))
        objects.append(source.with_suffix(".o"))
        commands.append([compiler, *torch_flags, "-c", str(source), "-o", str(objects[-1])])
    run_all([[compiler, *FLAGS, "-shared", str(SOURCES / "driver.cpp"), "-o", str(made / DRIVER)]], 1)
    own = [compiler, *FLAGS, "-shared", includes[-2], str(SOURCES / "vllm_ascend_c.cpp"), *driver]
    commands.append([*own, "-o", str(made / f"vllm_ascend_C{SUFFIX}")])
    run_all(commands, int(os.environ.get("MAX_JOBS", "2")))
    torch_libraries = [f"-L{libraries}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    link = [compiler, *FLAGS, "-shared", *map(str, objects), *torch_libraries, *driver]
    named = ["-Wl,-soname,libhccl.so", f"-Wl,-rpath,{libraries}"]  # what asks for that library gets this one
    run_all([[*link, *named, "-o", str(made / f"_C{SUFFIX}")]], 1)
    for unit, built in zip(UNITS, objects, strict=True):
        built.unlink()
        (made / f"{unit}.cpp").unlink()


def load(name: str, stem: str):
    """Import a compiled module, STEM of the build directory, as NAME."""
    path = build() / f"{stem}{SUFFIX}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where the libraries go")
    try:
        print(build(parser.parse_args().directory))
    except CannotBuild as error:
        sys.exit(f"software_npu: {error}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
