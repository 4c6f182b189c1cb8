"""Rollouts: generation of samples, and the flat set of items that an update sees."""
