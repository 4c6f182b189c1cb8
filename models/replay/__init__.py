"""Pipelines without an adapter: recorded, checked and replayed."""
