"""Run verl's own converter_hf_to_mcore.py, unchanged, on a machine without an accelerator.

Usage: python bench/verl_converter_on_cpu.py SCRIPT --hf_model_path ... --output_path ...
--use_cpu_initialization

The stubs of tests/stubs replace only the device; the script, verl and megatron-core are the real ones.
"""

import runpy
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests/stubs"))

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    import cuda_on_cpu
    import torch

    cuda_on_cpu.install()

    from megatron.core.tensor_parallel import random as mcore_random
    from verl.utils import device

    torch.set_num_threads(2)
    begin = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend, *a, **k: begin("gloo", *a, **k)
    mcore_random.model_parallel_cuda_manual_seed = lambda seed: None
    device.get_torch_device = lambda: type("Device", (), {"set_device": staticmethod(lambda name: None)})
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
