"""The objectives on the built-in jobs, at equal samples and at equal time."""
