"""Sources of rollouts: what turns requests into samples. Everything above them (rewards, items, objectives) is the same."""
