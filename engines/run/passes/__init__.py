"""Trial passes of micro-batches before training, which leave no trace: they choose sizes and compile blocks."""
