"""Measurements that need a GPU, for a short visit."""
