"""An update by verl's FSDP engine keeps no outputs of micro-batches that are through; evaluation has all."""

from __future__ import annotations

import weakref

import torch
from megatron_tiny import make_checkpoint
from ranks import run_ranks

ROWS = 6  # micro-batches of one row


def engine_of(path):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead

    model = HFModelConfig(
        path=str(path),
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    config = FSDPEngineConfig(strategy="fsdp2", dtype="float32", use_torch_compile=False)
    optimizer = FSDPOptimizerConfig(lr=1e-6, total_training_steps=1)
    engine = FSDPEngineWithLMHead(model, config, optimizer, CheckpointConfig())
    engine.initialize()
    return engine


def make_rows():
    from tensordict import TensorDict

    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    ids = [torch.arange(2, 8 + row) for row in range(ROWS)]
    rows = {
        "input_ids": ids,
        "position_ids": [torch.arange(len(i)) for i in ids],
        "loss_mask": [torch.ones_like(i) for i in ids],
    }
    rows = {name: torch.nested.as_nested_tensor(row, layout=torch.jagged) for name, row in rows.items()}
    batch = TensorDict(rows, batch_size=[ROWS])
    tu.assign_non_tensor(
        batch,
        use_remove_padding=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=1,
        temperature=1.0,
        pad_mode=DatasetPadMode.NO_PADDING,
        use_fused_kernels=False,
        calculate_entropy=False,
    )
    return batch


def passes(rank: int, path) -> dict:
    """Outputs of micro-batches that are alive when the next one has computed its own; what is returned."""
    engine, outputs, alive = engine_of(path), [], []

    def loss(model_output, data, dp_group):
        alive.append(sum(output() is not None for output in outputs))
        outputs.append(weakref.ref(model_output["log_probs"]))
        loss = -model_output["log_probs"].values().sum()
        return loss, {"loss": loss.item()}

    with engine.train_mode():
        trained = engine.forward_backward_batch(make_rows(), loss)
        norm = float(engine.optimizer_step())
    with engine.eval_mode():
        evaluated = engine.forward_backward_batch(make_rows(), None, forward_only=True)
    return {
        "alive": alive,
        "losses": len(trained["metrics"]["loss"]),
        "moved": norm > 0,
        "evaluated": [len(row) for row in evaluated["model_output"]["log_probs"].unbind()],
    }


def test_outputs_end_with_their_backward_pass(tmp_path):
    path = make_checkpoint("dense", tmp_path / "dense", layers=2)
    (found,) = run_ranks(1, passes, path)
    assert max(found.pop("alive")) <= 1  # the last one's, which the loop's own variables hold
    assert found == {"losses": ROWS, "moved": True, "evaluated": [6 + row for row in range(ROWS)]}
