"""Run at the start of every Python process of the software NPU's that has this directory on PYTHONPATH.

CUDA is not replaced there, but torch is 2.9 all the same.
"""

import os
import runpy

HERE = os.path.dirname(__file__)
STUBS = os.path.dirname(HERE)


def install() -> None:
    runpy.run_path(f"{STUBS}/torch_2_8.py")["install"]()


runpy.run_path(f"{STUBS}/before_megatron.py")["call"](install, HERE)
