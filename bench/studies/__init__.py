"""Studies of what training does to samples beside the reward that is trained on, on the built-in models."""
