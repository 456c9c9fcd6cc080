"""The parts of `benchmarks/gpu/check.py`, and whether their figures pass."""
