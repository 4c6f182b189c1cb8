"""The stateful part: engine, rollouts over ranks, training runs, checkpoints and the command line."""
