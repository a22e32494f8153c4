"""What the software NPU and tests need of the pinned wheels of torch_npu and vllm-ascend: schemas, names.

python patches/npu_wheels.py        # prints the path of the file; the first time it downloads the wheels
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

from sources import Project, ToolError, machine, pip_download, stack_root

ROOT = Path(__file__).resolve().parents[1]
CHIPS = {"A2": "ascend910b3", "A3": "ascend910_9391"}  # a chip of each series
OPTION = re.compile(rb"\0(hccl_\w+)\0")
TEXT = re.compile(rb"[\t\n\x20-\x7e]{8,}")
SCHEMA = re.compile(r"(_?[a-z]\w*(?:\.\w+)?) ?\(.*\) ?-> ?\(?.*", re.S)


def top_level_names(module: ast.Module) -> set[str]:
    """What a module defines, assigns or imports at its top level."""
    names = set()
    for node in module.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def schemas_in(library: bytes) -> list[str]:
    """Operator schemas among the strings of a compiled library."""
    texts = (" ".join(text.decode().split()) for text in TEXT.findall(library))
    return sorted({text for text in texts if SCHEMA.fullmatch(text)})


def wheels_file() -> Path:
    """data/npu_wheels_VERSIONS.json, written once.

    Operator schemas by namespace; "names" that modules of torch_npu have; options of HCCL process groups.
    The compiled part of vllm-ascend is in its tree, or in its wheel where the tree was cloned from git.
    """
    import yaml

    project = Project.load(stack_root(ROOT))
    ascend, vllm_ascend = project.tables["ascend"], project.framework("vllm_ascend")
    path = ROOT / f"data/npu_wheels_{ascend['torch_npu']}_{vllm_ascend.version}.json"
    if path.exists() and path.stat().st_mtime > Path(__file__).stat().st_mtime:
        return path
    torch_npu = replace(project.framework("torch_npu"), version=ascend["torch_npu"])
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        wheel = zipfile.ZipFile(pip_download(project, torch_npu, machine(), Path(scratch, "npu"), 600))
        listed = yaml.load(
            wheel.read("torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"),
            getattr(yaml, "CSafeLoader", yaml.SafeLoader),
        )
        modules = {}
        for member in wheel.namelist():
            if re.fullmatch(
                r"torch_npu/(npu/\w+|utils/(__init__|storage)|(_inductor/)?__init__)\.py", member
            ):
                module = member.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                modules[module] = ast.parse(wheel.read(member))
        names = {module: top_level_names(tree) for module, tree in modules.items()}
        for module, tree in modules.items():
            for node in tree.body:  # from .memory import *
                if isinstance(node, ast.ImportFrom) and node.level and node.names[0].name == "*":
                    names[module] |= {n for n in names.get(f"{module}.{node.module}", ()) if n[0] != "_"}
        atb = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in ast.parse(wheel.read("torch_npu/op_plugin/atb/_atb_ops.py")).body
            if isinstance(node, ast.Assign) and node.targets[0].id in ("API_LIST", "ATB_API_LIST")
        }
        compiled = [*project.tree("vllm_ascend").glob("vllm_ascend/vllm_ascend_C*.so")]
        if compiled:
            library = compiled[0].read_bytes()
        else:
            own = zipfile.ZipFile(pip_download(project, vllm_ascend, machine(), Path(scratch, "own"), 600))
            (member,) = [name for name in own.namelist() if "/vllm_ascend_C" in name]
            library = own.read(member)
        written = {
            "npu": [entry["func"] for entry in listed["custom"]],
            "atb": schemas_in(wheel.read("torch_npu/lib/libop_plugin_atb.so")),
            "_C_ascend": schemas_in(library),
            "atb names": {"torch_npu": atb["API_LIST"], "torch_npu.atb": atb["ATB_API_LIST"]},
            "names": {module: sorted(found) for module, found in names.items()},
            "HCCL options": sorted(
                {name.decode() for name in OPTION.findall(wheel.read("torch_npu/lib/libtorch_npu.so"))}
            ),
        }
        Path(scratch, "written").write_text(json.dumps(written, indent=1))
        os.replace(Path(scratch, "written"), path)
    return path


def pinned() -> str:
    """The version of torch_npu."""
    return Project.load(stack_root(ROOT)).tables["ascend"]["torch_npu"]


def sites() -> list[Path]:
    """The software NPU on PYTHONPATH: metadata of the pinned version, where site/ has another, and site/."""
    own = ROOT / f"software_npu/site_{pinned()}"
    return [*([own] if own.is_dir() else []), ROOT / "software_npu/site"]


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # of the downloads
            path = wheels_file()
        print(path)
    except ToolError as error:
        sys.exit(f"ERROR: {error}")
