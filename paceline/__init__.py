"""Paceline: fast rollouts for reinforcement learning of language models, with tokens that never depend on the drafter."""

from paceline.engine import Engine
from paceline.types import Rollout, RolloutGroup, SamplingParams, Strategy

__version__ = "0.1.0"
__all__ = ["Engine", "Rollout", "RolloutGroup", "SamplingParams", "Strategy", "__version__"]
