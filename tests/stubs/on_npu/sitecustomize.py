"""Run at the start of every Python process of the software NPU's that has this directory on PYTHONPATH.

CUDA is not replaced there, but torch is 2.9 all the same.
"""

import os
import runpy

HERE = os.path.dirname(__file__)
STUBS = os.path.dirname(HERE)


def install() -> None:
    for name in ("torch_2_8", "one_gloo_device"):
        runpy.run_path(f"{STUBS}/{name}.py")["install"]()


runpy.run_path(f"{STUBS}/before_megatron.py")["call"](install, HERE)
