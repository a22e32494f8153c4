"""verl's FSDP engine computes in the given dtype: log-probs and exported weights equal Hugging Face's."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.multiprocessing as mp

from ascend_rl.process.ports import free_port

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [3, 1, 4, 1, 5]]


def _rank(rank: int, port: int, path: str, dtypes: list[str], results) -> None:
    """For each dtype, by FSDP2 over 2 processes: log-probs, and are the exported weights the model's."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    from tensordict import TensorDict
    from transformers import AutoModelForCausalLM

    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.dataset_utils import DatasetPadMode
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead

    weights = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    found = {}
    for dtype in dtypes:
        model = HFModelConfig(
            path=path,
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        )
        config = FSDPEngineConfig(strategy="fsdp2", dtype=dtype, use_torch_compile=False)
        engine = FSDPEngineWithLMHead(
            model, config, FSDPOptimizerConfig(lr=1e-6, total_training_steps=1), CheckpointConfig()
        )
        engine.initialize()
        ids = [torch.tensor(prompt) for prompt in PROMPTS]
        rows = {
            "input_ids": ids,
            "position_ids": [torch.arange(len(i)) for i in ids],
            "loss_mask": [torch.ones_like(i) for i in ids],
        }
        rows = {name: torch.nested.as_nested_tensor(row, layout=torch.jagged) for name, row in rows.items()}
        batch = TensorDict(rows, batch_size=[2])
        tu.assign_non_tensor(
            batch,
            use_remove_padding=False,
            temperature=1.0,
            pad_mode=DatasetPadMode.NO_PADDING,
            use_fused_kernels=False,
            calculate_entropy=False,
        )
        with torch.no_grad():
            _, output = engine.forward_step(batch, None, forward_only=True)
        log_probs = torch.cat([row[:-1] for row in output["model_output"]["log_probs"].unbind()]).float()
        parameters, _ = engine.get_per_tensor_param()
        exact = all(torch.equal(value.float(), weights[name]) for name, value in parameters)
        found[dtype] = log_probs.tolist(), exact
    if rank == 0:
        results.put(found)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def engines(tiny):
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    arguments = (free_port(), str(tiny / "model"), ["float32", "bfloat16"], results)
    processes = mp.spawn(_rank, arguments, nprocs=2, join=False)
    deadline = time.monotonic() + 600
    while not processes.join(timeout=1):
        if time.monotonic() > deadline:
            for process in processes.processes:
                process.kill()
            pytest.fail("the engines take more than 600 s")
    return results.get()


@pytest.fixture(scope="module")
def reference(tiny) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1).detach()
        rows.append(log_probs.gather(-1, ids[0, 1:, None])[:, 0])
    return torch.cat(rows)


def test_float32_is_hugging_faces(engines, reference):
    log_probs, exact = engines["float32"]
    assert exact
    assert (torch.tensor(log_probs) - reference).abs().max() <= 1e-5


def test_the_default_is_bfloat16_as_upstream(engines, reference):
    log_probs, exact = engines["bfloat16"]
    assert not exact
    assert 1e-3 < (torch.tensor(log_probs) - reference).abs().max() < 0.5
