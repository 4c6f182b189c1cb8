"""A training run without its GPUs: every phase on a simulated accelerator, as rank 0 of any number of ranks."""
