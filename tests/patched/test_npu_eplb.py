"""With EPLB on, vllm-ascend's rollout computes with the trainer's weights, wherever its experts moved.

Two ranks, each with vllm-ascend's worker, runner and EPLB process, on software NPUs; the sync is verl's. The
oracle is Hugging Face with the same weights: log-probs of the whole vocabulary at each position.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from npu_ground import WEIGHT_SYNC, on_ranks, save_random_model, sync_weights
from safetensors.torch import load_file

from ascend_rl.experts.support_eplb import grouped
from ascend_rl.settings.stack import DEFAULT, NAME

RANKS, LAYERS, EXPERTS, NEW_TOKENS, TOLERANCE = 2, 2, 8, 4, 5e-5
TP, DP = "tensor_parallel_size", "data_parallel_size"
COLLECT, WAIT = 16, 1  # steps until the worker plans, and until its plan is carried out
PROMPTS = [[(7 * i + 3 * j + i * j) % 13 for j in range(3 + 4 * i)] for i in range(4)]


def settings(redundant: int) -> dict:
    found = {
        "dynamic_eplb": True, "eplb_policy_type": 4, "init_redundancy_expert": redundant,
        "num_iterations_eplb_update": COLLECT, "num_wait_worker_iterations": WAIT,
    }  # fmt: skip
    return found if NAME == DEFAULT else grouped(found)


class Rank:
    """One rank of the engine; all ranks call the same methods in the same order."""

    def __init__(self, path: str, parallel: str, redundant: int, **options):
        from npu_ground import make_llm

        from ascend_rl.experts import eplb

        eplb.CHANCE, eplb.COPY_TOKENS = 0.0, 1e-3  # any gain pays: a round here is a few hundred tokens
        self.llm = make_llm(
            path, distributed_executor_backend="external_launcher", **{parallel: RANKS},
            enable_expert_parallel=True, enable_prefix_caching=False, enable_sleep_mode=True, max_logprobs=50,
            worker_extension_cls=WEIGHT_SYNC,
            additional_config=settings(redundant), **options,
        )  # fmt: skip
        self.worker = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.runner, self.stages = self.worker.model_runner, []
        self.updator = self.runner.eplb_updator
        # In DP the second rank is done a token earlier: then it runs dummy batches.
        self.less = self.worker.rank if parallel == DP else 0

    def experts(self):
        return [layer.mlp.experts for layer in self.runner.model.model.layers]

    def sync(self, file: str) -> None:
        self.weights = load_file(file)
        sync_weights(self.worker, self.weights)

    def generate(self, prompts, tokens: int):
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=max(tokens - self.less, 1), ignore_eos=True,
            logprobs=self.vocabulary(),
        )  # fmt: skip
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [output.outputs[0] for output in self.llm.generate(requests, sampling, use_tqdm=False)]

    def vocabulary(self) -> int:
        return self.runner.model_config.get_vocab_size()

    def step_to(self, iteration: int) -> None:
        """To this step of EPLB's cycle; the load is always that of the prompts."""
        while self.updator.cur_iterations != iteration:
            self.generate(PROMPTS, 1)

    def take_plans_in_the_last_of(self, steps: int) -> None:
        """In DP the last rank then has a dummy batch: no step of it may wait for another than the first's."""
        self.step_to(COLLECT + WAIT - steps)
        self.generate(PROMPTS, steps)

    def stage(self, file: str) -> None:
        """Look: what comes out with the weights of ``file``, and which expert each slot of this rank has."""
        table = []
        for layer, experts in enumerate(self.experts()):
            held = self.runner.eplb_adaptor.expert_map_per_layer_cpu[layer]
            table.append(held.argsort()[(held < 0).sum() :].tolist())
            if hasattr(self, "weights"):
                for slot, expert in enumerate(table[-1]):
                    self.compare(experts, slot, f"model.layers.{layer}.mlp.experts.{expert}.")
        outputs = self.generate(PROMPTS, NEW_TOKENS)
        log_probs = [[[at[token].logprob for token in range(self.vocabulary())] for at in output.logprobs]
                     for output in outputs]  # fmt: skip
        ids = [list(output.token_ids) for output in outputs]
        self.stages.append({"file": file, "table": table, "ids": ids, "log_probs": log_probs})

    def compare(self, experts, slot: int, name: str) -> None:
        gate, up, down = (self.weights[f"{name}{part}_proj.weight"] for part in ("gate", "up", "down"))
        w13, w2 = experts.w13_weight[slot].cpu(), experts.w2_weight[slot].cpu()
        assert torch.equal(w13, torch.cat((gate, up)).T), f"slot {slot} is not {name}"
        assert torch.equal(w2, down.T), f"slot {slot} is not {name}"

    def sleep_and_wake_up(self) -> None:
        """Of what was made while the model was, only buffers are the same afterwards."""
        self.worker.sleep(2)
        self.worker.wake_up()

    def load(self) -> torch.Tensor:
        """[layers, slots of all ranks] what a planner would be given now."""
        with torch.inference_mode():
            return self.updator.compute_and_set_moe_load().flatten(1).cpu()

    def end(self) -> list[dict]:
        self.updator.shutdown()
        self.runner.manager.shutdown()
        return self.stages


def follow(path: str, files: list[str], parallel: str, redundant: int) -> list[dict]:
    engine = Rank(path, parallel, redundant)
    engine.stage(files[0])
    engine.sync(files[1])  # before anything has moved
    engine.stage(files[1])
    engine.take_plans_in_the_last_of(NEW_TOKENS)
    engine.step_to(0)  # all layers have moved
    engine.stage(files[1])
    engine.sync(files[2])
    engine.stage(files[2])
    engine.step_to(COLLECT + WAIT + 1)  # of the second round, one layer has moved
    engine.sync(files[3])
    engine.step_to(0)
    engine.stage(files[3])
    engine.sleep_and_wake_up()
    engine.sync(files[1])
    engine.stage(files[1])
    return engine.end()


def count_tokens(path: str, files: list[str], parallel: str, redundant: int, graphs: bool) -> dict:
    """What is counted at the start, of one batch, and of how many tokens; by layer."""
    sizes = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [2, 8]}
    options = {"enforce_eager": False, "compilation_config": sizes} if graphs else {}
    engine = Rank(path, parallel, redundant, **options)
    start = engine.load()
    torch.npu.graphs.reset_counts()
    engine.generate(PROMPTS, NEW_TOKENS)
    prompts = sum(map(len, PROMPTS))
    decoded = [max(NEW_TOKENS - less, 1) - 1 for less in (range(RANKS) if parallel == DP else (0,))]
    found = {
        "start": start.sum(1).tolist(), "counted": (engine.load() - start).sum(1).tolist(),
        "tokens": sum(prompts + len(PROMPTS) * steps for steps in decoded),
        "replays": torch.npu.graphs.counts()["replays"],
    }  # fmt: skip
    engine.end()
    return found


def outlive_a_planner(path: str, files: list[str], parallel: str, redundant: int) -> list[dict]:
    """The EPLB process of the last rank ends before the first plan: all ranks keep their experts."""
    engine = Rank(path, parallel, redundant)
    engine.sync(files[1])
    engine.stage(files[1])
    if engine.worker.rank == RANKS - 1:
        engine.updator.process.kill()
        engine.updator.process.join()
    for _ in range(3 * COLLECT):  # rounds that would have moved all layers
        engine.generate(PROMPTS, 2)
    engine.stage(files[1])
    engine.sync(files[2])
    engine.stage(files[2])
    return engine.end()


def rollouts(story: str, device: str, path: str, *args) -> list[dict]:
    import os
    import tempfile

    os.environ["DYNAMIC_EPLB"] = "true"
    tempfile.tempdir = str(Path(path).parent)  # of the sockets of the weight sync
    return on_ranks(device, RANKS, globals()[story], path, *args)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The checkpoint, files with the weights of four training steps (the first: its own), the model."""
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("eplb")
    save_random_model(directory / "model", moe=True)
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    torch.manual_seed(1)
    files = []
    for step in range(4):
        model.save_pretrained(directory / str(step))  # which names the weights of each expert
        files.append(str(directory / str(step) / "model.safetensors"))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.5 * torch.randn_like(parameter))
    return directory / "model", files, model


def expected(model, ids: list[int], prompt: list[int]) -> torch.Tensor:
    """[new tokens, vocabulary] log-probs by Hugging Face."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


def gap(stage: dict) -> float:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(Path(stage["file"]).parent, dtype=torch.float32)
    found = zip(stage["ids"], stage["log_probs"], PROMPTS, strict=True)
    return max(
        (torch.tensor(log_probs) - expected(model, ids, prompt)).abs().max().item()
        for ids, log_probs, prompt in found
    )


@pytest.mark.parametrize(
    "device, parallel, redundant",
    [("A3", TP, 2), ("A3", DP, 2), pytest.param("A2", TP, 0, marks=pytest.mark.long)],
)
def test_the_rollout_follows_the_trainer_and_the_experts(npu_ground, weights, device, parallel, redundant):
    path, files, model = weights
    stages = npu_ground.run(rollouts, "follow", device, str(path), files, parallel, redundant)
    gaps = [gap(stage) for stage in stages]
    assert len(gaps) == 6 and max(gaps) < TOLERANCE, gaps
    tables = [stage["table"] for stage in stages]
    assert tables[0] == tables[1] != tables[2] == tables[3] != tables[4] == tables[5]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    "device, parallel, redundant",
    [
        ("A3", DP, 2),
        *[
            pytest.param(*one, marks=pytest.mark.long)
            for one in (("A3", TP, 2), ("A2", TP, 0), ("A2", DP, 0))
        ],
    ],
)
def test_only_real_tokens_are_load(npu_ground, weights, device, parallel, redundant, graphs):
    """No padding, and none of the dummy batches of a rank without requests."""
    path, files, model = weights
    found = npu_ground.run(rollouts, "count_tokens", device, str(path), files, parallel, redundant, graphs)
    each = found["tokens"] * model.config.num_experts_per_tok
    assert (found["start"], found["counted"]) == ([0] * LAYERS, [each] * LAYERS)
    assert bool(found["replays"]) == graphs


@pytest.mark.long
def test_a_failed_planner_leaves_the_experts_where_they_are(npu_ground, weights):
    path, files, model = weights
    stages = npu_ground.run(rollouts, "outlive_a_planner", "A3", str(path), files, TP, 2)
    gaps = [gap(stage) for stage in stages]
    assert len(gaps) == 3 and max(gaps) < TOLERANCE, gaps
    assert stages[0]["table"] == stages[1]["table"] == stages[2]["table"]


def test_copies_need_a_dispatch_that_chooses_once(npu_ground, weights):
    path, files, _ = weights
    with pytest.raises(AssertionError, match="set init_redundancy_expert=0"):
        npu_ground.run(rollouts, "follow", "A2", str(path), files, TP, 2)


def planned_layers(policy: int) -> list[int]:
    """Layers of the plan that the worker makes where the second of three layers is balanced already."""
    import tempfile

    import torch.distributed as dist

    import vllm.distributed.parallel_state as groups
    from vllm_ascend.eplb.core.eplb_worker import EplbWorker

    groups._EP = SimpleNamespace(rank_in_group=0)  # of an engine with experts; 0.23 asks it for the rank
    load = torch.tensor([[[9, 1], [2, 1]], [[1, 1], [1, 1]], [[1, 2], [1, 9]]])
    maps = torch.tensor([[[0, 1, -1, -1], [-1, -1, 0, 1]]] * 3)  # the slot of each expert on each rank
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        worker = EplbWorker({"expert_maps": maps.int(), "moe_load": load}, policy)
        layers = [layer for *_, layer in worker.do_update()]
        dist.destroy_process_group()
    return layers


@pytest.mark.parametrize("policy", [1, 2, 4])
def test_a_plan_has_each_layer_once(npu_ground, policy):
    """The engine takes as many entries as layers: with one too many, the last layer would not move."""
    assert npu_ground.run(planned_layers, policy) == [0, 1, 2]
