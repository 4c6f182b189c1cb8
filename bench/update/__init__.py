"""Count and time the optimizer update of a stored rollout, beside the loop of published trainers."""
