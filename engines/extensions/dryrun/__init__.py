"""Dry runs: every phase of a training run on a simulated accelerator, as rank 0 of any number of ranks."""
