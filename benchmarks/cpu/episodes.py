"""What the layer of environments costs where nobody needs it: a task whose answers are collected as episodes of one turn.

    python benchmarks/cpu/episodes.py

The same problems, seeds and engine; the task is given as it is, and as an environment that replies nothing, whose opening and
reward are calls of reward workers as the task's grades are. Both ways take turns, and the tokens are compared. Of each batch the
fastest of `--rounds` counts: other load on the machine makes a batch longer, never shorter. The difference is a share of a whole
step, which infers and updates the policy, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.lib.figures import Goal
from benchmarks.lib.one_turn import AsMessages, OneTurn
from benchmarks.lib.result_tables import print_result
from benchmarks.lib.results import Report, add_result_arguments
from paceline import Engine, RolloutGroup
from paceline.config import LearnerConfig, OptimizerConfig, RolloutConfig
from paceline.models.weights import load_model
from paceline.rl import Learner, make_algorithm, samples_of
from paceline.rl.loop import PhaseTimer
from paceline.tasks import RewardPool, make_task
from paceline.trainer.episodes import make_collector
from paceline.trainer.rollouts import PromptStream


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--tasks", nargs="+", default=["collatz"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="smoke run: figures mean nothing")
    add_result_arguments(parser, "cpu/episodes")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.group_size, args.new_tokens, args.batches, args.rounds = 2, 2, 16, 1, 1
    torch.set_num_threads(2)
    report = Report(args, prompts=args.prompts, group_size=args.group_size, new_tokens=args.new_tokens, runs=[])
    engine = Engine.load(args.model, strategy="off")
    for name in args.tasks:
        report.content["runs"].append(measure(args, engine, name))
        report.save()
    goal = Goal("overhead of episodes of one turn, share of a step", max(each["overhead"] for each in report.content["runs"]),
                0.02, False)
    report.content["goals"] = [goal.record()]
    report.save()
    print_result(report.content)


def measure(args: argparse.Namespace, engine: Engine, name: str) -> dict[str, Any]:
    task = AsMessages(make_task(name))
    rollout = RolloutConfig(prompts=args.prompts, group_size=args.group_size, max_new_tokens=args.new_tokens)
    with RewardPool(task, 1, 20.0) as plain, RewardPool(OneTurn(task), 1, 20.0) as episodes:
        collectors = [make_collector(engine, None, PromptStream(pool.task, 0, None), pool, rollout, 0, lambda *_: None)
                      for pool in (plain, episodes)]
        seconds: list[list[list[float]]] = [[[] for _ in range(args.batches)] for _ in collectors]
        updates: list[list[float]] = [[] for _ in range(args.batches)]
        learner = make_learner(args)
        for collector in collectors:
            collector(0, args.prompts, PhaseTimer())
        for number in range(args.rounds):
            for batch in range(args.batches):
                both = {}
                for way in (0, 1) if (number + batch) % 2 else (1, 0):
                    began = time.perf_counter()
                    groups = collectors[way]((1 + batch) * args.prompts, args.prompts, PhaseTimer())
                    seconds[way][batch].append(time.perf_counter() - began)
                    both[way] = groups
                assert tokens(both[0]) == tokens(both[1]), "an environment that does nothing changes nothing"
                if number < 2:
                    updates[batch].append(update(learner, both[0]))
    fastest = [sum(map(min, each)) / args.batches for each in seconds]
    step_s = fastest[0] + sum(map(min, updates)) / args.batches
    return {"task": name, "plain_s": fastest[0], "episodes_s": fastest[1], "step_s": step_s,
            "overhead": (fastest[1] - fastest[0]) / step_s, "seconds": seconds}


def make_learner(args: argparse.Namespace) -> Learner:
    policy, _ = load_model(args.model, "cpu", "float32")
    return Learner(policy, make_algorithm("grpo", args.new_tokens), LearnerConfig(),
                   OptimizerConfig(lr=1e-6), 100, 1.0, torch.float32)


def update(learner: Learner, groups: Sequence[RolloutGroup]) -> float:
    """Seconds of a step after collecting."""
    began = time.perf_counter()
    samples = samples_of(groups, torch.float32)
    learner.infer(samples)
    learner.algorithm.compute_advantages(samples)
    learner.update(samples, 0)
    return time.perf_counter() - began


def tokens(groups: Sequence[RolloutGroup]) -> list[list[int]]:
    return [rollout.token_ids for group in groups for rollout in group.rollouts]


if __name__ == "__main__":
    main()
