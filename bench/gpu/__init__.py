"""Questions that a GPU settles in a short visit."""
