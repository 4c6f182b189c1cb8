"""Rewards that another process computes: clients of reward servers and of VLM judges."""
