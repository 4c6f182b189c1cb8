"""Rollout sources outside the trainer's process: servers, and stored rollouts."""
