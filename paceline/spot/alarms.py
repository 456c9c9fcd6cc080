"""Silent decay is a defect: what is said aloud when a drafter no longer fits its policy. Pure functions of figures; no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from paceline.config import Config


class AlarmConfig(Config):
    fall: float = Field(0.35, gt=0, lt=1)
    """Acceptance that falls by this share is an alarm; other problems alone move it by a fifth."""
    window: int = Field(4, ge=1)
    """Steps before that it is compared with."""
    pays: float = Field(1.15, ge=1)
    """Tokens per verification that a drafter must give to be worth its time, where that could not be measured."""
    max_age: int = Field(12, ge=1)
    """Policy versions that a drafter may be behind: more than training pauses when it does not pay."""
    calibration: float = Field(0.15, gt=0)
    """How far the share of drafted nodes accepted may be from what was expected."""


AlarmName = Literal["acceptance", "age", "calibration"]
NAMES: tuple[AlarmName, ...] = ("acceptance", "age", "calibration")


@dataclass(frozen=True, slots=True)
class DrafterFigures:
    """One step's."""

    tokens_per_verification: float
    policy_version: int
    drafter_version: int
    """Policy version that the drafter was last trained on."""
    expected_hits: float
    """Mean survival of the drafted nodes, as calibrated by earlier steps …"""
    hits: float
    """… and the share of them that were accepted. Both 0: not looked at."""
    cost: float | None = None
    """Time of a step with it over one without, at like batch sizes: what it must give in tokens per verification to pay. None:
    not measured."""


@dataclass(frozen=True, slots=True)
class Alarm:
    name: AlarmName
    message: str
    distrust: bool = False
    """Other strategies should be used until there is a new drafter."""


def alarms(history: Sequence[DrafterFigures], config: AlarmConfig) -> list[Alarm]:
    """What the last of these steps gives reason for."""
    if not history:
        return []
    now, found = history[-1], []
    earlier = [figures.tokens_per_verification for figures in history[-1 - config.window : -1]]
    usual = statistics.median(earlier) if earlier else now.tokens_per_verification
    # One token a verification comes without any drafter: only what is above it can fall.
    if now.tokens_per_verification - 1 < (1 - config.fall) * (usual - 1):
        pays = config.pays if now.cost is None else now.cost
        too_few = now.tokens_per_verification < pays
        found.append(Alarm("acceptance", f"{now.tokens_per_verification:.2f} tokens per verification, {usual:.2f} before"
                           + (f"; less than {pays:.2f} does not pay" if too_few else ""), too_few))
    age = now.policy_version - now.drafter_version
    if age > config.max_age:
        found.append(Alarm("age", f"drafter is {age} policy versions behind, more than {config.max_age}", True))
    if abs(now.hits - now.expected_hits) > config.calibration:
        found.append(Alarm("calibration", f"{now.hits:.2f} of drafted nodes accepted, {now.expected_hits:.2f} expected"))
    return found
