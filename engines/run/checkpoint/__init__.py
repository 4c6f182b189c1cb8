"""Checkpoints: complete or absent, verified before they are loaded, never unpickled; and the storage they are written to."""
