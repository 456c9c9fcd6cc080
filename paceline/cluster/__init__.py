"""Rollouts on many workers: a pure scheduling policy, a coordinator that carries it out, workers, and Ray as the runtime."""
