"""Rewards computed by another process: clients of reward servers and of VLM judges."""
