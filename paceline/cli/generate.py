"""`paceline generate`: rollouts of a file of prompts, with progress on stderr, or answers to a prompt on stdout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from paceline.cli.log import clear_progress, say
from paceline.cli.progress import ProgressView, figures_line
from paceline.engine import Engine
from paceline.garbage import freeze_until_exit
from paceline.generation import FileGenerator, GenerationCallback, GenerationOptions
from paceline.generation.generator import load_engine
from paceline.types import EngineStats, StepResult

OK, BAD_INPUT, INTERRUPTED = 0, 2, 130


def generate(options: GenerationOptions) -> int:
    """Exit code: 0, 2 if a line or rollout failed, 130 if the run was interrupted."""
    with ExitStack() as stack:
        view = _GenerationView(stack)
        result = FileGenerator(options, view).run()
    if result.interrupted:
        view.progress.say(f"interrupted: {result.num_generated} rollouts of this run are in {options.out}; "
                          "the same command continues from there")
        return INTERRUPTED
    if result.stats is None or not result.num_generated + result.num_existing + result.num_problems:
        view.progress.say(f"{options.prompts}: there is no prompt in it")
        return BAD_INPUT
    existing = f" ({result.num_existing} were there already)" if result.num_existing else ""
    view.progress.say(figures_line(result.num_generated, result.stats, result.seconds) + existing)
    if result.num_problems:
        view.progress.say(f"{result.num_problems} line(s) or rollout(s) failed, see above")
        return BAD_INPUT
    return OK


def print_answers(options: GenerationOptions, prompts: Sequence[str]) -> int:
    """Prints each prompt followed by its answer, `options.n` times. Returns the exit code."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    engine = load_engine(options)
    groups = engine.generate(list(prompts), options.params, n=options.n)
    clear_progress()
    failed = 0
    for prompt, group in zip(prompts, groups, strict=True):
        for rollout in group.rollouts:
            print(f"{prompt}{rollout.text}" if rollout.error is None else f"{prompt} [{rollout.error}]")
            failed += rollout.error is not None
    say(figures_line(sum(len(group.rollouts) for group in groups), engine.stats(), engine.stats().seconds))
    return BAD_INPUT if failed else OK


class _GenerationView(GenerationCallback):
    """Shows progress and messages. The progress bar ends with `stack`."""

    progress: ProgressView

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def on_begin(self, num_rollouts: int | None) -> None:
        self.progress = self._stack.enter_context(ProgressView("generate", num_rollouts))

    def on_warm_up(self, done: int, total: int) -> None:
        self.progress.show(f"warm-up, {done} of {total}")

    def on_engine_ready(self, engine: Engine) -> None:
        freeze_until_exit(self._stack)
        self.progress.restart_clock()

    def on_rollouts(self, count: int) -> None:
        self.progress.add_done(count)

    def on_engine_step(self, result: StepResult, stats: EngineStats) -> None:
        self.progress.update(stats, str(result.strategy))

    def on_warning(self, message: str) -> None:
        self.progress.say(message)

    def on_line_refused(self, message: str, num_rollouts: int) -> None:
        self.progress.lower_total(num_rollouts)
        self.progress.say(message)

    def on_rollout_failed(self, message: str) -> None:
        self.progress.say(message)
