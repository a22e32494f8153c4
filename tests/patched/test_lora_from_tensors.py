"""Adapters of a LoRA actor load into vLLM 0.13 from memory, by verl's replacement of vLLM's loader."""

from __future__ import annotations

from types import SimpleNamespace

import torch


def test_the_adapter_is_what_was_sent(monkeypatch):
    from verl.utils.vllm.utils import LoRAModel, TensorLoRARequest, VLLMHijack
    from vllm.config.lora import LoRAConfig
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    monkeypatch.setattr(LRUCacheWorkerLoRAManager, "_load_adapter", None)  # to be put back at the end
    VLLMHijack.hijack()
    manager = object.__new__(LRUCacheWorkerLoRAManager)
    manager.lora_config = LoRAConfig(max_lora_rank=8, max_loras=1, lora_dtype=torch.float32)
    manager.vocab_size, manager._lora_model_cls = 50, LoRAModel
    manager._adapter_manager = SimpleNamespace(
        supported_lora_modules=["qkv_proj"],
        packed_modules_mapping={"qkv_proj": ["q_proj"]},
        model=torch.nn.Module(),
    )
    torch.manual_seed(0)
    module, a, b = "model.layers.0.self_attn.q_proj", torch.randn(4, 16), torch.randn(12, 4)
    prefix = f"base_model.model.{module}"
    request = TensorLoRARequest(
        lora_name="actor", lora_int_id=1, lora_path="memory",
        peft_config={"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]},
        lora_tensors={f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b},
    )  # fmt: skip
    adapter = manager._load_adapter(request)
    weights = adapter.get_lora(module)
    torch.testing.assert_close(weights.lora_b @ weights.lora_a * weights.scaling, b @ a * 8 / 4)
