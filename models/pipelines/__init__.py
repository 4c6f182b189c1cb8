"""Adapters over diffusers' pipelines: one file per architecture, and `open_model`, which chooses among them."""
