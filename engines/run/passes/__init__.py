"""Passes of a network that leave no trace: they choose the micro-batch, and let blocks compile."""
