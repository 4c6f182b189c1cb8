"""Shared parts of reward models: preprocessing, loading and conversion of weights, heads, and the score of texts."""
