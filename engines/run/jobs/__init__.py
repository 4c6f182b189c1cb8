"""Jobs: models with prompts, data and rewards, and the weights that a run starts from."""
