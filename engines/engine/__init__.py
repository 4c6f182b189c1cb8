"""The engine: a module sharded over the ranks, its optimizer, and one update over a flat set of weighted items."""
