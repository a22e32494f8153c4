"""``python -m ascend_rl.export`` gives the weights that the trainer had, from all that verl's managers save.

verl's checkpoint managers save models whose weights were changed after the load, so that what is exported is
what was trained. The oracle is the changed Hugging Face checkpoint; for FSDP verl's own model merger, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from megatron_tiny import Layout, make_checkpoint, make_worker
from ranks import run_ranks
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ascend_rl.weights import converter

pytestmark = pytest.mark.long

STEP = 1.01  # "training": every weight is multiplied
ACTOR = "actor_rollout_ref.actor"
# (version of FSDP, size of the fsdp axis, kind of model) by number of ranks
FSDP = {
    1: [("fsdp", -1, "tied")],
    3: [("fsdp", -1, "tied"), ("fsdp2", -1, "moe"), ("fsdp2", -1, "qwen2")],
    4: [("fsdp", 2, "tied"), ("fsdp2", 2, "tied"), ("fsdp", 2, "qwen2")],
}
OVERLAP = ("moe_use_legacy_grouped_gemm=True", "use_cpu_initialization=True")
MEGATRON = [
    Layout("dense", tp=2),
    Layout("moe", ep=2),
    Layout("moe", pp=2, options=OVERLAP),
    Layout("moe", ep=2, options=OVERLAP),
]
MBRIDGE = Layout("moe", ep=2)


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()
    }


def trained(path: Path, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    """The weights after "training", as a rollout gets them."""
    return {name: (tensor.float() * STEP).to(dtype) for name, tensor in weights_of(path).items()}


def wrong(found: dict, expected: dict) -> list[str]:
    same = {n for n in found.keys() & expected if found[n].dtype == expected[n].dtype}
    same = {n for n in same if torch.equal(found[n], expected[n])}
    return sorted((found.keys() | expected.keys()) - same)


def export(*arguments, **more) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "ascend_rl.export", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, **more)


def exported(*arguments) -> str:
    result = export(*arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


# FSDP.


def tied(path: Path, kind: str = "qwen3") -> Path:
    """A model whose rows three ranks cannot share evenly, and whose output layer is its embedding."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    make_checkpoint("dense", path, layers=1)
    tokenizer = AutoTokenizer.from_pretrained(path)
    torch.manual_seed(1)
    sizes = dict(hidden_size=40, intermediate_size=52, num_attention_heads=4, num_key_value_heads=2)
    sizes |= {} if kind == "qwen2" else {"head_dim": 8}
    config = AutoConfig.for_model(
        kind, vocab_size=97, num_hidden_layers=2, tie_word_embeddings=True, dtype="float32", **sizes
    )
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # new ones are zero
            torch.nn.init.normal_(parameter)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    GenerationConfig(temperature=0.7, do_sample=True).save_pretrained(path)
    return path


def save_fsdp(rank: int, cases: list, paths: dict[str, Path], folder: Path) -> None:
    from omegaconf import OmegaConf
    from torch.distributed.fsdp import FullyShardedDataParallel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy
    from verl.workers.fsdp_workers import create_device_mesh, get_sharding_strategy

    for version, size, kind in cases:
        model = AutoModelForCausalLM.from_pretrained(paths[kind], dtype=torch.float32)
        mesh = create_device_mesh(torch.distributed.get_world_size(), size)
        if version == "fsdp":
            policy = get_fsdp_wrap_policy(model)
            strategy = get_sharding_strategy(mesh)
            model = FullyShardedDataParallel(
                model,
                auto_wrap_policy=policy,
                device_id=torch.device("cpu"),
                sharding_strategy=strategy,
                device_mesh=mesh,
            )
        else:
            apply_fsdp2(model, {"mesh": mesh}, OmegaConf.create({"wrap_policy": {}}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(STEP)
        contents = OmegaConf.create({"save_contents": ["model"], "load_contents": ["model"]})
        tokenizer = AutoTokenizer.from_pretrained(paths[kind])
        manager = FSDPCheckpointManager(model, processing_class=tokenizer, checkpoint_config=contents)
        manager.save_checkpoint(str(folder / f"{version}_{size}_{kind}/global_step_7/actor"), global_step=7)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[dict[str, Path], dict[str, Path]]:
    """Models by kind, and checkpoints of FSDP by case."""
    folder = tmp_path_factory.mktemp("fsdp")
    paths = {"tied": tied(folder / "tied"), "qwen2": tied(folder / "qwen2", "qwen2")}
    paths["moe"] = make_checkpoint("moe", folder / "moe", layers=1)
    places = {}
    for world, cases in FSDP.items():
        run_ranks(world, save_fsdp, cases, paths, folder / str(world))
        for version, size, kind in cases:
            places[f"{world} {version} {size} {kind}"] = folder / str(world) / f"{version}_{size}_{kind}"
    return paths, places


CASES = [f"{world} {version} {size} {kind}" for world, cases in FSDP.items() for version, size, kind in cases]


@pytest.mark.parametrize("case", CASES)
def test_fsdp_shards(saved, tmp_path, case):
    paths, places = saved
    path = paths[case.split()[-1]]
    said = exported(places[case], "--out", tmp_path / "out", "--shard-gb", "5e-5")
    assert "FSDP shards of " in said and "(float32), read back and equal" in said
    assert wrong(weights_of(tmp_path / "out"), trained(path)) == []
    assert max(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")) < 60_000
    exported(places[case] / "global_step_7", "--out", tmp_path / "exact", "--dtype", "auto")
    assert wrong(weights_of(tmp_path / "exact"), trained(path, torch.float32)) == []
    for name, dtype in (("out", "bfloat16"), ("exact", "float32")):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config.get("dtype", config.get("torch_dtype")) == dtype


def test_it_equals_verls_model_merger(saved, tmp_path):
    _, places = saved
    case = places["3 fsdp2 -1 moe"]
    exported(case, "--out", tmp_path / "out")
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    command += ["--local_dir", case / "global_step_7/actor", "--target_dir", tmp_path / "merged"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=600)
    assert wrong(weights_of(tmp_path / "out"), weights_of(tmp_path / "merged")) == []


def test_hugging_face_loads_the_model_and_its_tokenizer(saved, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    paths, places = saved
    exported(places["3 fsdp -1 tied"], "--out", tmp_path / "out")
    assert not list(tmp_path.glob("out.*"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16 and model.lm_head.weight is model.model.embed_tokens.weight
    expected = trained(paths["tied"])["model.norm.weight"]
    assert torch.equal(model.model.norm.weight, expected)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 96
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.7


def copy_of(saved, tmp_path) -> Path:
    subprocess.run(["cp", "-r", saved[1]["3 fsdp -1 tied"], tmp_path / "run"], check=True)
    return tmp_path / "run/global_step_7/actor"


def test_a_missing_rank_is_named(saved, tmp_path):
    actor = copy_of(saved, tmp_path)
    (actor / "model_world_size_3_rank_1.pt").unlink()
    result = export(tmp_path / "run", "--out", tmp_path / "out")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "rank 1 of 3 did not save here" in result.stderr and not (tmp_path / "out").exists()


def test_a_damaged_shard_is_named(saved, tmp_path):
    actor = copy_of(saved, tmp_path)
    shard = actor / "model_world_size_3_rank_2.pt"
    shard.write_bytes(shard.read_bytes()[:-3000])
    result = export(tmp_path / "run", "--out", tmp_path / "out")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "rank_2.pt is not a shard of a model, or damaged" in result.stderr


def test_a_pickle_that_would_run_something_is_refused(saved, tmp_path):
    """verl's merger and torch.load(weights_only=False) run it."""
    actor = copy_of(saved, tmp_path)

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"model.norm.weight": Evil()}, actor / "model_world_size_3_rank_0.pt")
    result = export(tmp_path / "run", "--out", tmp_path / "out")
    assert result.returncode == 1 and "posix.mkdir" in result.stderr and not (tmp_path / "ran").exists()


def test_weights_that_do_not_fit_the_configuration_are_refused(saved, tmp_path):
    actor = copy_of(saved, tmp_path)
    config = json.loads((actor / "huggingface/config.json").read_text())
    (actor / "huggingface/config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    result = export(tmp_path / "run", "--out", tmp_path / "out")
    assert result.returncode == 1 and "missing: model.layers.2." in result.stderr


def test_the_latest_complete_step_is_taken(saved, tmp_path):
    copy_of(saved, tmp_path)
    run = tmp_path / "run"
    (run / "global_step_7").rename(tmp_path / "step")
    checkpoints = run / "checkpoints"
    for name in ("global_step_7", "global_step_10", "global_step_11.partial"):
        (checkpoints / name).mkdir(parents=True)
    (tmp_path / "step/actor").rename(checkpoints / "global_step_10/actor")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("10")
    before = sorted(checkpoints.rglob("*"))
    said = exported(run, "--out", tmp_path / "out")
    assert "global_step_10/actor" in said
    assert sorted(checkpoints.rglob("*")) == before
    result = export(run, "--step", 8, "--out", tmp_path / "other")
    assert result.returncode == 1 and "no global_step_8, but the steps 7, 10" in result.stderr
    again = export(run, "--out", tmp_path / "out")
    assert again.returncode == 1 and "exists and is not overwritten" in again.stderr


def test_after_a_kill_it_continues(saved, tmp_path):
    """Whenever the kill comes, nothing looks complete that is not, and the next run ends with all of it."""
    paths, places = saved
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "ascend_rl.export",
        places["3 fsdp -1 tied"],
        "--out",
        out,
        "--workers",
        "1",
    ]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "out.partial").exists() and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if not out.exists():
        exported(places["3 fsdp -1 tied"], "--out", out)
    assert wrong(weights_of(out), trained(paths["tied"])) == []
    assert not (tmp_path / "out.partial").exists()


# Megatron.


def save_megatron(rank: int, layouts: list[Layout], paths: dict, folder: Path, mbridge: bool) -> None:
    for layout in layouts:
        os.environ["USE_ALLTOALL_OVERLAP"] = str(int(layout.options != ()))
        options = [f"+{ACTOR}.megatron.override_transformer_config.{option}" for option in layout.options]
        if not mbridge:
            mcore = paths[f"{layout.kind} mcore"]
            options += [
                f"{ACTOR}.megatron.use_mbridge=False",
                f"{ACTOR}.megatron.use_dist_checkpointing=True",
            ]
            options += [f"{ACTOR}.megatron.dist_checkpointing_path={mcore}"]
        options += [f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra]"]
        plain = Layout(layout.kind, layout.tp, layout.pp, layout.cp, layout.ep, layout.etp)
        worker = make_worker(plain, paths[layout.kind], *options)
        with torch.no_grad():
            for module in worker.actor_module:
                for parameter in module.parameters():
                    parameter.mul_(STEP)
        worker.save_checkpoint(str(folder / str(layout).replace(" ", "_") / "global_step_2/actor"))


@pytest.fixture(scope="module")
def megatron(tmp_path_factory) -> tuple[dict[str, Path], Path]:
    folder = tmp_path_factory.mktemp("megatron")
    paths = {kind: make_checkpoint(kind, folder / kind, layers=2) for kind in ("dense", "moe")}
    for kind in ("dense", "moe"):
        paths[f"{kind} mcore"] = folder / f"{kind}_mcore"
        converter.to_mcore(paths[kind], paths[f"{kind} mcore"], converter.Options(quiet=True))
    run_ranks(2, save_megatron, MEGATRON, paths, folder / "dist", False)
    run_ranks(2, save_megatron, [MBRIDGE], paths, folder / "mbridge", True)
    return paths, folder


@pytest.mark.parametrize("layout", MEGATRON, ids=str)
def test_megatron_checkpoints(megatron, tmp_path, layout):
    paths, folder = megatron
    run = folder / "dist" / str(layout).replace(" ", "_")
    assert not list((run / "global_step_2/actor/huggingface").glob("*.safetensors"))
    metadata = FileSystemReader(run / "global_step_2/actor/dist_ckpt").read_metadata().state_dict_metadata
    assert any(
        "optimizer" in key and isinstance(each, TensorStorageMetadata) for key, each in metadata.items()
    )
    said = exported(run, "--out", tmp_path / "out")
    assert "from Megatron checkpoint (float32), read back and equal" in said
    assert wrong(weights_of(tmp_path / "out"), trained(paths[layout.kind])) == []
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= {
        p.name for p in (tmp_path / "out").iterdir()
    }


def test_what_mbridge_saved(megatron, tmp_path):
    paths, folder = megatron
    run = folder / "mbridge" / str(MBRIDGE).replace(" ", "_")
    assert "from safetensors of mbridge" in exported(run, "--out", tmp_path / "out", "--dtype", "auto")
    assert wrong(weights_of(tmp_path / "out"), trained(paths["moe"], torch.float32)) == []
