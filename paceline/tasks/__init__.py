"""Verifiable tasks and their rewards, and environments, which have several turns. Each is a small class, a frozen config and one
line in TASKS. Nothing here imports torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any

from paceline.config import Config
from paceline.tasks.arc import Arc, ArcConfig
from paceline.tasks.base import Problem, Task
from paceline.tasks.calculation import Calculation, CalculationConfig
from paceline.tasks.collatz import Collatz, CollatzConfig
from paceline.tasks.competition import Math, MathConfig
from paceline.tasks.custom import Python, PythonConfig
from paceline.tasks.environment import AnyTask, Concurrent, Environment, Tool, Transcript, UsesTools
from paceline.tasks.gsm8k import Gsm8k, Gsm8kConfig
from paceline.tasks.humaneval import HumanEval, HumanEvalConfig
from paceline.tasks.jsonl import Jsonl, JsonlConfig
from paceline.tasks.openenv import OpenEnv, OpenEnvConfig
from paceline.tasks.options import make_config
from paceline.tasks.pool import Graded, RewardPool
from paceline.tasks.reasoning import ReasoningGym, ReasoningGymConfig, split_options
from paceline.tasks.repair import Repair, RepairConfig
from paceline.tasks.verifiers import Verifiers, VerifiersConfig
from paceline.tasks.weighted import WeightedRewards
from paceline.tasks.words import Words, WordsConfig

__all__ = ["TASKS", "Concurrent", "Environment", "Graded", "Problem", "RewardPool", "Task", "Tool", "Transcript", "UsesTools",
           "WeightedRewards", "make_task"]

TASKS: dict[str, tuple[type[Config], Callable[[Any], AnyTask]]] = {
    "arc": (ArcConfig, Arc),
    "calculation": (CalculationConfig, Calculation),
    "collatz": (CollatzConfig, Collatz),
    "gsm8k": (Gsm8kConfig, Gsm8k),
    "humaneval": (HumanEvalConfig, HumanEval),
    "jsonl": (JsonlConfig, Jsonl),
    "math": (MathConfig, Math),
    "openenv": (OpenEnvConfig, OpenEnv),
    "python": (PythonConfig, Python),
    "reasoning-gym": (ReasoningGymConfig, ReasoningGym),
    "repair": (RepairConfig, Repair),
    "verifiers": (VerifiersConfig, Verifiers),
    "words": (WordsConfig, Words),
}
"""The config class and the class of each task, by name."""


def make_task(name: str, **options: Any) -> AnyTask:
    """The task with this name and these options. `reasoning-gym:chain_sum` (or `reasoning_gym/chain_sum`) names one of
    reasoning-gym's generators; `verifiers:NAME` and `openenv:NAME` name environments of these packages. ValueError says which
    option is wrong."""
    generator = re.fullmatch(r"reasoning[-_]gym(?:[:/](\w+))?", name)
    if generator is not None:
        name = "reasoning-gym"
        options = split_options(options if generator[1] is None else {**options, "generator": generator[1]})
    package, mark, environment = name.partition(":")
    if mark and package in ("verifiers", "openenv"):
        name, options = package, {**options, "environment": environment}
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        raise ValueError(f"task: there is no {name!r}" + (f", did you mean {near[0]}?" if near else "") +
                         f" (there are {', '.join(TASKS)}, reasoning-gym:<generator>, verifiers:<name>, openenv:<name>)")
    config_class, make = TASKS[name]
    return make(make_config(name, config_class, options))
