"""The MFU of an Atlas A3 is over what its die has, under the names that the software NPU's dies have."""

from __future__ import annotations

import pytest
from wheels import CHIPS

from verl.utils.flops_counter import get_device_flops


@pytest.mark.parametrize(
    ("chip", "tflops"), [(CHIPS["A3"], 376), (CHIPS["A2"], 354), ("ascend910_9362", 376)]
)
def test_operations_a_second(chip, tflops):
    assert get_device_flops(device_name=chip.capitalize()) == pytest.approx(tflops)
