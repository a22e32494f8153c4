"""The algorithms behind the patches: plain numbers, numpy arrays and torch tensors in, the same out."""
