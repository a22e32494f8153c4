"""verl 0.9.1's Megatron worker on megatron-core 0.16.1 computes and learns as Hugging Face does, and resumes.

The models and the oracle are those of the other stack's tests: a random Qwen3 and Qwen3-MoE, and verl's loss
on Hugging Face's log-probs, in one process, differentiated by torch.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from megatron_tiny import (
    Layout,
    hugging_face,
    make_batch,
    make_checkpoint,
    worker_config,
)
from ranks import run_ranks
from test_megatron_actor import OVERRIDES, UPDATES, reference

from ascend_rl.process.counts import VARIABLE, counted
from ascend_rl.process.progress import FILE
from ascend_rl.weights.converter import Options
from ascend_rl.weights.export import export

LAYOUTS = [Layout(tp=2), Layout(pp=2), Layout(cp=2), Layout("moe", ep=2), Layout("moe", tp=2, ep=2)]
RESUMED = (Layout(pp=2), Layout("moe", ep=2))


def make_worker(layout: Layout, path, *overrides: str):
    """As the trainer makes it for role "actor"."""
    from megatron.core import parallel_state
    from verl.workers.engine_workers import ActorRolloutRefWorker

    parallel_state.destroy_model_parallel()
    config = worker_config(
        layout, path, "actor_rollout_ref.actor.megatron.vanilla_mbridge=True", *OVERRIDES, *overrides
    )
    worker = ActorRolloutRefWorker(config, role="actor")
    worker.init_model()
    return worker


def own_share(worker, batch: dict[str, torch.Tensor], **options):
    """The rows of this data-parallel rank, as verl's trainer hands them out."""
    from tensordict.tensorclass import NonTensorData

    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    engine = worker.actor.engine
    rank, size = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    share = {name: rows.chunk(size)[rank].clone() for name, rows in batch.items()}
    data = left_right_2_no_padding(tu.get_tensordict(share))
    lengths = NonTensorData(batch["attention_mask"].sum(-1).tolist())
    tu.assign_non_tensor(data, temperature=1.0, global_token_num=lengths, **options)
    return data


def infer(worker, batch: dict[str, torch.Tensor]) -> tuple:
    """What the trainer gives to the worker before the first update of a step, and what it gets."""
    data = own_share(worker, batch, calculate_entropy=False, compute_loss=False)
    return data, worker.compute_log_prob(data)


def log_probs(worker, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of all responses, on every rank: [rows, RESPONSE]."""
    from megatron.core import parallel_state
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import no_padding_2_padding

    data, output = infer(worker, batch)
    own = None if output is None else no_padding_2_padding(tu.get(output, "log_probs"), data)
    shares = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(shares, (parallel_state.get_data_parallel_rank(), own))
    return torch.cat([share for _, share in sorted({r: s for r, s in shares if s is not None}.items())])


def update(worker, batch: dict[str, torch.Tensor], **own) -> float | None:
    """One update with the present log-probs as the old ones; the gradient norm, on ranks that have it.

    ``own``: more of what the rows of this rank have.
    """
    from verl.utils import tensordict_utils as tu

    rows = len(batch["input_ids"])
    options = {"global_batch_size": rows, "mini_batch_size": rows, "epochs": 1, "seed": 1}
    batch = {**batch, "old_log_probs": log_probs(worker, batch)}
    data = own_share(worker, batch, compute_loss=True, dataloader_kwargs={"shuffle": False}, **options)
    data.update(own)
    output = worker.update_actor(data)
    return None if output is None else tu.get(output, "metrics")["grad_norm"][0]


def exported(worker) -> dict[str, torch.Tensor]:
    """The weights under Hugging Face's names, gathered as for a rollout."""
    return {name: t.detach().clone() for name, t in worker.actor.engine.get_per_tensor_param()[0]}


def learn_in(rank: int, layouts: list[Layout], paths: dict, directory) -> list[dict]:
    batch, results = make_batch(), []
    for layout in layouts:
        worker = make_worker(layout, paths[layout.kind])
        os.environ[FILE], forwards = f"{directory}/{layout}-{rank}", []
        Path(os.environ[FILE]).touch()
        worker.actor.engine.module[0].register_forward_pre_hook(lambda *_, f=forwards: f.append(1))
        result = {"log_probs": log_probs(worker, batch).numpy(), "loaded": as_numpy(exported(worker))}
        result |= {
            "norms": [update(worker, batch) for _ in range(UPDATES)],
            "weights": as_numpy(exported(worker)),
            "signs": (Path(os.environ[FILE]).stat().st_size, len(forwards)),
        }
        if layout in RESUMED:
            result["resumed"] = resumes(worker, batch, saved_in(directory, layout))
        results.append(result)
    return results


def saved_in(directory, layout: Layout):
    return directory / str(layout).replace(" ", "_") / f"global_step_{UPDATES}/actor"


def as_numpy(weights: dict[str, torch.Tensor]) -> dict:
    return {name: tensor.numpy() for name, tensor in weights.items()}


def as_torch(weights: dict) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in weights.items()}


def resumes(worker, batch, path) -> dict[str, bool]:
    saved = exported(worker)
    worker.save_checkpoint(str(path), global_step=UPDATES)
    first_norm, first = update(worker, batch), exported(worker)
    update(worker, batch)
    worker.load_checkpoint(str(path))
    loaded = exported(worker)
    second_norm, second = update(worker, batch), exported(worker)
    return {
        "the update changes weights": any(not torch.equal(saved[k], first[k]) for k in saved),
        "loaded weights are the saved ones": all(torch.equal(saved[k], loaded[k]) for k in saved),
        "the next gradient norm is the same": first_norm == second_norm,
        "the next weights are the same": all(torch.equal(first[k], second[k]) for k in first),
    }


def on_disk(path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


@pytest.mark.long
def test_every_layout_computes_learns_and_resumes(tmp_path):
    paths = {kind: make_checkpoint(kind, tmp_path / kind) for kind in ("dense", "moe")}
    ranks = run_ranks(2, learn_in, LAYOUTS, paths, tmp_path)
    batch = make_batch()
    expected = {}
    for kind, path in paths.items():
        first, norms, weights = reference(path, batch)
        model = hugging_face(path)
        model.load_state_dict(weights)
        model.save_pretrained(tmp_path / f"{kind}_learned")
        expected[kind] = first, norms, on_disk(path), on_disk(tmp_path / f"{kind}_learned")
    for number, layout in enumerate(LAYOUTS):
        first, norms, before, after = expected[layout.kind]
        for rank, result in enumerate(results[number] for results in ranks):
            where = f"{layout}, rank {rank}"
            difference = (torch.from_numpy(result["log_probs"]) - first).abs().max().item()
            assert difference < 1e-5, f"{where}: log-probs differ by {difference}"
            assert result["loaded"].keys() == before.keys(), where
            loaded, weights = (as_torch(result[name]) for name in ("loaded", "weights"))
            assert all(torch.equal(loaded[name], before[name]) for name in before), where
            worst = max((weights[name] - after[name]).abs().max().item() for name in after)
            print(f"{where}: {difference:.1e}, norms {result['norms']} of {norms}, weights {worst:.1e}")
            assert result["norms"] in ([None] * UPDATES, pytest.approx(norms, rel=1e-5)), where
            assert worst < 5e-6, where
            assert result["signs"][0] == result["signs"][1] > 2, where  # of progress, one per micro-batch
            assert all(result.get("resumed", {}).values()), (where, result["resumed"])
            if layout in RESUMED and rank == 0:
                out = tmp_path / f"{layout} exported"
                export(saved_in(tmp_path, layout), out, Options(dtype=None, verify=True, quiet=True))
                assert all(torch.equal(weights[name], tensor) for name, tensor in on_disk(out).items()), where
        assert any(results[number]["norms"][0] for results in ranks), layout


def random_in(rank: int, layout: Layout, path) -> dict:
    """A model of which only the configuration is there."""
    worker = make_worker(
        layout, path, "+actor_rollout_ref.actor.megatron.override_mcore_model_config.load_weight=False"
    )
    made = exported(worker)
    norms = [update(worker, make_batch()) for _ in range(UPDATES)]
    return {"made": as_numpy(made), "norms": norms, "weights": as_numpy(exported(worker))}


def test_random_weights_learn_without_a_file(tmp_path):
    path = make_checkpoint("moe", tmp_path / "moe")
    file = on_disk(path)
    (path / "model.safetensors").unlink()
    results = run_ranks(2, random_in, Layout("moe", tp=2, ep=2), path)
    assert any(norm for result in results for norm in result["norms"])
    made, weights = (as_torch(results[0][name]) for name in ("made", "weights"))
    assert made.keys() == file.keys()
    for name, tensor in made.items():
        assert torch.isfinite(tensor).all() and not torch.equal(tensor, weights[name]), name
        assert tensor.std() > 0 or name.endswith("norm.weight"), name
        assert not torch.equal(tensor, file[name]) or name.endswith("norm.weight"), name


def routes_of(worker, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What R2 records while log-probs are computed: jagged [rows, tokens, layers, experts of a token]."""
    return infer(worker, batch)[1]["routed_experts"]


def by_layer(routes: torch.Tensor) -> list[torch.Tensor]:
    """The experts of each token in order, as [tokens, experts of a token] for each layer."""
    return list(routes.values().long().sort(-1).values.unbind(1))


def replay_in(rank: int, path, directory) -> dict:
    """Two updates that replay the routes of before them; what the routers answered in the second one."""
    from megatron.core.transformer.moe.router import TopKRouter

    os.environ[VARIABLE] = str(directory / f"counts of rank {rank}")
    batch = make_batch()
    worker = make_worker(Layout("moe", ep=2), path, "actor_rollout_ref.actor.megatron.router_replay.mode=R2")
    routes = routes_of(worker, batch)
    update(worker, batch, routed_experts=routes)
    routing, used = TopKRouter.routing, {}

    def watched(self, *args, **kwargs):
        probabilities, chosen = routing(self, *args, **kwargs)
        if torch.is_grad_enabled():
            used.setdefault(self.layer_number, []).append(chosen.nonzero()[:, 1].view(len(chosen), -1))
        return probabilities, chosen

    TopKRouter.routing = watched
    update(worker, batch, routed_experts=routes)
    TopKRouter.routing = routing
    replayed = [torch.cat(parts) for _, parts in sorted(used.items())]
    pairs = list(zip(by_layer(routes), replayed, by_layer(routes_of(worker, batch)), strict=True))
    return {
        "recorded": sum(recorded.numel() for recorded, _, _ in pairs),
        "replayed": sum((recorded == replay).sum().item() for recorded, replay, _ in pairs),
        "others by then": sum((recorded != native).sum().item() for recorded, _, native in pairs),
        "counted": counted(Path(os.environ.pop(VARIABLE))),
    }


def refused_in(rank: int, path) -> list[str]:
    """What R3 says to a rollout's routes that are all zero, and to the same with one that is not."""
    worker = make_worker(Layout("moe", ep=2), path, "actor_rollout_ref.actor.megatron.router_replay.mode=R3")
    said = []
    for routes in (torch.zeros, torch.ones):
        data = own_share(worker, make_batch(), calculate_entropy=False, compute_loss=False)
        tokens = data["input_ids"]
        chosen = routes(len(tokens.values()), 4, 2, dtype=torch.int16) * torch.arange(2, dtype=torch.int16)
        data["routed_experts"] = torch.nested.nested_tensor_from_jagged(chosen, offsets=tokens.offsets())
        try:
            worker.compute_log_prob(data)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_a_rollout_without_routes_is_refused_in_the_first_pass(tmp_path):
    for zeros, routes in run_ranks(2, refused_in, make_checkpoint("moe", tmp_path / "moe")):
        assert "use ROUTER_REPLAY=R2" in zeros and routes == ""


def test_updates_take_the_routes_that_the_log_probs_took(tmp_path):
    batch, path = make_batch(), make_checkpoint("moe", tmp_path / "moe")
    counts = run_ranks(2, replay_in, path, tmp_path)
    print(counts)
    layers, experts = 4, 2
    assert sum(one["recorded"] for one in counts) == batch["attention_mask"].sum() * layers * experts
    for one in counts:
        assert one["replayed"] == one["recorded"] and one["others by then"] > 20
        features = one["counted"]
        assert features["router_replay"] * experts == one["recorded"] * UPDATES
        assert features["other_routes_in_updates"] > 10 and features["other_routes"] == 0


RESHARDED = "actor_rollout_ref.actor.megatron.dist_ckpt_optim_fully_reshardable=True"


def go_on_in(rank: int, layouts: list[Layout], path, directory) -> list[tuple]:
    """Of each layout: weights of a checkpoint of the first, the next gradient's norm, weights after it."""
    batch, results = make_batch(), []
    for layout in layouts:
        worker = make_worker(layout, path, RESHARDED)
        if results:
            worker.load_checkpoint(str(directory), del_local_after_load=False)
        else:
            update(worker, batch)
            worker.save_checkpoint(str(directory))
        before = as_numpy(exported(worker))
        results.append((before, update(worker, batch), as_numpy(exported(worker))))
    return results


def test_a_checkpoint_goes_on_in_another_layout(tmp_path):
    path, layouts = make_checkpoint("dense", tmp_path / "model", layers=2), [Layout(pp=2), Layout(tp=2)]
    ranks = run_ranks(2, go_on_in, layouts, path, tmp_path / "saved")
    (weights, _, updated), *others = ranks[0]
    norms = [next(norm for _, norm, _ in found if norm) for found in zip(*ranks, strict=True)]
    assert norms == pytest.approx([norms[0]] * len(layouts), rel=1e-6)
    assert any((weights[name] != updated[name]).any() for name in weights)
    for loaded, _, next_weights in others:
        assert all((loaded[name] == weights[name]).all() for name in weights)
        assert max(abs(next_weights[name] - updated[name]).max() for name in updated) < 2e-6
