"""Paceline: fast rollouts for reinforcement learning of language models, with tokens that never depend on the drafter."""

from typing import TYPE_CHECKING, Any

from paceline.types import Rollout, RolloutGroup, SamplingParams, Strategy

if TYPE_CHECKING:
    from paceline.engine import Engine

__version__ = "0.1.0"
__all__ = ["Engine", "Rollout", "RolloutGroup", "SamplingParams", "Strategy", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Engine":  # brings torch: only for those who ask
        from paceline.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
