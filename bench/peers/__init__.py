"""The same work on fluvial and on the code of other projects, run from clones that the user has."""
