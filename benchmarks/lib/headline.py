"""What the headline benchmark runs: graded prompts with given answer lengths, RL runs at a larger policy's cost, and
multiple-choice problems."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.lib.long_tail import MAX_PROBLEMS, TOKENS_PER_PROBLEM
from benchmarks.lib.rl_run import EndlessTrainer, MeasuredBackend
from benchmarks.lib.upscale import upscale
from paceline.config import TrainConfig
from paceline.models.config import ModelConfig
from paceline.models.weights import load_model
from paceline.rl.learner import Learner
from paceline.trainer.parts import learner_for, master_dtype


class GradedProblem(NamedTuple):
    """A grade-school problem and its result."""

    question: str
    result: str


class Prompt(NamedTuple):
    """Problems to be solved one after the other, and the result of each."""

    text: str
    results: list[str]


def graded_problems(file: Path | None) -> list[GradedProblem]:
    """The problems of a JSON-lines file in the form of GSM8K; without a file, sums for a tiny model."""
    if file is None:
        return [GradedProblem(f"What is {a} + {a}?", str(2 * a)) for a in range(64)]
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [GradedProblem(row["question"], row["answer"].split("####")[-1].strip().replace(",", "")) for row in rows]


def compose_graded(problems: Sequence[GradedProblem], lengths: Sequence[int], salt: int,
                   most: int = MAX_PROBLEMS) -> list[Prompt]:
    """One prompt per length, with as many problems as an answer of that length has room for, but no more than `most`."""
    draw, prompts = random.Random(salt), []
    for length in lengths:
        some = draw.sample(problems, min(len(problems), most, 1 + length // TOKENS_PER_PROBLEM))
        numbered = "\n\n".join(f"{i}. {problem.question}" for i, problem in enumerate(some, start=1))
        prompts.append(Prompt("Solve these problems one after the other. Explain every step in full sentences and check each "
                              "result before you go on. End the solution of problem N with a line \"Answer N: \" and its result "
                              f"as a number.\n\n{numbered}", [problem.result for problem in some]))
    return prompts


def write_choices(problems: Sequence[GradedProblem], file: Path, seed: int = 0) -> None:
    """Multiple-choice problems in the form of ARC: the result among three numbers near it."""
    draw, letters = random.Random(seed), "ABCD"
    with file.open("w", encoding="utf-8") as out:
        for number, problem in enumerate(problems):
            right = float(problem.result)
            near = {f"{value:g}" for value in (right + 1, right + 10, 2 * right, right - 2, right + 5)} - {f"{right:g}"}
            texts = [f"{right:g}", *draw.sample(sorted(near), 3)]
            draw.shuffle(texts)
            choices = [{"label": label, "text": text} for label, text in zip(letters, texts, strict=True)]
            row = {"id": f"choice-{number}", "question": {"stem": problem.question, "choices": choices},
                   "answerKey": letters[texts.index(f"{right:g}")]}
            out.write(json.dumps(row) + "\n")


class TwinTrainer(EndlessTrainer):
    """A run whose policy is the upscaled twin of the one in `source`: `config.model` is a folder with the twin's shape only."""

    source: str
    shape: ModelConfig

    def _make_backend(self) -> TwinBackend:
        return TwinBackend(self.config, self.folder.path, self.source, self.shape)


class TwinBackend(MeasuredBackend):
    def __init__(self, config: TrainConfig, folder: Path, source: str, shape: ModelConfig) -> None:
        super().__init__(config, folder)
        self.source, self.shape = source, shape

    def _make_learner(self, checkpoint: Path | None) -> tuple[Learner, Any]:
        assert checkpoint is None, "runs of this benchmark write none"
        small, tokenizer = load_model(self.source, self.config.device, master_dtype(self.config))
        learner = learner_for(self.config, upscale(small, self.shape), tokenizer)
        del small
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return learner, tokenizer
