"""The collectives of HCCL, as far as MindSpeed asks what they can do: nothing; gloo does the work here."""

from types import SimpleNamespace

_distributed_c10d = SimpleNamespace(ProcessGroupHCCL=SimpleNamespace(Options=object))
