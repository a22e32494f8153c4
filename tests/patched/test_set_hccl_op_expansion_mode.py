"""vllm-ascend's process groups get the mode of their communication domain."""

from __future__ import annotations

from ascend_rl.settings.stack import DEFAULT, NAME

MODES = {"HOST": 1, "AI_CPU": 2, "AIV": 3}  # enum CommConfigOpExpansion of HCCL
DOMAINS = ["world", "tp", "dp", "pp", "ep", "dcp", "pcp", "mc2"]


def group_options(modes: dict | None) -> dict:
    """The options that vllm-ascend makes for each process group."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm_ascend.utils import create_hccl_pg_options

    given = {} if modes is None else {"hccl_op_expansion_mode": modes}
    with set_current_vllm_config(VllmConfig(additional_config=given)):
        return {name: getattr(create_hccl_pg_options(name), "hccl_config", None) for name in DOMAINS}


def test_each_domain_has_its_own(npu_ground):
    plain = npu_ground.run(group_options, None)
    assert all("hccl_buffer_size" in options for name, options in plain.items() if name != "mc2")
    mixed = npu_ground.run(group_options, {"tp": "AI_CPU", "dp": "HOST", "ep": "AIV"})
    for name, options in plain.items():
        mode = {"tp": "AI_CPU", "dp": "HOST", "ep": "AIV"}.get(name)
        # Without a mode of its own, a group keeps what it had: HCCL_OP_EXPANSION_MODE then decides.
        assert mixed[name] == (options | {"hccl_op_expansion_mode": MODES[mode]} if mode else options)
        assert "hccl_op_expansion_mode" not in (options or {})
    assert plain["mc2"] == mixed["mc2"]  # its operators take no options
    assert list(plain["mc2"]) == ([] if NAME == DEFAULT else ["group_name"])
