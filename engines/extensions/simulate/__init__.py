"""A simulated accelerator: shapes, memory, traffic and host reads of a program, without a GPU and without values."""
