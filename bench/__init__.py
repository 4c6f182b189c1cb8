"""Benchmarks: rows of measurements with the machine and versions they were taken on."""
