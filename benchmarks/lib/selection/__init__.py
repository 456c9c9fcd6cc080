"""Simulated workloads on which `benchmarks/cpu/selection.py` judges strategy selectors."""
