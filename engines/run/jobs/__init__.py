"""Jobs: what is trained, on which prompts and data, by which rewards; and what a run starts from."""
