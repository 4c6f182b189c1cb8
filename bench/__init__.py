"""Benchmarks: rows of measurements with machine and versions."""
