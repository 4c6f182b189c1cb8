"""The field's published runs as data: one TOML file per project, every value read in the source that the run names."""
