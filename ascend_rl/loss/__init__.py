"""What is trained: losses of sequences, of whole mini-batches, old log-probs."""
