"""What the operators of an NPU compute, in plain torch on tensors of the host."""
