"""Comparison of fluvial with the code of other projects on the same work; the user provides clones of them."""
