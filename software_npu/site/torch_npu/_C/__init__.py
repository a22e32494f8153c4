"""What is asked of the compiled part of torch_npu."""

from software_npu._C import TaskGroup as _NPUTaskGroupHandle  # noqa: F401

from . import _distributed_c10d  # noqa: F401
