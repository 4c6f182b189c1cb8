"""Input data: prompts, and preferences between two images."""
