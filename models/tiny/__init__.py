"""Tiny random pipelines of diffusers, built without a download: what `fluvial models --measured` tries."""
