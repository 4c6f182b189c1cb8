"""Reward models, one file each."""
