"""Options in the training script reach vLLM's engine arguments; contradictions stop the start."""

from __future__ import annotations

import pytest

from ascend_rl.settings.stack import DEFAULT, NAME

VLLM = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
NGRAM = [f"{VLLM}.speculative_config.method=ngram", f"{VLLM}.speculative_config.num_speculative_tokens=3"]
EX = [f"{VLLM}.additional_config.enable_npugraph_ex=True"]
PIECEWISE = [f"{VLLM}.compilation_config.cudagraph_mode=PIECEWISE"]
MTP = ["actor_rollout_ref.model.mtp.enable=True", "actor_rollout_ref.model.mtp.enable_rollout=True"]


def test_options_reach_the_engine(launch):
    args = launch(*NGRAM, *EX)
    assert args.speculative_config == {"method": "ngram", "num_speculative_tokens": 3}
    asked = {"enable_npugraph_ex": True}
    assert args.additional_config == (asked if NAME == DEFAULT else {"ascend_compilation_config": asked})
    assert args.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"


def test_elsewhere_nothing_changes(launch):
    args = launch(*NGRAM, device="cpu")
    assert args.speculative_config == {"method": "ngram", "num_speculative_tokens": 3}
    assert args.compilation_config.cudagraph_mode.name == "FULL_AND_PIECEWISE"


@pytest.mark.parametrize("overrides", [
    [*EX, *PIECEWISE],
    [*NGRAM, *MTP],
    [f"{VLLM}.additional_config.{key}" for key in ("enable_static_kernel=True", "enable_npugraph_ex=False")],
])  # fmt: skip
def test_contradictions_end_the_start(launch, overrides):
    where = VLLM.removeprefix("+")
    with pytest.raises(
        ValueError,
        match=f"{where} is incompatible with this configuration:\n  (additional|speculative)_config",
    ):
        launch(*overrides)
