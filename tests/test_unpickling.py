"""No pickle of unknown origin runs code: in no command that reads a checkpoint, by no call in the tree."""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from test_converter import QUIET, TINY, make_model

from ascend_rl.settings.switch import CannotWork
from ascend_rl.weights import checkpoints, converter, fsdp, torch_dist


def opcodes(module: str, name: str, *arguments: str, protocol: int = 2) -> bytes:
    """A pickle that calls module.name with strings; with protocol 4 the name may have dots."""
    put = b"".join(b"X" + len(text.encode()).to_bytes(4, "little") + text.encode() for text in arguments)
    if protocol < 4:
        call = f"c{module}\n{name}\n".encode()
    else:
        call = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93"
    return b"\x80" + bytes([protocol]) + call + b"(" + put + b"tR."


def crafted(ran: Path) -> dict[str, bytes]:
    """Pickles each of which makes ``ran`` where it is read without limits."""
    touch, code = f"touch {ran}", f"open({str(ran)!r}, 'w')"
    metadata = "torch.distributed.checkpoint.metadata"
    attributes = b"cbuiltins\ngetattr\n(cos\n__dict__\nX\x03\0\0\0gettR(X\x06\0\0\0systemtR("
    return {
        "os.system": opcodes("os", "system", touch),
        "posix.system": opcodes("posix", "system", touch),
        "eval": opcodes("builtins", "eval", code),
        "exec": opcodes("builtins", "exec", code),
        "old name": opcodes("__builtin__", "eval", code),
        "dotted name": opcodes("pathlib", "os.system", touch, protocol=4),
        "through our module": opcodes("ascend_rl.weights.torch_dist", "os.system", touch, protocol=4),
        "through a class that is known": opcodes(metadata, "os.system", touch, protocol=4),
        "through torch": opcodes("torch.serialization", "os.system", touch, protocol=4),
        "torch's own": opcodes("torch.utils.collect_env", "run", touch),
        "numpy's": opcodes("numpy.testing._private.utils", "runstring", code),
        "getattr": b"\x80\x02" + attributes + opcodes("os", "system", touch).partition(b"(")[2],
        "import": opcodes("builtins", "__import__", "antigravity"),
        "copyreg": b"\x80\x02ccopyreg\n__reduce_ex__\n(cos\nsystem\nK\x02tR.",
        "in a state": b"\x80\x02c" + f"{metadata}\nMetadata\n".encode()
        + b")\x81}X\x13\0\0\0state_dict_metadata" + opcodes("os", "system", touch)[2:-1] + b"sb.",
    }  # fmt: skip


CRAFTED = list(crafted(Path("x")))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_model(folder / "hf", TINY["qwen3"], files=1)
    converter.to_mcore(folder / "hf", folder / "mcore", QUIET)
    return folder


def test_the_crafted_pickles_are_real(tmp_path):
    """They do what they are for, where nothing holds them."""
    for name in ("os.system", "eval", "dotted name", "through our module", "getattr", "in a state"):
        ran = tmp_path / name.replace(" ", "_")
        subprocess.run([sys.executable, "-c", "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"],
                       input=crafted(ran)[name], capture_output=True, check=False)  # fmt: skip
        assert ran.exists(), name


@pytest.mark.parametrize("kind", CRAFTED)
@pytest.mark.parametrize("place", [".metadata", "chunk", "shard"])
def test_no_reader_runs_what_a_pickle_says(tiny, tmp_path, place, kind):
    content = crafted(tmp_path / "ran")[kind]
    subprocess.run(["cp", "-r", tiny / "mcore", tiny / "hf", tmp_path], check=True)
    mcore, hf = tmp_path / "mcore", tmp_path / "hf"
    if place == ".metadata":
        (mcore / ".metadata").write_bytes(content)
        with pytest.raises(CannotWork, match="not a complete Megatron checkpoint"):
            converter.to_hf(mcore, hf, tmp_path / "back", QUIET)
        with pytest.raises(CannotWork, match="not a complete Megatron checkpoint"):
            converter.verify(hf, mcore, QUIET)
        with pytest.raises(CannotWork, match="not a complete Megatron checkpoint"):
            checkpoints.has_rng_states(str(mcore), None)
    elif place == "chunk":
        (mcore / "__0_0.distcp").write_bytes(archive(content))
        with pytest.raises(CannotWork, match="damaged"):
            converter.verify(hf, mcore, QUIET)
    else:
        (tmp_path / "actor").mkdir()
        (tmp_path / "actor/model_world_size_1_rank_0.pt").write_bytes(archive(content))
        with pytest.raises(CannotWork, match="not a shard of a model"):
            fsdp.FsdpShards(tmp_path / "actor")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "back").exists()


def archive(content: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("archive/data.pkl", content)
    return stream.getvalue()


def test_the_commands_refuse_a_crafted_checkpoint_in_a_sentence(root, tiny, tmp_path):
    """The paths that users take; the position in the data of a checkpoint to resume, too."""
    run = tmp_path / "global_step_1/actor"
    subprocess.run(["cp", "-r", tiny / "hf", tmp_path], check=True)
    run.mkdir(parents=True)
    subprocess.run(["cp", "-r", tiny / "mcore", run / "dist_ckpt"], check=True)
    content = crafted(tmp_path / "ran")["os.system"]
    (run / "dist_ckpt/.metadata").write_bytes(content)
    convert = [root / "converter_hf_to_mcore.py", "--hf_model_path", tmp_path / "hf"]
    convert += ["--mcore_path", run / "dist_ckpt"]
    for command in (
        [*convert, "--to", "hf", "--output_path", tmp_path / "out"],
        [*convert, "--verify_only"],
        [
            "-m",
            "ascend_rl.export",
            tmp_path / "global_step_1",
            "--out",
            tmp_path / "out",
            "--hf",
            tmp_path / "hf",
        ],
    ):
        result = subprocess.run(
            [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
        assert "posix.system" in result.stderr or "os.system" in result.stderr
    (run.parent / "data.pt").write_bytes(archive(content))
    assert checkpoints.position(run.parent, 4, 24) == checkpoints.Position(1, 0, 4)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


def test_a_checkpoint_names_no_file_of_another_directory(tiny, tmp_path):
    metadata = (tiny / "mcore/.metadata").read_bytes()
    subprocess.run(["cp", "-r", tiny / "mcore", tmp_path], check=True)
    name = b"__0_0.distcp"
    (tmp_path / "mcore/.metadata").write_bytes(metadata.replace(name, b"../__0.distc"))
    with pytest.raises(CannotWork, match="names the file ../__0.distc"):
        torch_dist.Checkpoint(tmp_path / "mcore")


def test_a_damaged_metadata_is_refused_in_a_sentence(tiny, tmp_path):
    """Cut off anywhere; a field that is missing, or is something else."""
    content = (tiny / "mcore/.metadata").read_bytes()
    (tmp_path / "metadata.json").write_text(json.dumps(torch_dist.FORMAT))
    fields = "state_dict_metadata storage_data properties size chunks offsets sizes fqn relative_path offset"
    damaged = [content[:length] for length in range(0, len(content), 301)]
    damaged += [content.replace(name.encode(), name[::-1].encode()) for name in (*fields.split(), "length")]
    damaged += [pickle.dumps(value) for value in ({}, [], None, 3, "Metadata", {"state_dict_metadata": 1})]
    for each in damaged:
        (tmp_path / ".metadata").write_bytes(each)
        with pytest.raises(CannotWork, match="not a complete Megatron checkpoint|is damaged|no data for its"):
            torch_dist.Checkpoint(tmp_path)


def test_what_torch_and_megatron_save_is_read(tmp_path):
    """All that torch's classes may hold: a path, prefixes, flattened keys, other dtypes, bytes."""
    from torch.distributed import checkpoint

    state = {"w": torch.arange(6.0).view(2, 3), "ids": torch.arange(3), "deep": {"b": [torch.ones(2).bool()]}}
    state |= {"object": {"lr": 1.0}, "half": torch.ones(2, 2).bfloat16()}
    checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").write_text(json.dumps(torch_dist.FORMAT))
    found = torch_dist.Checkpoint(tmp_path)
    expected = checkpoint.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert {*found.tensors, *found.objects} == set(expected)
    for key, (dtype, shape) in found.tensors.items():
        assert (f"torch.{dtype}", shape) == (str(expected[key].properties.dtype), tuple(expected[key].size))
    found.close()


# ------------------------------------------------------------------------------------------------ the tree

# What reads a pickle without limits, and of which module; with an argument that sets one.
LIMITS = {
    "pickle": {"load", "loads", "Unpickler"},
    "_pickle": {"load", "loads", "Unpickler"},
    "cloudpickle": {"load", "loads"},
    "dill": {"load", "loads"},
    "joblib": {"load"},
    "marshal": {"load", "loads"},
    "shelve": {"open"},
    "yaml": {"load", "load_all", "unsafe_load", "full_load"},
    "torch": {"load"},
    "torch.jit": {"load"},
    "numpy": {"load"},
    "np": {"load"},
    "pandas": {"read_pickle"},
    "pd": {"read_pickle"},
}
METHODS = {"read_metadata", "read_pickle", "unsafe_load"}  # of whatever object
# What reads only what this very process or its parent wrote.
OWN = {
    "ascend_rl/lint/verl_config.py": "pickle.loads",
    "bench/bench_sam.py": "pickle.load",
}


def unlimited(source: str) -> list[str]:
    """Calls in a file that build whatever a file says."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "Unpickler" in " ".join(map(ast.unparse, node.bases)):
            defined = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
            found += [f"class {node.name}"] * ("find_class" not in defined)
        if not isinstance(node, ast.Call):
            continue
        module, _, name = ast.unparse(node.func).rpartition(".")
        if not module and name in names:
            module, _, name = names[name].rpartition(".")
        module = names.get(module, module)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        limited = (
            given.get("weights_only") == "True"
            or (
                module == "yaml"
                and "SafeLoader" in " ".join([*map(ast.unparse, node.args[1:]), *given.values()])
            )
            or (module in ("numpy", "np") and given.get("allow_pickle", "False") == "False")
        )
        if not limited and (name in LIMITS.get(module, ()) or name in METHODS):
            found.append(f"{module}.{name}")
    return found


def test_the_search_finds_each_kind():
    for source in (
        "import pickle\npickle.loads(x)",
        "import pickle as p\np.load(x)",
        "from pickle import loads as read\nread(x)",
        "import pickle\npickle.Unpickler(x).load()",
        "import torch\ntorch.load(x)",
        "import torch\ntorch.load(x, weights_only=False)",
        "import numpy as np\nnp.load(x, allow_pickle=True)",
        "import yaml\nyaml.load(x, Loader=yaml.Loader)",
        "import marshal\nmarshal.loads(x)",
        "import shelve\nshelve.open(x)",
        "import joblib\njoblib.load(x)",
        "FileSystemReader(x).read_metadata()",
        "import pickle\nclass Mine(pickle.Unpickler):\n    pass",
    ):
        assert unlimited(source), source
    for source in (
        "import json\njson.loads(x)",
        "import torch\ntorch.load(x, weights_only=True)",
        "import numpy as np\nnp.load(x)",
        "import yaml\nyaml.load(x, Loader=yaml.SafeLoader)\nyaml.safe_load(x)",
    ):
        assert not unlimited(source), source


def test_nothing_that_is_shipped_unpickles_without_limits(root):
    """In the code, the tools, the benchmarks, and what the patches add."""
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "*.py"], capture_output=True, text=True, check=True
    )
    files = [file for file in listed.stdout.splitlines() if not file.startswith("tests/")]
    assert len(files) > 100
    found = {file: unlimited((root / file).read_text()) for file in files}
    assert {file: ", ".join(calls) for file, calls in found.items() if calls} == OWN
    loads = r"pickle\.loads?\(", r"torch\.load\((?!.*weights_only=True)", "allow_pickle=True", r"yaml\.load\("
    calls = re.compile(rf"^\+.*\b({'|'.join(loads)})", re.MULTILINE)
    added = {path.name: calls.findall(path.read_text()) for path in root.glob("patches/*/*.patch")}
    assert len(added) > 50 and not {name: lines for name, lines in added.items() if lines}
