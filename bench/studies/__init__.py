"""Studies of how training on a reward changes samples in other respects, on the built-in models."""
