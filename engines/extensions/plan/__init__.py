"""Planning: the memory of a training run, on paper and measured."""
