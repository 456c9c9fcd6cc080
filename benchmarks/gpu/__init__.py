"""Benchmarks that run on one GPU; most have `--tiny`, a smoke run on a CPU."""
