"""The Triton kernels, an operation a file, as `torch.library` operations; `kernels.dispatch` checks and calls them."""
