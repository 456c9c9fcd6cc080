"""The rollout engine. Read `engine.py` first: `Engine.step` is the whole story."""

from paceline.engine.engine import Engine

__all__ = ["Engine"]
