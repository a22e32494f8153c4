"""verl's own Megatron worker on tiny Qwen3 models, for the tests here: models, batches, layouts, the oracle.

The oracle is Hugging Face: the same checkpoint, the same tokens, float32.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

VOCAB, RESPONSE = 96, 8


@dataclass(frozen=True)
class Layout:
    """Sizes of each kind of parallelism; what is left of the processes is data parallel."""

    kind: str = "dense"
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = "".join(
            f" {n.upper()}{getattr(self, n)}" for n in ("tp", "pp", "cp", "ep", "etp") if getattr(self, n) > 1
        )
        return f"{self.kind}{sizes or ' DP'} {' '.join(self.options)}".strip()


def make_checkpoint(kind: str, path: Path, layers: int = 4, expert_size: int = 48) -> Path:
    """A random Qwen3 ("dense"), Qwen3-MoE ("moe") or Qwen2 ("qwen2") with norms that are not 1 and biases
    that are not 0, and a tokenizer of the same size."""
    from tokenizers import Tokenizer, models
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(0)
    common = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        rope_theta=10000.0,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    if kind == "qwen2":
        del common["head_dim"]  # hidden_size / num_attention_heads
        model = Qwen2ForCausalLM(Qwen2Config(**common))
    elif kind == "dense":
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    else:
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                moe_intermediate_size=expert_size,
                num_experts=8,
                num_experts_per_tok=2,
                norm_topk_prob=True,
                mlp_only_layers=[],
                **common,
            )
        )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.uniform_(parameter, -1.0, 1.0)
        elif parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.08)
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.BPE(vocab={f"t{i}": i for i in range(VOCAB)}, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="t1").save_pretrained(path)
    return path


class Gathers(TorchDispatchMode):
    """How often weights were gathered."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name().startswith("c10d::") and "allgather" in func.name()
        return func(*args, **kwargs or {})


def make_batch(rows: int = 8) -> dict[str, torch.Tensor]:
    """Left-padded prompts of different lengths with responses of ``RESPONSE`` tokens, as verl's rollout gives
    them."""
    generator = torch.Generator().manual_seed(3)
    width = 40
    lengths = torch.tensor([40, 17, 26, 11, 33, 40, 9, 21])[:rows]
    mask = torch.arange(width) >= width - lengths[:, None]
    ids = torch.randint(2, VOCAB, (rows, width), generator=generator).masked_fill(~mask, 0)
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0),
        "prompts": ids[:, :-RESPONSE],
        "responses": ids[:, -RESPONSE:],
        "response_mask": torch.ones(rows, RESPONSE),
        "advantages": torch.randn(rows, 1, generator=generator).expand(rows, RESPONSE).contiguous(),
    }


def hugging_face(path: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def response_log_probs(model, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Hugging Face's log-probs of the responses: [rows, RESPONSE]."""
    logits = model(**{k: batch[k] for k in ("input_ids", "attention_mask", "position_ids")}).logits
    log_probs = logits[:, -RESPONSE - 1 : -1].log_softmax(-1)
    return log_probs.gather(-1, batch["responses"].unsqueeze(-1)).squeeze(-1)


def worker_config(layout: Layout, path: Path, *overrides: str, rows: int = 8):
    """What the trainer gives to verl's ActorRolloutRefWorker, with ``layout`` and the checkpoint."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from megatron_defaults import DEFAULTS

    actor = "actor_rollout_ref.actor"
    given = [
        f"actor_rollout_ref.model.path={path}",
        "actor_rollout_ref.rollout.n=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        f"{actor}.megatron.tensor_model_parallel_size={layout.tp}",
        f"{actor}.megatron.pipeline_model_parallel_size={layout.pp}",
        f"{actor}.megatron.context_parallel_size={layout.cp}",
        f"{actor}.megatron.expert_model_parallel_size={layout.ep}",
        f"{actor}.megatron.expert_tensor_parallel_size={layout.etp}",
        f"{actor}.megatron.dtype=float32",
        f"{actor}.ppo_mini_batch_size={rows}",
        f"{actor}.ppo_micro_batch_size_per_gpu=2",
        f"{actor}.optim.lr=1e-2",
        f"{actor}.optim.total_training_steps=100",
        *layout.options,
        *overrides,
    ]
    config = copy.deepcopy(DEFAULTS)
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(given), config)
    return config.actor_rollout_ref


def make_worker(layout: Layout, path: Path, *overrides: str, rows: int = 8):
    """verl's ActorRolloutRefWorker as the trainer makes it for role "actor"."""
    from megatron.core import parallel_state
    from verl.workers.megatron_workers import ActorRolloutRefWorker, repatch

    config = worker_config(layout, path, *overrides, rows=rows)
    if repatch is not None:  # MindSpeed: the worker does it too, but before any groups of ranks exist
        repatch(config.actor.megatron.override_transformer_config)
    parallel_state.destroy_model_parallel()
    parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None  # destroying forgets this one
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    worker = ActorRolloutRefWorker(config, role="actor")
    worker.init_model()
    return worker


def own_share(batch: dict[str, torch.Tensor], rank: int | None = None, size: int | None = None):
    """The rows of a data-parallel rank, by default Megatron's own, as verl's DataProto."""
    from megatron.core import parallel_state
    from verl import DataProto

    if rank is None:
        rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    share = {k: v.chunk(size)[rank] for k, v in batch.items()}
    return DataProto.from_dict(
        share, meta_info={"global_token_num": batch["attention_mask"].sum(-1).tolist(), "temperature": 1.0}
    )


def exported(worker) -> dict[str, torch.Tensor]:
    """The weights under Hugging Face's names, gathered as for a rollout."""
    return {
        name: tensor.detach().clone().cpu()
        for name, tensor in worker.bridge.export_weights(worker.actor_module)
    }
