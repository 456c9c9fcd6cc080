"""Benchmarks of Paceline: one file per claim in `cpu` and `gpu`, what they share in `lib`, their figures in `results`."""
