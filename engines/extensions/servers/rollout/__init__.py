"""Rollout server: samples of a policy over HTTP, and updates of its weights."""
