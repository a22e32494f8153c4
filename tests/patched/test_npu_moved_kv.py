"""On vllm-ascend's runner (npu_ground.py) too, running requests move with their KV between engines."""

from __future__ import annotations

import shutil

import pytest
from moving_engines import LENGTHS, hugging_face, move, prompts_of, stay, worst
from npu_ground import save_random_model


@pytest.mark.parametrize("moe", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_target_computes_one_token(npu_ground, tmp_path, moe):
    """One of the requests comes without its files."""

    def spoil(directory):
        if directory.name == "movable-1-0":
            shutil.rmtree(directory)

    model = save_random_model(tmp_path / "model", moe=moe)
    stayed = npu_ground.run(stay, str(model), prompts_of(LENGTHS), 40)
    found = move(npu_ground.run, model, tmp_path / "kv", spoil=spoil)
    assert found.tokens == [one["tokens"] for one in stayed]
    difference = worst(found.log_probs, [one["log_probs"] for one in stayed])
    error = worst(found.log_probs, hugging_face(model, found.prompts, found.tokens))
    print(
        f"\ncomputed {found.computed} of {found.lengths}; log-probs differ by {difference:.1e}, from "
        f"Hugging Face by {error:.1e}"
    )
    assert max(difference, error) < 1e-5
    assert found.computed == [1, found.lengths[1], 1, 1, 1]
    assert not found.left
