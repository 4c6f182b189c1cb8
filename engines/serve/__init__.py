"""Servers: what fluvial computes, for other processes."""
