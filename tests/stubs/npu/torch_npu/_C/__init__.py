"""What is asked of the compiled part of torch_npu."""

from . import _distributed_c10d  # noqa: F401

_NPUTaskGroupHandle = object  # only named in annotations
