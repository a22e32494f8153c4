"""Rotary embeddings are created even if a package called flash_attn is found but cannot be used."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import common


@pytest.fixture(params=["broken package", "empty stand-in"])
def flash_attn(request, tmp_path, monkeypatch):
    if request.param == "empty stand-in":
        monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))  # without __spec__
        return ValueError
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('no libcuda.so.1')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return ImportError


def rotate(x, cos, sin):
    """Neox style, written as a rotation of pairs: [tokens, heads, size]."""
    first, second = x.double().chunk(2, dim=-1)
    pairs = torch.complex(first, second) * torch.complex(cos.double(), sin.double()).unsqueeze(1)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def test_no_flash_attn_on_other_platforms(flash_attn):
    with set_current_vllm_config(VllmConfig()):
        op = common.ApplyRotaryEmb()
    angles = torch.rand(5, 8)
    x = torch.randn(5, 3, 16)
    torch.testing.assert_close(
        op(x, angles.cos(), angles.sin()).double(), rotate(x, angles.cos(), angles.sin()), atol=1e-6, rtol=0
    )
    assert "flash_attn.ops" not in sys.modules


def test_gpus_import_it_as_before(flash_attn, monkeypatch):
    monkeypatch.setattr(type(common.current_platform), "is_cuda_alike", lambda self: True)
    with set_current_vllm_config(VllmConfig()), pytest.raises(flash_attn):
        common.ApplyRotaryEmb()
