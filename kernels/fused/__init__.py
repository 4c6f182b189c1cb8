"""The Triton kernels, an operation a file, as `torch.library` operations; `fluvial.kernels.dispatch` checks and calls them."""
