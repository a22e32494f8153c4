"""What a sleeping engine leaves to the trainer: the blocks that its activations have freed, too."""

from __future__ import annotations

import pytest
from npu_ground import make_llm, save_random_model

TOKENS = 400


def fall_asleep(path: str, level: int) -> list[list[int]]:
    """A job: bytes that PyTorch has allocated and reserved, after a prefill and in sleep."""
    import torch

    from vllm import SamplingParams

    llm = make_llm(path, enable_sleep_mode=True)
    torch.npu.empty_cache()
    llm.generate([{"prompt_token_ids": [3] * TOKENS}], SamplingParams(max_tokens=1), use_tqdm=False)
    found = [[torch.npu.memory_allocated(), torch.npu.memory_reserved()]]
    llm.sleep(level)
    return found + [[torch.npu.memory_allocated(), torch.npu.memory_reserved()]]


@pytest.mark.parametrize("level", [1, 2])
def test_freed_blocks_go_back_with_sleep(npu_ground, tmp_path, level):
    awake, asleep = npu_ground.run(fall_asleep, str(save_random_model(tmp_path)), level)
    print(f"allocated and reserved: {awake}, in sleep level {level}: {asleep}")
    assert awake[1] - awake[0] > 2**20
    assert asleep[1] == asleep[0]
