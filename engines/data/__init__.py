"""Data on its way in: prompts, and preferences between two images."""
