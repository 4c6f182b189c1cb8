"""Published runs of the field as data: one TOML file per project, with values read in the cited sources."""
