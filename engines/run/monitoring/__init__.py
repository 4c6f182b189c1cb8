"""Measurements of a run while it trains."""
