"""HTTP servers for rollouts and rewards."""
