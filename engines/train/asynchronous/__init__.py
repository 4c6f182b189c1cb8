"""Rollouts ahead of the trainer: a thread that makes them, the order of the ranks, and what a checkpoint holds of them."""
