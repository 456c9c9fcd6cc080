"""Benchmarks of several workers."""
