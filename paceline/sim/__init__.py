"""Simulation of rollouts on any number of workers: the scheduling policy of `cluster/policy.py` against measured cost curves."""

from paceline.sim.pace import DrafterQuality, Pace
from paceline.sim.simulator import SimConfig, SimResult, simulate
from paceline.sim.workload import Workload, read_lengths, sample_workload

__all__ = ["DrafterQuality", "Pace", "SimConfig", "SimResult", "Workload", "read_lengths", "sample_workload", "simulate"]
