"""Training runs: configuration, recipes, jobs, and the loop."""
