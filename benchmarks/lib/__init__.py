"""What the benchmarks share. Imports nothing here: some modules run in the interpreter of a peer that has no Paceline."""
