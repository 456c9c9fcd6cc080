"""Reinforcement learning: advantages, losses, packing, the learner and the loop. Knows neither the engine nor the tasks; it is
handed what generates and what is told of each step."""

from paceline.rl.algorithms import ALGORITHMS, Algorithm, make_algorithm
from paceline.rl.batch import MicroBatch, Sample, pack, samples_of
from paceline.rl.learner import Learner, NotFinite

__all__ = ["ALGORITHMS", "Algorithm", "Learner", "MicroBatch", "NotFinite", "Sample", "make_algorithm", "pack", "samples_of"]
