"""verl's use_original_torch_compile undoes MindSpeed's torch.compile, and restores it however its body ends.

Runs with MindSpeed's patch manager if frameworks/mindspeed is present, and everywhere with a stub that keeps
its contract (2.3.0: ``is_applied`` is a bool, ``remove_patch`` forgets the replacement).
"""

from __future__ import annotations

import sys
import types

import pytest
import torch


def compiles_nothing(model=None, **kwargs):
    return model


class Patch:
    orig_module_name, orig_func_name = "torch", "compile"

    def __init__(self):
        self.original, self.patch_func, self.is_applied = torch.compile, None, False

    def set_patch_func(self, function, force_patch=False):
        assert self.patch_func is None or force_patch
        self.patch_func, self.is_applied = function, False

    def apply_patch(self):
        torch.compile, self.is_applied = self.patch_func or self.original, True

    def remove_patch(self):
        torch.compile, self.patch_func, self.is_applied = self.original, None, False


@pytest.fixture(params=["stand-in", "MindSpeed"])
def replaced(request, root, monkeypatch):
    """torch.compile as MindSpeed leaves it, and its original."""
    original = torch.compile
    if request.param == "MindSpeed":
        if not (root / "frameworks/mindspeed/mindspeed").is_dir():
            pytest.skip("MindSpeed is absent (published in git only)")
        monkeypatch.syspath_prepend(str(root / "frameworks/mindspeed"))
        from mindspeed.patch_utils import MindSpeedPatchesManager

        monkeypatch.setattr(MindSpeedPatchesManager, "patches_info", {})
        MindSpeedPatchesManager.register_patch("torch.compile", compiles_nothing)
        MindSpeedPatchesManager.apply_patches()
    else:
        patch = Patch()
        patch.set_patch_func(compiles_nothing)
        patch.apply_patch()
        manager = types.SimpleNamespace(patches_info={"torch.compile": patch})
        monkeypatch.setitem(sys.modules, "mindspeed", types.ModuleType("mindspeed"))
        module = types.SimpleNamespace(MindSpeedPatchesManager=manager)
        monkeypatch.setitem(sys.modules, "mindspeed.patch_utils", module)
    assert torch.compile is compiles_nothing
    yield original
    torch.compile = original


def test_original_inside_replacement_outside(replaced):
    from verl.utils.torch_functional import use_original_torch_compile

    for _ in range(2):  # also the second time: removing a patch must not lose it
        with use_original_torch_compile():
            assert torch.compile is replaced
        assert torch.compile is compiles_nothing


def test_an_error_passes_through_and_the_replacement_is_back(replaced):
    from verl.utils.torch_functional import use_original_torch_compile

    with pytest.raises(ZeroDivisionError), use_original_torch_compile():
        assert torch.compile is replaced
        raise ZeroDivisionError
    assert torch.compile is compiles_nothing


def test_without_mindspeed_nothing_changes(monkeypatch):
    from verl.utils.torch_functional import use_original_torch_compile

    monkeypatch.setitem(sys.modules, "mindspeed.patch_utils", None)  # import fails
    before = torch.compile
    with use_original_torch_compile():
        assert torch.compile is before
    with pytest.raises(ZeroDivisionError), use_original_torch_compile():
        raise ZeroDivisionError
