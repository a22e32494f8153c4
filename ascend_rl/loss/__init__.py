"""What is trained, and on which samples: losses of sequences, dynamic sampling, old log-probs."""
