"""Reinforcement learning: advantages, losses, packing, the learner and the training loop. This package knows neither the
engine nor the tasks: the loop is handed callables that generate, train the drafter and publish weights."""

from paceline.rl.algorithms import ALGORITHMS, Algorithm, make_algorithm
from paceline.rl.batch import MicroBatch, Sample, pack, samples_of
from paceline.rl.learner import Learner, NonFiniteError

__all__ = ["ALGORITHMS", "Algorithm", "Learner", "MicroBatch", "NonFiniteError", "Sample", "make_algorithm", "pack", "samples_of"]
