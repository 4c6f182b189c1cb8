"""Rewards: what a reward is, and the threads that run it beside the rollout."""
