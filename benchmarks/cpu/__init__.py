"""Benchmarks that run on a CPU; those that take `--device` have a twin of the same name in `benchmarks.gpu`."""
