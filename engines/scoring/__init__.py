"""Rewards: their protocol, and the threads that run them in parallel with the rollout."""
