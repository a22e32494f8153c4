"""Imported by verl's workers (model.external_lib): a device that computes for 0.5 s per forward, and one of
which that needs 30% more. It sleeps, and for long, so that a busy machine makes little difference."""

import os
import time

from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

DEVICE_S, SLOW_RANK, SLOWER = 0.5, "1", 1.3
forward = Qwen3ForCausalLM.forward


def on_a_device(self, *args, **kwargs):
    time.sleep(DEVICE_S * (SLOWER if os.environ["RANK"] == SLOW_RANK else 1))
    return forward(self, *args, **kwargs)


Qwen3ForCausalLM.forward = on_a_device
