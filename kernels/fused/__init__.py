"""The Triton kernels as `torch.library` operations, one per file; `kernels.dispatch` checks arguments and calls them."""
