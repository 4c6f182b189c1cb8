"""Adapters over diffusers: one file per architecture."""
