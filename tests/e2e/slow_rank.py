"""Imported by verl's workers (model.external_lib): a device that needs 0.3 s for a forward pass, whatever
this machine has to do at the time, and one of which that needs 30% more."""

import os
import time

from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

DEVICE_S, SLOW_RANK, SLOWER = 0.3, "1", 1.3
forward = Qwen3ForCausalLM.forward


def on_a_device(self, *args, **kwargs):
    end_s = time.monotonic() + DEVICE_S * (SLOWER if os.environ["RANK"] == SLOW_RANK else 1)
    try:
        return forward(self, *args, **kwargs)
    finally:
        time.sleep(max(0.0, end_s - time.monotonic()))


Qwen3ForCausalLM.forward = on_a_device
