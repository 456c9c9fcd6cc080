"""Alarms about a drafter that no longer fits its policy, so that a drop of the speedup never goes unnoticed.

Alarms are a pure function of the metrics of recent steps. This module does not import torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from paceline.config import Config


class AlarmConfig(Config):
    """Thresholds of the alarms."""

    fall: float = Field(0.35, gt=0, lt=1)
    """Relative drop of accepted draft tokens per verification that raises an alarm. A change of problems alone moves it by a
    fifth."""
    window: int = Field(4, ge=1)
    """Number of preceding steps whose median the current step is compared with."""
    pays: float = Field(1.15, ge=1)
    """Tokens per verification below which drafting is taken to be unprofitable, used where the cost was not measured."""
    max_age: int = Field(80, ge=1)
    """Number of policy versions that a drafter may lag behind. One that is good enough is not trained, so age alone does not end
    its use."""
    calibration: float = Field(0.15, gt=0)
    """Largest difference between the predicted and the observed share of accepted draft tokens."""


AlarmName = Literal["acceptance", "age", "calibration"]
NAMES: tuple[AlarmName, ...] = ("acceptance", "age", "calibration")


@dataclass(frozen=True, slots=True)
class DrafterFigures:
    """Metrics of the drafter in one RL step."""

    tokens_per_verification: float
    """Mean number of tokens generated per verification step and request, the bonus token included."""
    policy_version: int
    """Current version of the policy."""
    drafter_version: int
    """Policy version that the drafter was last trained on."""
    expected_hits: float
    """Predicted share of accepted draft tokens, with the calibration of earlier steps; 0 together with `hits` if not measured."""
    hits: float
    """Observed share of accepted draft tokens."""
    cost: float | None = None
    """Time of a speculative step relative to a plain one at similar batch sizes, which is the number of tokens per verification
    at which drafting breaks even; None if not measured."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm about the drafter."""

    name: AlarmName
    """Kind of the alarm."""
    message: str
    """Explanation for the user."""
    distrust: bool = False
    """Whether the drafter should not be used until a new one is published."""


def alarms(history: Sequence[DrafterFigures], config: AlarmConfig) -> list[Alarm]:
    """Returns the alarms of the last step in `history`."""
    if not history:
        return []
    now, found = history[-1], []
    earlier = [figures.tokens_per_verification for figures in history[-1 - config.window : -1]]
    usual = statistics.median(earlier) if earlier else now.tokens_per_verification
    # One token per verification is generated without any drafter, so only the tokens above one are compared.
    if now.tokens_per_verification - 1 < (1 - config.fall) * (usual - 1):
        pays = config.pays if now.cost is None else now.cost
        too_few = now.tokens_per_verification < pays
        found.append(Alarm("acceptance", f"{now.tokens_per_verification:.2f} tokens per verification, {usual:.2f} before"
                           + (f"; less than {pays:.2f} is slower than no speculation" if too_few else ""), too_few))
    age = now.policy_version - now.drafter_version
    if age > config.max_age:
        found.append(Alarm("age", f"drafter is {age} policy versions behind, more than {config.max_age}"))
    if abs(now.hits - now.expected_hits) > config.calibration:
        found.append(Alarm("calibration", f"{now.hits:.2f} of draft tokens accepted, {now.expected_hits:.2f} expected"))
    return found
