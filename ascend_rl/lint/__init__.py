"""What would fail later in a configuration: the linter of training scripts, and what it reads them with."""
