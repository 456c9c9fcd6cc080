"""Silent decay is a defect: what is said aloud when a drafter no longer fits its policy. Pure functions of figures; no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from paceline.config import Config


class AlarmConfig(Config):
    fall: float = Field(0.2, gt=0, lt=1)
    """Acceptance that falls by this share after an update is an alarm."""
    window: int = Field(4, ge=1)
    """Steps before that it is compared with."""
    max_age: int = Field(4, ge=1)
    """Policy versions that a drafter may be behind."""
    calibration: float = Field(0.15, gt=0)
    """How far the share of drafted nodes accepted may be from what the drafter expected."""


@dataclass(frozen=True, slots=True)
class DrafterFigures:
    """One step's."""

    tokens_per_verification: float
    policy_version: int
    drafter_version: int
    """Policy version that the drafter was last trained on."""
    expected_hits: float
    """Mean survival of the drafted nodes, as the drafter estimated it with its tau."""
    hits: float
    """Share of them that were accepted."""


@dataclass(frozen=True, slots=True)
class Alarm:
    name: str
    message: str


def alarms(history: Sequence[DrafterFigures], config: AlarmConfig) -> list[Alarm]:
    """What the last of these steps gives reason for."""
    if not history:
        return []
    now, found = history[-1], []
    earlier = [figures.tokens_per_verification for figures in history[-1 - config.window : -1]]
    usual = statistics.median(earlier) if earlier else now.tokens_per_verification
    # One token a verification comes without any drafter: only what is above it can fall.
    if now.tokens_per_verification - 1 < (1 - config.fall) * (usual - 1):
        found.append(Alarm("acceptance", f"{now.tokens_per_verification:.2f} tokens per verification, {usual:.2f} before"))
    age = now.policy_version - now.drafter_version
    if age > config.max_age:
        found.append(Alarm("age", f"drafter is {age} policy versions behind, more than {config.max_age}"))
    if abs(now.hits - now.expected_hits) > config.calibration:
        found.append(Alarm("calibration", f"{now.hits:.2f} of drafted nodes accepted, {now.expected_hits:.2f} expected"))
    return found
