"""Run at the start of every Python process that has this directory on PYTHONPATH, Ray workers included."""

import os

import before_megatron


def install() -> None:
    import cuda_on_cpu

    cuda_on_cpu.install()


before_megatron.call(install, os.path.dirname(__file__))
