"""Stand-in for NVIDIA's TransformerEngine, as far as megatron-core 0.12.1 and 0.16.1 call it, in plain torch.

It ends at TransformerEngine's own interface: megatron-core's classes around it (TELinear, TEGroupedLinear,
...) run unchanged, so that tensor, context and expert parallelism, initialisation and checkpoint layouts are
the real ones.
"""

from . import common, pytorch  # noqa: F401

__version__ = "2.2.0"
