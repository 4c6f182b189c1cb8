"""The rollout server: samples of a policy over HTTP, and its weights."""
