"""The plug-ins as verl and vLLM load them, in new processes: what they change, what a failure does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STATE = """
import verl, torch, torch.distributed
from verl.plugin.platform import PlatformRegistry, get_platform
import verl.workers.engine.fsdp.transformer_impl
from verl.workers.engine.base import EngineRegistry
print("cpu" in PlatformRegistry.registered_names(), torch.distributed.init_process_group.__module__)
print("cpu" in EngineRegistry._engines["language_model"]["fsdp2"])
"""


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment | variables, capture_output=True, text=True
    )


def test_without_their_switches_plugins_change_nothing():
    result = python(STATE)
    assert result.stdout.split() == ["False", "torch.distributed.distributed_c10d", "False"], result.stderr


def test_the_platform_cpu_is_complete_when_it_is_asked_for():
    result = python(STATE, VERL_PLATFORM="cpu")
    assert result.stdout.split() == ["True", "ascend_rl.glue.cann9_1.cpu_platform", "True"], result.stderr


def test_one_group_serves_a_device_that_verl_names_twice(tmp_path):
    code = f"""
import verl, torch
file = "file://{tmp_path}/group"
torch.distributed.init_process_group("cpu:gloo,cpu:gloo", init_method=file, rank=0, world_size=1)
x = torch.ones(1)
torch.distributed.all_reduce(x)
print(x.item())
"""
    assert python(code, VERL_PLATFORM="cpu").stdout.split() == ["1.0"]
    without = python(code)
    assert "cpu" in without.stderr and without.returncode  # torch refuses it: the hook is still needed


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.modules['ascend_rl.glue.cann9_1.cpu_platform'] = None; import verl",
        """
from ascend_rl.glue.cann9_1.hooks import Hooks
hooks = Hooks()
@hooks.after("colorsys")
def broken(module):
    module.no_such_name
hooks.install()
try:
    import colorsys
except Exception:
    pass
""",
    ],
    ids=["plug-in", "hook"],
)
def test_a_plugin_that_fails_ends_the_process_and_says_why(code):
    result = python(code + "\nprint('went on')", VERL_PLATFORM="cpu")
    assert result.returncode == 1 and "went on" not in result.stdout
    assert "ERROR: the plug-in " in result.stderr and "failed: " in result.stderr.splitlines()[-1]


def test_the_rollout_reads_strided_inputs_and_changed_weights():
    code = """
import torch, vllm.plugins
if {plugin}:
    vllm.plugins.load_general_plugins()
from vllm import _custom_ops
x = torch.randn(4, 3, 64).transpose(0, 1)
weight, out = torch.ones(64), torch.empty(3, 4, 64)
_custom_ops.rms_norm(out, x, weight, 1e-6)
print((out - torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)).abs().max().item() < 1e-5)
print(_custom_ops._supports_onednn)
"""
    assert python(code.format(plugin=True)).stdout.split() == ["True", "False"]
    assert python(code.format(plugin=False)).stdout.split()[0] == "False"  # the kernel is still wrong


def test_the_tiny_vocabulary_has_a_newline_and_is_even_on_request():
    from ascend_rl.recipe.tiny import make_tokenizer

    whole, even = make_tokenizer(), make_tokenizer(even=True)
    assert (len(whole), len(even)) == (17, 18)
    assert "\n" in whole.get_vocab() and " " in even.get_vocab()
