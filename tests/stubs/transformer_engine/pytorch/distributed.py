class CudaRNGStatesTracker:
    """Only a base class here: megatron-core uses its own tracker."""
