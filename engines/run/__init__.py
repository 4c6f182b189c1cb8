"""The run as an operation: its folder, requests to stop, and restarts by torchrun."""
