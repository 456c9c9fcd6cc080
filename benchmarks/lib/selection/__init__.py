"""The measurement behind `benchmarks/cpu/selection.py` and `benchmarks/gpu/selection.py`: workloads, subjects, run, summary."""
