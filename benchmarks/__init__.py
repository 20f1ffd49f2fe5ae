"""Timings that anybody can rerun: `python -m benchmarks --help`."""
