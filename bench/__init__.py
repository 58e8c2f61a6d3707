"""Measurements: each prints a table with a ratio to a baseline run side by side. See docs/benchmarks.md."""
