"""Whether verl may switch the expandable segments of a training process on NPUs.

verl switches them off around a weight sync, so that the buffer which a vLLM process maps is ordinary
memory, and on for training, where segments that grow keep lengths that vary from fragmenting memory. The
environment cannot say so: vLLM's processes have the same one, and vllm-ascend's memory pool of sleep mode
refuses it there.

torch_npu 2.8.0.post2 takes the options as one text (NPUCachingAllocator.cpp, ``parseArgs``): setting
expandable_segments puts max_split_size_mb, garbage_collection_threshold and roundup_power2_divisions back
to their defaults, nothing else can be set at run time, and the first two cannot go with expandable
segments. So the switch would silently end what the user asked for, for the rest of the run. Invariant: what
PYTORCH_NPU_ALLOC_CONF asks for holds for the whole run; where it asks for none of these, segments are
switched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

ENDED = re.compile(
    r"\b(max_split_size_mb|garbage_collection_threshold|roundup_power2_divisions)\b|expandable_segments:False"
)


def left_free(environ: Mapping[str, str] | None = None) -> bool:
    """Whether PYTORCH_NPU_ALLOC_CONF asks for nothing that switching expandable segments would end.

    Args:
        environ: in place of os.environ.

    >>> left_free({}), left_free({"PYTORCH_NPU_ALLOC_CONF": "page_size:1g"})
    (True, True)
    >>> left_free({"PYTORCH_NPU_ALLOC_CONF": "roundup_power2_divisions:[256:1,>:4]"})
    False
    """
    conf = (os.environ if environ is None else environ).get("PYTORCH_NPU_ALLOC_CONF", "")
    return ENDED.search(conf.replace(" ", "")) is None
