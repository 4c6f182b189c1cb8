"""Parts that the spine does not know: they come in through its protocols and entry points."""
