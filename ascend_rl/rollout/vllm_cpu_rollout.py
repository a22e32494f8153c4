"""vLLM's CPU backend, made fit for weights that change: what serving may assume and RL may not.

Where the CPU build has oneDNN or AMX kernels (x86 with AVX-512, aarch64), vLLM packs each linear weight once
after loading and computes from the packed copy; the parameter itself is dropped or no longer read. A weight
sync then changes nothing, silently, and the rollout drifts from the policy. Plain
``torch.nn.functional.linear`` reads the parameter. (The other trap of this backend, an rms_norm that ignores
strides, is fixed in vLLM itself.)
"""

from __future__ import annotations

from collections.abc import MutableMapping
from types import ModuleType


def keep_weights_in_place(custom_ops: ModuleType, environ: MutableMapping[str, str]) -> None:
    """Turn both packing kernels off; call before vLLM loads a model.

    Args:
        custom_ops: the module ``vllm._custom_ops``.
        environ: ``os.environ`` of the worker.
    """
    custom_ops._supports_onednn = False
    environ["VLLM_CPU_SGL_KERNEL"] = "0"
