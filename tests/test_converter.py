"""The converter against brute force, torch.save and real megatron-core models, and when it is killed."""

from __future__ import annotations

import collections
import errno
import hashlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import megatron_cpu
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from ascend_rl.settings.model import Model
from ascend_rl.settings.switch import CannotWork
from ascend_rl.weights import converter, files, journal, qwen3, torch_dist, workers
from ascend_rl.weights.converter import Options

DTYPES = {name: getattr(torch, name) for name in torch_dist.ITEMSIZE}
SIZES = dict(num_hidden_layers=4, hidden_size=32, vocab_size=96, intermediate_size=48)
QWEN3 = SIZES | dict(num_attention_heads=8, num_key_value_heads=4, head_dim=8)
EXPERTS = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
TINY = {
    "qwen3_moe": QWEN3 | EXPERTS | dict(architectures=["Qwen3MoeForCausalLM"], tie_word_embeddings=False),
    "qwen3": QWEN3 | dict(architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True),
    "qwen2": SIZES
    | dict(architectures=["Qwen2ForCausalLM"], num_attention_heads=4, num_key_value_heads=2)
    | dict(tie_word_embeddings=True),
}
TINY = {model_type: config | {"model_type": model_type} for model_type, config in TINY.items()}


def make_model(
    directory: Path, config: dict, dtype=torch.bfloat16, files: int = 2, seed: int = 0
) -> dict[str, torch.Tensor]:
    """A Hugging Face directory with random weights, and the weights."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    generator = torch.Generator().manual_seed(seed)
    shapes = qwen3.hf_tensors(Model.from_config(config))
    weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    if files == 1:
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
        return weights
    names, where = list(weights), {}
    for nth in range(files):
        file = f"model-{nth + 1:05}-of-{files:05}.safetensors"
        save_file({name: weights[name] for name in names[nth::files]}, directory / file, {"format": "pt"})
        where |= dict.fromkeys(names[nth::files], file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return weights


def reference(weights: dict[str, torch.Tensor], config: dict) -> dict[str, torch.Tensor]:
    """What Megatron's tensors are, made whole and in memory."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    result: dict[str, torch.Tensor] = {}
    layers: dict[str, list[torch.Tensor]] = collections.defaultdict(list)
    for layer in range(config["num_hidden_layers"]):
        get = {
            n.removeprefix(f"model.layers.{layer}."): w
            for n, w in weights.items()
            if n.startswith(f"model.layers.{layer}.")
        }
        q = get["self_attn.q_proj.weight"].view(groups, heads // groups * dim, -1)
        k, v = (get[f"self_attn.{n}_proj.weight"].view(groups, dim, -1) for n in "kv")
        if config["model_type"] == "qwen2":
            bias = {n: get[f"self_attn.{n}_proj.bias"].view(groups, -1) for n in "qkv"}
            put = {"self_attention.linear_qkv.bias": torch.cat(list(bias.values()), 1).flatten()}
        else:
            put = {f"self_attention.{n}_layernorm.weight": get[f"self_attn.{n}_norm.weight"] for n in "qk"}
        put |= {
            "self_attention.linear_qkv.weight": torch.cat([q, k, v], 1).flatten(0, 1),
            "self_attention.linear_qkv.layer_norm_weight": get["input_layernorm.weight"],
            "self_attention.linear_proj.weight": get["self_attn.o_proj.weight"],
        }
        gate_up = lambda unit: torch.cat([get[f"{unit}gate_proj.weight"], get[f"{unit}up_proj.weight"]])  # noqa: E731, B023
        if config["model_type"] == "qwen3_moe":
            units = [f"mlp.experts.{expert}." for expert in range(config["num_experts"])]
            put["pre_mlp_layernorm.weight"] = get["post_attention_layernorm.weight"]
            put["mlp.router.weight"] = get["mlp.gate.weight"]
            put["mlp.experts.experts.linear_fc1.weight"] = torch.stack([gate_up(unit) for unit in units])
            put["mlp.experts.experts.linear_fc2.weight"] = torch.stack(
                [get[f"{unit}down_proj.weight"] for unit in units]
            )
        else:
            put["mlp.linear_fc1.layer_norm_weight"] = get["post_attention_layernorm.weight"]
            put["mlp.linear_fc1.weight"] = gate_up("mlp.")
            put["mlp.linear_fc2.weight"] = get["mlp.down_proj.weight"]
        for name, value in put.items():
            layers[f"decoder.layers.{name}"].append(value)
    result |= {name: torch.stack(values) for name, values in layers.items()}
    result["embedding.word_embeddings.weight"] = weights["model.embed_tokens.weight"]
    result["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
    if not config["tie_word_embeddings"]:
        result["output_layer.weight"] = weights["lm_head.weight"]
    return result


def load_with_torch(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, through torch.distributed.checkpoint itself."""
    from torch.distributed import checkpoint

    entries = checkpoint.FileSystemReader(directory).read_metadata().state_dict_metadata
    tensors = {
        key: torch.full(entry.size, torch.nan, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if hasattr(entry, "size")
    }
    checkpoint.load(tensors, checkpoint_id=directory)
    return tensors


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()
    }


def hashes(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


QUIET = Options(workers=2, quiet=True)


def test_to_mcore_needs_no_torch(root, hf, tmp_path):
    """Seconds and 600 MB less; and a login node without torch can convert."""
    blocker = tmp_path / "blocker/torch.py"
    blocker.parent.mkdir()
    blocker.write_text("raise ImportError('torch is not here')")
    path = f"{blocker.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    result = command(root, "--hf_model_path", hf, "--output_path", tmp_path / "mcore", PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
    assert equal(load_with_torch(tmp_path / "mcore"), reference(weights_of(hf), TINY["qwen3_moe"]))


# ------------------------------------------------------------------------------------------------ mapping

configs = st.builds(
    lambda kind, layers, groups, per_group, dim, tied, vocabulary: (
        TINY[kind]
        | dict(
            num_hidden_layers=layers,
            num_attention_heads=groups * per_group,
            num_key_value_heads=groups,
            head_dim=dim,
            tie_word_embeddings=tied,
            vocab_size=vocabulary,
        )
    ),
    st.sampled_from(list(TINY)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([2, 6]),
    st.booleans(),
    st.integers(1, 40),
)


@given(
    configs,
    st.sampled_from(list(DTYPES.values())),
    st.sampled_from([0, 1, 2, 4]),
    st.integers(1, 3),
    st.sampled_from([400, 5000, 10**9]),
    st.sampled_from([64, 1000, 1 << 20]),
)
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
def test_both_directions_equal_brute_force(
    tmp_path_factory, monkeypatch, config, dtype, ep_size, workers, limit, block
):
    tmp = tmp_path_factory.mktemp("conversion")
    weights = make_model(tmp / "hf", config, dtype, files=workers)
    options = Options(
        layout="grouped" if ep_size else "default",
        ep_size=ep_size,
        workers=workers,
        verify=True,
        quiet=True,
        shard_bytes=limit,
    )
    with monkeypatch.context() as patch:
        patch.setattr(converter, "BLOCK_BYTES", block)
        patch.setattr(converter, "CHUNK_BYTES", limit)
        patch.setattr(converter, "FILE_BYTES", 20 * limit)
        converter.to_mcore(tmp / "hf", tmp / "mcore", options)
        assert equal(load_with_torch(tmp / "mcore"), reference(weights, config))
        converter.to_hf(tmp / "mcore", tmp / "hf", tmp / "back", options)
    assert equal(weights_of(tmp / "back"), weights)
    assert sorted(p.name for p in tmp.iterdir()) == ["back", "hf", "mcore"]
    assert (tmp / "back/tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("kind", TINY)
def test_hugging_face_loads_what_comes_back(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    make_model(tmp_path / "hf", TINY[kind], torch.float32)
    converter.to_mcore(tmp_path / "hf", tmp_path / "mcore", QUIET)
    converter.to_hf(tmp_path / "mcore", tmp_path / "hf", tmp_path / "back", replace(QUIET, shard_bytes=20000))
    one, other = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto").eval() for name in ("hf", "back")
    )
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert equal(one.state_dict(), other.state_dict()) and len(one.state_dict()) > 40


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_transformers_qwen2_is_exported_bit_for_bit(tmp_path, tie):
    """From a shard as FSDP saves it, by the command, and there and back by the converter's."""
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    sizes = dict(vocab_size=97, hidden_size=48, intermediate_size=52, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=tie, dtype="float32")
    model = Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # new ones are zero
            torch.nn.init.normal_(parameter)
    actor = tmp_path / "global_step_3/actor"
    actor.mkdir(parents=True)
    torch.save(model.state_dict(), actor / "model_world_size_1_rank_0.pt")
    model.save_pretrained(actor / "huggingface")
    (actor / "huggingface/model.safetensors").unlink()
    export = [*map(str, (sys.executable, "-m", "ascend_rl.export", actor.parent, "--dtype", "auto", "--out"))]
    inside = subprocess.run([*export, actor.parent / "hf"], capture_output=True, text=True, timeout=300)
    assert inside.returncode == 1 and "global_step_3, which is read; choose a place" in inside.stderr
    subprocess.run([*export, tmp_path / "out"], check=True, capture_output=True, timeout=300)
    converter.to_mcore(tmp_path / "out", tmp_path / "mcore", replace(QUIET, verify=True))
    converter.to_hf(tmp_path / "mcore", tmp_path / "out", tmp_path / "back", replace(QUIET, verify=True))
    tokens = torch.arange(20).view(2, 10)
    for name in ("out", "back"):
        loaded, told = AutoModelForCausalLM.from_pretrained(
            tmp_path / name, dtype="auto", output_loading_info=True
        )
        assert not any(told.values()) and loaded.eval().dtype == torch.float32
        assert equal(loaded.state_dict(), model.state_dict())
        with torch.no_grad():
            assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-32b", 32.76),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3-235b-a22b", 235.09),
        ("qwen2.5-7b", 7.62),
        ("qwen2.5-3b", 3.09),
        ("qwen2.5-0.5b", 0.49),
    ],
)
def test_the_plan_of_the_recipes_models_covers_every_row_once(name, billions):
    """Parameters as published; every row of every tensor in exactly one place; chunks tile their tensors."""
    model = Model.named(name)
    shapes = qwen3.hf_tensors(model)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) / 1e9 == pytest.approx(billions, abs=0.005)
    together = converter.experts_per_chunk(model, Options(layout="grouped"))
    assert together == (4 if model.experts else 1)
    pieces = collections.defaultdict(list)
    for matrix in qwen3.mcore_tensors(model):
        chunks = list(qwen3.chunks_of(matrix, 2, together, converter.CHUNK_BYTES))
        assert sum(int(np.prod(chunk.sizes)) for chunk in chunks) == int(np.prod(matrix.size))
        assert len({chunk.offsets for chunk in chunks}) == len(chunks)
        for chunk in chunks:
            assert int(np.prod(chunk.sizes)) * 2 <= converter.CHUNK_BYTES
            assert sum(p.rows for p in chunk.stack) * int(np.prod(matrix.shape[1:])) == int(
                np.prod(chunk.sizes)
            )
            for piece in chunk.stack:
                pieces[piece.name].append((piece.row, piece.rows))
    assert pieces.keys() == shapes.keys()
    for name, parts in pieces.items():
        ends = [0]
        for row, rows in sorted(parts):
            assert row == ends[-1]
            ends.append(row + rows)
        assert ends[-1] == shapes[name][0]


def test_workers_change_no_byte(tmp_path):
    make_model(tmp_path / "hf", TINY["qwen3_moe"])
    for count in (1, 7):
        converter.to_mcore(tmp_path / "hf", tmp_path / f"mcore{count}", replace(QUIET, workers=count))
    assert hashes(tmp_path / "mcore1") == hashes(tmp_path / "mcore7")


@pytest.mark.parametrize(
    ("have", "want"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")]
)
def test_dtype_option(tmp_path, have, want):
    weights = make_model(tmp_path / "hf", TINY["qwen3"] | {"torch_dtype": "bfloat16"}, DTYPES[have])
    options = replace(QUIET, dtype=want, verify=True)
    converter.to_mcore(tmp_path / "hf", tmp_path / "mcore", options)
    assert equal(
        load_with_torch(tmp_path / "mcore"),
        reference({n: w.to(DTYPES[want]) for n, w in weights.items()}, TINY["qwen3"]),
    )
    converter.to_hf(tmp_path / "mcore", tmp_path / "hf", tmp_path / "back", replace(options, dtype=have))
    assert equal(
        weights_of(tmp_path / "back"), {n: w.to(DTYPES[want]).to(DTYPES[have]) for n, w in weights.items()}
    )
    assert json.loads((tmp_path / "back/config.json").read_text())["torch_dtype"] == have


def test_a_tied_model_may_store_its_output_layer(tmp_path):
    weights = make_model(tmp_path / "hf", TINY["qwen3"], files=1)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "hf/model.safetensors")
    converter.to_mcore(tmp_path / "hf", tmp_path / "mcore", QUIET)
    assert "output_layer.weight" not in load_with_torch(tmp_path / "mcore")


@pytest.mark.parametrize("row", [0, 999, 1000, 1024, 2499])
def test_a_stored_output_layer_that_is_not_the_embedding_is_refused(tmp_path, monkeypatch, row):
    """Whichever row differs; rows are compared in three blocks."""
    weights = make_model(tmp_path / "hf", TINY["qwen3"] | {"vocab_size": 2500}, files=1)
    monkeypatch.setattr(converter, "BLOCK_BYTES", 1000 * 2 * TINY["qwen3"]["hidden_size"])
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["lm_head.weight"][row, -1] += 1
    save_file(weights, tmp_path / "hf/model.safetensors")
    with pytest.raises(CannotWork, match="lm_head.weight differs"):
        converter.to_mcore(tmp_path / "hf", tmp_path / "mcore", QUIET)


# -------------------------------------------------------------------------------- megatron-core


LAYOUTS = [
    ("qwen3_moe", dict(tp=2), "te", "default"),
    ("qwen3_moe", dict(pp=2), "te", "default"),
    ("qwen3_moe", dict(ep=2), "te", "grouped"),
    ("qwen3_moe", dict(ep=2), "grouped", "grouped"),
    ("qwen3_moe", dict(ep=4), "grouped", "default"),
    ("qwen3_moe", dict(tp=2, etp=2), "grouped", "default"),
    ("qwen3_moe", dict(tp=2, pp=2), "grouped", "grouped"),
    ("qwen3_moe", dict(), "sequential", "grouped"),
    ("qwen3", dict(tp=2), "te", "default"),
    ("qwen2", dict(tp=2), "te", "default"),
    ("qwen2", dict(tp=2, pp=2), "te", "default"),
]


def _save(rank, directory) -> list[int]:
    """In each rank: verl's models filled by mbridge, then in every layout from our checkpoints, saved by
    Megatron. Parameters of this rank's models.
    """
    from transformers import AutoConfig

    from megatron.core import dist_checkpointing
    from verl.models.mcore.mbridge import AutoBridge

    def save(model, out):
        if rank == 0:
            os.makedirs(out)
        torch.distributed.barrier()
        dist_checkpointing.save(model.sharded_state_dict(), out)

    def empty(hf, **layout):
        model = megatron_cpu.build(hf, dtype=torch.bfloat16, **layout)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        return model

    for kind in TINY:
        hf = f"{directory}/{kind}"
        model, config = empty(hf), AutoConfig.from_pretrained(hf)
        AutoBridge.from_config(config, dtype=torch.bfloat16).load_weights([model], hf)
        save(model, f"{directory}/theirs-{kind}")
    held = []
    for number, (kind, layout, experts, stored) in enumerate(LAYOUTS):
        model = empty(f"{directory}/{kind}", experts=experts, **layout)
        loaded = dist_checkpointing.load(model.sharded_state_dict(), f"{directory}/{stored}-{kind}")
        wrong = model.load_state_dict(loaded)
        assert not wrong.unexpected_keys and all(k.endswith("_extra_state") for k in wrong.missing_keys)
        save(model, f"{directory}/saved{number}")
        held.append(sum(parameter.numel() for parameter in model.parameters()))
    return held


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """The directory that ``_save`` wrote to, the first weights by kind, and parameters by rank and layout."""
    directory = tmp_path_factory.mktemp("megatron")
    weights = {kind: make_model(directory / kind, config) for kind, config in TINY.items()}
    for kind, stored in {(kind, stored) for kind, _, _, stored in LAYOUTS}:
        options = replace(QUIET, layout=stored, ep_size=2 if stored == "grouped" else 0)
        converter.to_mcore(directory / kind, directory / f"{stored}-{kind}", options)
    return directory, weights, run_ranks(4, _save, str(directory))


def _entries(directory) -> dict:
    from torch.distributed.checkpoint import FileSystemReader

    return FileSystemReader(directory).read_metadata().state_dict_metadata


@pytest.mark.parametrize("kind", TINY)
def test_the_checkpoint_is_what_mbridge_and_megatron_save(megatron, kind):
    ours, theirs = (megatron[0] / f"{who}-{kind}" for who in ("default", "theirs"))
    assert equal(load_with_torch(ours), load_with_torch(theirs))
    have, want = _entries(ours), _entries(theirs)
    assert have.keys() == want.keys()
    for key, entry in want.items():
        if hasattr(entry, "chunks"):
            chunks = [[(tuple(c.offsets), tuple(c.sizes)) for c in e.chunks] for e in (entry, have[key])]
            assert sorted(chunks[0]) == sorted(chunks[1]), key
    formats = [json.loads((directory / "metadata.json").read_text()) for directory in (ours, theirs)]
    assert formats[0] == formats[1]
    assert torch.load(ours / "common.pt") == torch.load(theirs / "common.pt") == {}


@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=lambda n: "-".join(map(str, LAYOUTS[n])))
def test_real_models_load_it_at_any_layout(megatron, tmp_path, number):
    """Loaded into every rank, saved by Megatron as sharded there, converted back: bit for bit the first
    weights.
    """
    directory, weights, held = megatron
    kind, layout, _, stored = LAYOUTS[number]
    total = sum(w.numel() for w in weights[kind].values())
    assert all(rank[number] < total for rank in held) or not layout
    saved = directory / f"saved{number}"
    assert equal(load_with_torch(saved), load_with_torch(directory / f"{stored}-{kind}"))
    converter.to_hf(saved, directory / kind, tmp_path / "back", replace(QUIET, verify=True))
    assert equal(weights_of(tmp_path / "back"), weights[kind])


# ------------------------------------------------------------------------------------------------ kills


def _converting(directory: Path, to: str, deadly_call: int) -> None:
    """Convert in this process, which kills itself at its n-th system call that changes the disk."""
    workers.COMMIT_BYTES, converter.BLOCK_BYTES, converter.FILE_BYTES = 8000, 4096, 40000
    calls = 0
    for name in (
        "pwrite",
        "write",
        "fdatasync",
        "fsync",
        "ftruncate",
        "rename",
        "mkdir",
        "unlink",
        "posix_fadvise",
    ):
        original = getattr(os, name)

        def deadly(*arguments, original=original, name=name, **keywords):
            nonlocal calls
            calls += 1
            if calls == deadly_call:
                if name in ("pwrite", "write"):  # half of it
                    fd, data, *offset = arguments
                    original(fd, memoryview(data)[: len(data) // 2], *offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **keywords)

        setattr(os, name, deadly)
    options = Options(workers=1, quiet=True)
    if to == "mcore":
        converter.to_mcore(directory / "hf", directory / "out", options)
    else:
        converter.to_hf(
            directory / "mcore", directory / "hf", directory / "out", replace(options, shard_bytes=20000)
        )


@pytest.mark.weekly
@pytest.mark.parametrize("to", ["mcore", "hf"])
def test_killed_at_any_moment_the_next_run_ends_with_the_same_hashes(tmp_path, to, monkeypatch):
    make_model(tmp_path / "hf", TINY["qwen3"] | {"num_hidden_layers": 2}, files=1)
    converter.to_mcore(tmp_path / "hf", tmp_path / "mcore", QUIET)
    monkeypatch.setattr(converter, "FILE_BYTES", 40000)
    if to == "mcore":
        converter.to_mcore(tmp_path / "hf", tmp_path / "expected", QUIET)
    else:
        converter.to_hf(
            tmp_path / "mcore", tmp_path / "hf", tmp_path / "expected", replace(QUIET, shard_bytes=20000)
        )
    expected, context = hashes(tmp_path / "expected"), multiprocessing.get_context("fork")
    assert len([name for name in expected if name.endswith((".distcp", ".safetensors"))]) > 2
    resumed, survived, call = 0, 0, 0
    while not survived:
        call += 1
        for attempt in (call, 3 + call % 5, 0):  # killed, killed again soon after resuming, left alone
            process = context.Process(target=_converting, args=(tmp_path, to, attempt))
            process.start()
            process.join(60)
            if process.exitcode == 0:
                survived += attempt == call
                break
            assert process.exitcode == -signal.SIGKILL, (call, attempt)
            journal = tmp_path / "out.partial.journal"
            resumed += journal.exists() and journal.read_bytes().count(b"\n") > 2
        assert hashes(tmp_path / "out") == expected, call
        assert not list(tmp_path.glob("out.*")), call
        for path in (tmp_path / "out").iterdir():
            path.unlink()
        (tmp_path / "out").rmdir()
    assert call > 50 and resumed > 20


def test_what_the_journal_names_is_not_copied_again(tmp_path, monkeypatch):
    """Kill after the first commit; the second run reads only what is left."""
    make_model(tmp_path / "hf", TINY["qwen3"], files=1)
    monkeypatch.setattr(workers, "COMMIT_BYTES", 1)
    read, rows = [], converter.Safetensors.rows

    def counted(self, name, *arguments):
        read.append(name)
        if len(read) == 20:
            raise OSError(28, "No space left on device")
        return rows(self, name, *arguments)

    monkeypatch.setattr(converter.Safetensors, "rows", counted)
    with pytest.raises(CannotWork, match="No space left.*run the same command again"):
        converter.to_mcore(tmp_path / "hf", tmp_path / "mcore", replace(QUIET, workers=1))
    assert not (tmp_path / "mcore").exists()
    first = read[:19]
    converter.to_mcore(tmp_path / "hf", tmp_path / "mcore", replace(QUIET, workers=1))
    again = set(first) & set(read[20:])
    assert len(again) <= 3  # of the chunk that was interrupted: at most query, key and value
    assert equal(load_with_torch(tmp_path / "mcore"), reference(weights_of(tmp_path / "hf"), TINY["qwen3"]))


# ------------------------------------------------------------------------------------------------ refusals


@pytest.fixture
def hf(tmp_path):
    make_model(tmp_path / "hf", TINY["qwen3_moe"], files=1)
    return tmp_path / "hf"


def change(directory: Path, function) -> None:
    weights = load_file(directory / "model.safetensors")
    function(weights)
    save_file(weights, directory / "model.safetensors")


DOWN = "model.layers.2.mlp.experts.3.down_proj.weight"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda w: w.pop(DOWN), f"1 missing: {re.escape(DOWN)}"),
        (lambda w: w.update({"model.layers.4.extra": torch.zeros(1)}), "1 extra: model.layers.4.extra"),
        (
            lambda w: w.update({DOWN: torch.zeros(32, 15)}),
            rf"{re.escape(DOWN)} \(32, 15\) instead of \(32, 16\)",
        ),
        (
            lambda w: w.update({DOWN: torch.zeros(32, 16, dtype=torch.int8)}),
            f"{re.escape(DOWN)} has dtype I8",
        ),
        (lambda w: w.update({DOWN: w[DOWN].float()}), f"would mix .*{re.escape(DOWN)}.*--dtype"),
    ],
    ids=["missing", "extra", "misshapen", "integer", "mixed"],
)
def test_wrong_tensors_are_named(hf, tmp_path, function, message):
    change(hf, function)
    with pytest.raises(CannotWork, match=message):
        converter.to_mcore(hf, tmp_path / "mcore", QUIET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(model_type="llama"), "model_type 'llama'"),
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(mlp_only_layers=[1]), "mlp_only_layers"),
        (dict(decoder_sparse_step=2), "decoder_sparse_step"),
        (dict(quantization_config={"bits": 4}), "quantization_config"),
        (dict(num_experts=None), "num_experts must be a positive integer"),
        (dict(num_key_value_heads=3), "8 attention heads cannot share 3"),
    ],
)
def test_models_that_are_not_supported_are_refused(hf, tmp_path, config, message):
    (hf / "config.json").write_text(json.dumps(TINY["qwen3_moe"] | config))
    with pytest.raises(CannotWork, match=message):
        converter.to_mcore(hf, tmp_path / "mcore", QUIET)


def test_damaged_files_are_named(hf, tmp_path):
    content = (hf / "model.safetensors").read_bytes()
    for damage, message in (
        (content[:-1], "model.norm|cut off"),
        (content[:100], "not a safetensors file"),
        (b"", "not a safetensors file"),
    ):
        (hf / "model.safetensors").write_bytes(damage)
        with pytest.raises(CannotWork, match=message):
            converter.to_mcore(hf, tmp_path / "mcore", QUIET)
    (hf / "model.safetensors").unlink()
    with pytest.raises(CannotWork, match="no \\*.safetensors file"):
        converter.to_mcore(hf, tmp_path / "mcore", QUIET)
    (hf / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "gone.safetensors"}})
    )
    with pytest.raises(CannotWork, match="gone.safetensors: No such file"):
        converter.to_mcore(hf, tmp_path / "mcore", QUIET)


def test_an_index_that_lies_is_refused(tmp_path):
    make_model(tmp_path / "hf", TINY["qwen3"], files=2)
    index = tmp_path / "hf/model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = content["weight_map"]["model.embed_tokens.weight"]
    content["weight_map"]["model.layers.9.x"] = content["weight_map"]["model.embed_tokens.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(CannotWork, match="promises"):
        converter.to_mcore(tmp_path / "hf", tmp_path / "mcore", QUIET)


@pytest.mark.parametrize("consistent", [False, True])
def test_what_transformers_loads_is_converted(tmp_path, capfd, consistent):
    """model.safetensors first, whatever an index beside it says, and files that neither names are nothing."""
    from transformers import AutoModelForCausalLM

    make_model(tmp_path / "hf", TINY["qwen3"], torch.float32, files=2, seed=1)
    weights = make_model(tmp_path / "new", TINY["qwen3"], torch.float32, files=1, seed=2)
    (tmp_path / "new/model.safetensors").rename(tmp_path / "hf/model.safetensors")
    save_file({"stray": torch.zeros(1)}, tmp_path / "hf/adapter.safetensors")
    index = tmp_path / "hf/model.safetensors.index.json"
    if consistent:
        index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, "model.safetensors")}))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").state_dict()
    del loaded["lm_head.weight"]
    assert equal(loaded, weights)
    converter.to_mcore(tmp_path / "hf", tmp_path / "mcore", replace(QUIET, verify=True))
    assert equal(load_with_torch(tmp_path / "mcore"), reference(weights, TINY["qwen3"]))
    assert ("is ignored" in capfd.readouterr().err) is not consistent
    if not consistent:
        index.write_text("{")
        converter.verify(tmp_path / "hf", tmp_path / "mcore", QUIET)
    (tmp_path / "hf/model.safetensors").unlink()
    index.write_text("{")
    with pytest.raises(CannotWork, match="index.json is damaged"):
        converter.to_mcore(tmp_path / "hf", tmp_path / "other", QUIET)
    config = TINY["qwen3"] | {"transformers_weights": "other.safetensors"}
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    with pytest.raises(CannotWork, match="names other.safetensors as transformers_weights"):
        converter.to_mcore(tmp_path / "hf", tmp_path / "other", QUIET)


def files_under(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


# Outputs at which nothing can appear by a rename, and a word of the reason.
def _dangling_far(path: Path) -> str:
    path.symlink_to("gone/deeper/out")
    return "is a link to"


def _loop(path: Path) -> str:
    path.symlink_to(path)
    return "is a link to|exists and is not overwritten"


def _linked_files(path: Path) -> str:
    (path.parent / "full").mkdir()
    (path.parent / "full/mine").touch()
    path.symlink_to("full")
    return "exists and is not overwritten"


def _file(path: Path) -> str:
    path.touch()
    return "exists and is not overwritten"


def _fifo(path: Path) -> str:
    os.mkfifo(path)
    return "exists and is not overwritten"


def _partial_file(path: Path) -> str:
    path.with_name(f"{path.name}.partial").touch()
    return "is not a directory of a conversion"


def _partial_link(path: Path) -> str:
    path.with_name(f"{path.name}.partial").symlink_to("nowhere")
    return "is not a directory of a conversion"


def _journal_link(path: Path) -> str:
    path.with_name(f"{path.name}.partial.journal").symlink_to("nowhere")
    return "cannot be written"


IMPOSSIBLE = [
    _dangling_far, _loop, _linked_files, _file, _fifo, _partial_file, _partial_link, _journal_link,
]  # fmt: skip


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Path:
    """hf and mcore of one model."""
    folder = tmp_path_factory.mktemp("both")
    make_model(folder / "hf", TINY["qwen3"], files=1)
    converter.to_mcore(folder / "hf", folder / "mcore", QUIET)
    return folder


def convert(both: Path, to: str, output: Path | str) -> Path:
    if to == "mcore":
        return converter.to_mcore(both / "hf", output, QUIET)
    return converter.to_hf(both / "mcore", both / "hf", output, QUIET)


@pytest.fixture
def no_weights(monkeypatch) -> pytest.MonkeyPatch:
    """Nothing may be copied."""

    def write_all(*_):
        raise AssertionError("weights are copied already")

    monkeypatch.setattr(converter, "write_all", write_all)
    return monkeypatch


@pytest.mark.parametrize("to", ["mcore", "hf"])
@pytest.mark.parametrize("kind", IMPOSSIBLE, ids=lambda kind: kind.__name__[1:])
def test_an_output_that_cannot_appear_is_refused_before_the_first_byte(both, tmp_path, no_weights, kind, to):
    reason = kind(tmp_path / "out")
    before = files_under(tmp_path)
    with pytest.raises(CannotWork, match=reason):
        convert(both, to, tmp_path / "out")
    assert files_under(tmp_path) == before


@pytest.mark.parametrize("name", [".", "", "/", "/dev/null", "/dev/null/x", "/proc/out", "/proc", "x" * 250])
def test_a_place_that_is_none_is_refused_in_a_sentence(both, tmp_path, no_weights, name):
    no_weights.chdir(tmp_path)
    for to in ("mcore", "hf"):
        with pytest.raises(CannotWork):
            convert(both, to, name)
    assert not files_under(tmp_path)


@pytest.mark.parametrize("to", ["mcore", "hf"])
def test_an_output_in_the_input_is_refused(both, tmp_path, no_weights, to):
    """It would become part of what is read, or go with a checkpoint that the training deletes."""
    read = both / ("hf" if to == "mcore" else "mcore")
    (tmp_path / "link").symlink_to(read)
    before = files_under(both)
    for place in (read / "out", read / "deep/out", tmp_path / "link/out"):
        with pytest.raises(CannotWork, match="which is read; choose a place outside"):
            convert(both, to, place)
    with pytest.raises(CannotWork, match="is read|exists and is not overwritten"):
        convert(both, to, read)
    assert files_under(both) == before


@pytest.mark.parametrize("to", ["mcore", "hf"])
@pytest.mark.parametrize("there", [True, False], ids=["empty", "dangling"])
def test_an_output_that_is_a_link_is_its_target(both, tmp_path, to, there):
    """Written on the disk that it points to."""
    (tmp_path / "disk").mkdir()
    if there:
        (tmp_path / "disk/out").mkdir()
    (tmp_path / "out").symlink_to("disk/out")
    assert convert(both, to, tmp_path / "out") == tmp_path / "out"
    assert (tmp_path / "out").is_symlink() and [path.name for path in tmp_path.iterdir()] != []
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["out"]
    kept = {"mcore": "__0_0.distcp", "hf": "model.safetensors"}[to]
    assert (tmp_path / "out" / kept).is_file()


@pytest.mark.parametrize("name", ["tokenizer.json", "merges.txt"])
def test_a_file_that_cannot_be_copied_is_named_before_the_first_byte(both, tmp_path, no_weights, name):
    hf = tmp_path / "hf"
    subprocess.run(["cp", "-r", both / "hf", hf], check=True)
    (hf / name).unlink(missing_ok=True)
    (hf / name).symlink_to("../../blobs/gone")
    with pytest.raises(CannotWork, match=f"{name}: No such file"):
        converter.to_hf(both / "mcore", hf, tmp_path / "out", QUIET)
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


def test_mount_points_and_disks_that_cannot_be_written_are_refused(root, both, tmp_path):
    """In a mount namespace: an empty disk in the place of the output, one that is read-only around it."""
    script = """
mkdir -p empty same other ro && mount -t tmpfs none empty && mount --bind other same
mount -t tmpfs none ro && mount -o remount,ro ro
for out in empty same ro/out; do
    for to in "" "--to hf --mcore_path $BOTH/mcore"; do
        "$PYTHON" "$ROOT/converter_hf_to_mcore.py" --hf_model_path "$BOTH/hf" $to --output_path $out && exit 3
    done
done
find . -name '*.partial*' -o -type f
"""
    names = {"PYTHON": sys.executable, "ROOT": str(root), "BOTH": str(both)}
    result = subprocess.run(
        ["unshare", "-m", "bash", "-euc", script],
        cwd=tmp_path, env=os.environ | names, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode == 0 and result.stdout == "", result
    said = result.stderr.splitlines()
    assert len(said) == 6 and all(line.startswith("ERROR: ") for line in said), result.stderr
    assert sum("a mount point" in line for line in said) == 4
    assert sum("Read-only file system" in line for line in said) == 2


def test_nothing_is_overwritten(hf, tmp_path):
    (tmp_path / "mcore").mkdir()
    (tmp_path / "mcore/mine").write_text("mine")
    with pytest.raises(CannotWork, match="exists and is not overwritten"):
        converter.to_mcore(hf, tmp_path / "mcore", QUIET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mcore"]
    (tmp_path / "mcore/mine").unlink()
    converter.to_mcore(hf, tmp_path / "mcore", QUIET)  # an empty directory is as good as none
    before = hashes(tmp_path / "mcore")
    with pytest.raises(CannotWork, match="exists and is not overwritten"):
        converter.to_mcore(hf, tmp_path / "mcore", QUIET)
    assert hashes(tmp_path / "mcore") == before


def test_half_a_conversion_is_continued_with_the_same_input_only(hf, tmp_path, monkeypatch):
    monkeypatch.setattr(converter, "finish_mcore", lambda *_: (_ for _ in ()).throw(CannotWork("stopped")))
    with pytest.raises(CannotWork, match="stopped"):
        converter.to_mcore(hf, tmp_path / "mcore", QUIET)
    monkeypatch.undo()
    with pytest.raises(CannotWork, match="half a conversion of other weights or with other options"):
        converter.to_mcore(hf, tmp_path / "mcore", replace(QUIET, dtype="float32"))
    os.utime(hf / "model.safetensors", (1, 1))
    with pytest.raises(CannotWork, match="half a conversion of other weights"):
        converter.to_mcore(hf, tmp_path / "mcore", QUIET)


def stop_before_the_end(monkeypatch):
    for name in ("finish_mcore", "finish_hf"):
        monkeypatch.setattr(converter, name, lambda *_: (_ for _ in ()).throw(CannotWork("stopped")))


@pytest.mark.parametrize("to", ["mcore", "hf"])
@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "one byte in place"])
def test_weights_swapped_under_equal_size_and_time_are_not_continued_with(
    tmp_path, monkeypatch, to, replaced
):
    make_model(tmp_path / "hf", TINY["qwen3"] | {"vocab_size": 4096}, files=1)
    converter.to_mcore(tmp_path / "hf", tmp_path / "mcore", QUIET)

    def convert():
        if to == "mcore":
            return converter.to_mcore(tmp_path / "hf", tmp_path / "out", QUIET)
        return converter.to_hf(tmp_path / "mcore", tmp_path / "hf", tmp_path / "out", QUIET)

    with monkeypatch.context() as patch:
        stop_before_the_end(patch)
        with pytest.raises(CannotWork, match="stopped"):
            convert()
    file = tmp_path / ("hf/model.safetensors" if to == "mcore" else "mcore/__0_0.distcp")
    before, content = file.stat(), bytearray(file.read_bytes())
    middle = len(content) // 2
    if replaced:
        content[middle:-4096] = content[middle:-4096][::-1]
        (tmp_path / "new").write_bytes(content)
        os.replace(tmp_path / "new", file)
    else:
        with open(file, "r+b") as opened:
            opened.seek(middle)
            opened.write(bytes([content[middle] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(CannotWork, match="half a conversion of other weights"):
        convert()


def test_samples_of_a_file_tell_other_content_without_its_times(tmp_path):
    """From the first to the last byte; small files are read whole."""
    rng = np.random.default_rng(0)
    for size in (
        0,
        1,
        5000,
        files.SAMPLES * files.SAMPLE_BYTES,
        files.SAMPLES * files.SAMPLE_BYTES + 1,
        10**6,
    ):
        content = rng.integers(0, 256, size, np.uint8)
        other = content.copy()
        found = []
        for values in (content, other, ~content, content ^ (np.arange(size) == size - 1)):
            (tmp_path / "file").write_bytes(values.astype(np.uint8).tobytes())
            with open(tmp_path / "file", "rb") as file:
                found.append(files.samples(file.fileno(), size))
        assert found[0] == found[1] and (not size or found[0] not in found[2:]), size
        assert len(found[0]) <= files.SAMPLES * files.SAMPLE_BYTES


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_as_the_reason(hf, tmp_path, monkeypatch, code):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(journal.fcntl, "flock", flock)
    with pytest.raises(
        CannotWork, match=f"does not lock files .{os.strerror(code)}.*copy the result"
    ) as error:
        converter.to_mcore(hf, tmp_path / "mcore", QUIET)
    assert "another conversion" not in str(error.value) and not (tmp_path / "mcore.partial").exists()


def test_two_conversions_to_one_place(hf, tmp_path):
    import fcntl

    with open(tmp_path / "mcore.partial.journal", "w") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(CannotWork, match="another conversion is writing"):
            converter.to_mcore(hf, tmp_path / "mcore", QUIET)
    assert (tmp_path / "mcore.partial.journal").exists()


def test_a_full_disk_is_noticed_before_writing(hf, tmp_path, monkeypatch):
    real = os.statvfs
    monkeypatch.setattr(
        os, "statvfs", lambda path: os.statvfs_result([*real(path)[:3], 1, 1, *real(path)[5:]])
    )
    with pytest.raises(CannotWork, match="GB are needed; nothing was written"):
        converter.to_mcore(hf, tmp_path / "mcore", QUIET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_verify_names_the_tensor_that_changed(hf, tmp_path):
    converter.to_mcore(hf, tmp_path / "mcore", QUIET)
    converter.verify(hf, tmp_path / "mcore", QUIET)
    (file,) = (tmp_path / "mcore").glob("__0_0.distcp")
    raw = load_file(hf / "model.safetensors")[DOWN].view(torch.uint8).numpy().tobytes()
    content = bytearray(file.read_bytes())
    assert content.count(raw) == 1
    content[content.find(raw) + 40] ^= 1
    file.write_bytes(content)
    with pytest.raises(CannotWork, match=f"{re.escape(DOWN)} differs .* in row 1"):
        converter.verify(hf, tmp_path / "mcore", QUIET)


def test_verify_comes_before_the_output_appears(hf, tmp_path, monkeypatch):
    write = converter.write_exactly
    monkeypatch.setattr(
        converter,
        "write_exactly",
        lambda fd, data, at: write(fd, bytes(len(data)) if len(data) == 1024 else data, at),
    )
    with pytest.raises(CannotWork, match="differs between"):
        converter.to_mcore(hf, tmp_path / "mcore", replace(QUIET, verify=True))
    assert not (tmp_path / "mcore").exists()


def test_damaged_checkpoints_are_named(hf, tmp_path):
    converter.to_mcore(hf, tmp_path / "mcore", QUIET)
    file = tmp_path / "mcore/__0_0.distcp"
    content = file.read_bytes()
    for damage, message in ((content[:-2000], "damaged|too early"), (bytes(len(content)), "file is damaged")):
        file.write_bytes(damage)
        with pytest.raises(CannotWork, match=message):
            converter.to_hf(tmp_path / "mcore", hf, tmp_path / "back", QUIET)
        for path in (*(tmp_path / "back.partial").iterdir(), tmp_path / "back.partial.journal"):
            path.unlink()
        (tmp_path / "back.partial").rmdir()
    file.unlink()
    with pytest.raises(CannotWork, match="__0_0.distcp: No such file"):
        converter.to_hf(tmp_path / "mcore", hf, tmp_path / "back", QUIET)
    (tmp_path / "mcore/metadata.json").unlink()
    with pytest.raises(CannotWork, match="not a complete Megatron checkpoint"):
        converter.to_hf(tmp_path / "mcore", hf, tmp_path / "back2", QUIET)


def test_a_checkpoint_of_another_model_is_refused(hf, tmp_path):
    converter.to_mcore(hf, tmp_path / "mcore", QUIET)
    (hf / "config.json").write_text(
        json.dumps(TINY["qwen3_moe"] | {"num_experts": 5, "tie_word_embeddings": True})
    )
    with pytest.raises(
        CannotWork,
        match=r"extra: output_layer.weight; .*router.weight \(4, 4, 32\) instead of \(4, 5, 32\)",
    ):
        converter.to_hf(tmp_path / "mcore", hf, tmp_path / "back", QUIET)


def test_a_padded_vocabulary_is_cut(hf, tmp_path):
    """Megatron pads the vocabulary for some TP sizes; Hugging Face does not want the padding."""
    make_model(tmp_path / "padded", TINY["qwen3_moe"] | {"vocab_size": 128}, files=1)
    converter.to_mcore(tmp_path / "padded", tmp_path / "mcore", QUIET)
    converter.to_hf(tmp_path / "mcore", hf, tmp_path / "back", replace(QUIET, verify=True))
    assert torch.equal(
        weights_of(tmp_path / "back")["lm_head.weight"],
        weights_of(tmp_path / "padded")["lm_head.weight"][:96],
    )


@pytest.mark.parametrize(
    ("want", "value", "fits"),
    [
        *(("float16", value, False) for value in (65520.0, -65520.0, 1e6)),
        *(
            ("float16", value, True)
            for value in (65504.0, 65519.0, -65504.0, torch.inf, -torch.inf, torch.nan)
        ),
        ("bfloat16", 3.4e38, False),
        *(("bfloat16", value, True) for value in (3.38e38, -3.38e38, torch.inf, torch.nan)),
        ("float32", torch.inf, True),
    ],
)
def test_what_becomes_infinite_is_an_error(tmp_path, want, value, fits):
    """Not what is infinite, or no number, already."""
    weights = make_model(tmp_path / "hf", TINY["qwen3"], torch.float32, files=1)
    weights["model.norm.weight"][3] = value
    save_file(weights, tmp_path / "hf/model.safetensors")
    options = replace(QUIET, dtype=want, verify=True)
    if not fits:
        with pytest.raises(CannotWork, match=f"model.norm.weight does not fit into {want}; use --dtype"):
            converter.to_mcore(tmp_path / "hf", tmp_path / "mcore", options)
        return
    converter.to_mcore(tmp_path / "hf", tmp_path / "mcore", options)
    found = load_with_torch(tmp_path / "mcore")["decoder.final_layernorm.weight"]
    assert torch.equal(
        found.view(torch.uint8), weights["model.norm.weight"].to(DTYPES[want]).view(torch.uint8)
    )


def test_an_ep_size_that_does_not_divide_the_experts(hf, tmp_path):
    with pytest.raises(CannotWork, match="--ep_size 3 does not divide the 4 experts"):
        converter.to_mcore(hf, tmp_path / "mcore", replace(QUIET, layout="grouped", ep_size=3))


# -------------------------------------------------------------------------------- command line


def command(root, *arguments, launcher=(), **environment):
    return subprocess.run(
        [sys.executable, *launcher, str(root / "converter_hf_to_mcore.py"), *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_the_documented_torchrun_command(root, hf, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "16")
    result = command(
        root,
        "--hf_model_path",
        hf,
        "--output_path",
        tmp_path / "mcore",
        "--trust_remote_code",
        "--use_cpu_initialization",
        launcher=launcher,
        USE_ALLTOALL_OVERLAP="1",
    )
    assert result.returncode == 0, result.stderr
    assert "(grouped layout)" in result.stdout
    assert equal(load_with_torch(tmp_path / "mcore"), reference(weights_of(hf), TINY["qwen3_moe"]))


def test_command_line_there_and_back(root, hf, tmp_path):
    there = command(
        root,
        "--hf_model_path",
        hf,
        "--output_path",
        tmp_path / "deep/mcore",
        "--verify",
        "--dtype",
        "float32",
    )
    assert there.returncode == 0 and "(default layout)" in there.stdout, there.stderr
    assert re.search(r"to mcore \[#+\] 100.0% .* GB/s ETA 0 s", there.stderr)
    checked = command(root, "--hf_model_path", hf, "--mcore_path", tmp_path / "deep/mcore", "--verify_only")
    assert checked.returncode == 0, checked.stderr
    back = command(
        root,
        "--to",
        "hf",
        "--mcore_path",
        tmp_path / "deep/mcore",
        "--hf_model_path",
        hf,
        "--output_path",
        tmp_path / "back",
        "--dtype",
        "bfloat16",
        "--quiet",
    )
    assert back.returncode == 0 and not back.stderr, back.stderr
    assert equal(weights_of(tmp_path / "back"), weights_of(hf))
    again = command(root, "--hf_model_path", hf, "--output_path", tmp_path / "deep/mcore")
    assert again.returncode == 1 and "ERROR: " in again.stderr and "not overwritten" in again.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--output_path", "x"),
        ("--hf_model_path", "x"),
        ("--hf_model_path", "x", "--output_path", "y", "--to", "hf"),
        ("--hf_model_path", "x", "--output_path", "y", "--workers", "0"),
        ("--hf_model_path", "x", "--output_path", "y", "--mcore_path", "z"),
    ],
)
def test_unusable_arguments(root, arguments):
    assert command(root, *arguments).returncode == 2


def test_an_unknown_switch_is_refused(root, hf, tmp_path):
    result = command(
        root, "--hf_model_path", hf, "--output_path", tmp_path / "mcore", USE_ALLTOALL_OVERLAP="yes"
    )
    assert result.returncode == 2 and "USE_ALLTOALL_OVERLAP=yes: give 1 or 0" in result.stderr
