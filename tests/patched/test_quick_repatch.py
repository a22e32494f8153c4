"""MindSpeed puts its patches wherever a function was imported to, and does not ask lazy modules for it."""

from __future__ import annotations

import sys
import time
import types

from mindspeed_tree import MINDSPEED, needs_mindspeed
from ranks import run_ranks

pytestmark = needs_mindspeed


def repatched(rank: int) -> dict:
    """What a rank's patches look like to modules that were there before."""
    from mindspeed.patch_utils import MindSpeedPatchesManager
    from verl.workers.megatron_workers import repatch

    patches = MindSpeedPatchesManager.patches_info.values()
    patch = next(p for p in patches if p.is_applied and p.orig_func and p.final_patch_func is not p.orig_func)
    name, module, original = patch.orig_func_name, patch.orig_module, patch.orig_func
    asked: list[str] = []
    lazy, other, first = (sys.modules.setdefault(each, types.ModuleType(each)) for each in ("a", "b", "c"))
    lazy.__getattr__ = lambda wanted: asked.append(wanted) or getattr(module, wanted)
    setattr(other, name, min)  # another function of this name
    setattr(first, name, getattr(module, name))
    sys.modules["none"] = None  # as an import that is forbidden
    began = time.process_time()
    repatch({})
    cpu_s = time.process_time() - began
    now = getattr(module, name)
    found = {"cost": f"{len(patches)} patches, {len(sys.modules)} modules: {cpu_s:.2f} s of a core"}
    found |= {"patched": now is not original, "kept": getattr(other, name) is min, "asked": len(asked)}
    found["follows"] = getattr(first, name) is now is getattr(lazy, name)
    patch.remove_patch()
    return found | {"restored": getattr(first, name) is original is getattr(module, name)}


def test_patches_reach_every_import_and_lazy_modules_are_not_asked():
    (found,) = run_ranks(1, repatched, stubs=(MINDSPEED,), npu=True)
    print(f"\na repatch: {found.pop('cost')}")
    assert found == {
        "patched": True, "kept": True, "asked": 0, "follows": True, "restored": True,
    }  # fmt: skip
