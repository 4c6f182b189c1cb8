"""Input data: prompts, images with captions, and preferences between two images."""
