"""Answers of a policy with their features, kept in a folder: what a drafter is trained on, and a part that it is judged by.

`answers.jsonl` says which answer is in which record. A process that is killed leaves whole records; those that no line names and
lines whose record was not written yet are done again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from jinja2 import TemplateError

from paceline.commands.drafter_prompts import Asked, encoded
from paceline.engine import Engine
from paceline.report.files import AppendOnlyFile
from paceline.spot import FeatureBuffer
from paceline.spot.record_files import SUFFIX, read_entry, read_record
from paceline.types import FeatureRecord, Rollout, SamplingParams

TRAINED_ON, HELD_OUT, INDEX = "records", "held_out", "answers.jsonl"
_EVERY, _MOST_HELD_OUT = 8, 64
_PLENTY = 1 << 62


class Answer(NamedTuple):
    """Which answer: they are numbered, and the number decides all."""

    number: int
    prompt: int
    sample: int
    held_out: bool


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    answers: int
    n: int
    """Answers to a prompt before the next is asked."""
    params: SamplingParams
    memory_bytes: int = 4 << 30
    """Of records in memory …"""
    disk_bytes: int = 64 << 30
    """… and on disk: no more answers are asked for then."""
    device: torch.device | str = "cpu"
    """Where records in memory lie."""


class Capture:
    """The buffer to train from, the records to judge by, and how many answers are in them."""

    def __init__(self, folder: Path, prompts: Sequence[Asked], options: CaptureOptions) -> None:
        self.folder, self.prompts, self.options = folder, prompts, options
        folder.mkdir(parents=True, exist_ok=True)
        lines = read_index(folder)
        for held_out in (False, True):
            _remove_unnamed(folder, held_out, {key for (held, key) in lines if held == held_out})
        self.buffer, self._held = (
            FeatureBuffer.open(folder / name, options.memory_bytes, _PLENTY, device=options.device)
            for name in (TRAINED_ON, HELD_OUT))
        present = {(held_out, entry.key) for held_out, buffer in ((False, self.buffer), (True, self._held))
                   for entry in buffer.entries()}
        # A key of None: too short to learn from, there is no record.
        self._done = {number for (held, key), numbers in lines.items() if key is None or (held, key) in present
                      for number in numbers}
        self.refused: list[str] = []

    @property
    def missing(self) -> list[Answer]:
        """What is still to be asked for; nothing if the disk's share is used up."""
        if self.is_full:
            return []
        return [answer for answer in answers_of(len(self.prompts), self.options) if answer.number not in self._done]

    @property
    def num_done(self) -> int:
        return len(self._done)

    @property
    def is_full(self) -> bool:
        return self.buffer.disk_bytes + self._held.disk_bytes >= self.options.disk_bytes

    def run(self, engine: Engine, on_step: Callable[[Engine, int], None] = lambda engine, finished: None,
            stopped: Callable[[], bool] = lambda: False) -> None:
        """Asks for all that is missing; an engine that captures what the drafter needs. on_step: told how many were finished."""
        index = AppendOnlyFile(self.folder / INDEX)
        index.append(b"\n")  # ends a line that a kill may have torn
        try:
            waiting = iter(self.missing)
            owners: dict[int, Answer] = {}
            while not stopped():
                while len(owners) < 2 * engine.scheduler.max_batch and not self.is_full:
                    answer = next(waiting, None)
                    if answer is None:
                        break
                    self._ask(engine, answer, owners)
                if not owners:
                    break
                result = engine.step()
                for rollout in result.finished:
                    self._keep(owners.pop(rollout.request_id), rollout, index)
                on_step(engine, len(result.finished))
            engine.abort(list(owners))
        finally:
            self.flush()
            index.close()

    def require_enough(self) -> None:
        if not (len(self.buffer) and len(self._held)):
            why = f" (refused: {self.refused[0]})" if self.refused else ""
            raise ValueError(f"answers: {len(self.buffer)} to train on and {len(self._held)} to judge by are long enough of "
                             f"{self.num_done}; both are needed{why}")

    def held_out(self) -> list[FeatureRecord]:
        """On the CPU or wherever the buffer's are; the first so many."""
        found = (self._held.get(entry.key) for entry in self._held.entries()[:_MOST_HELD_OUT])
        return [record for record in found if record is not None]

    def held_out_prompts(self) -> list[Asked]:
        """Not asked for training: to measure on (all of them, if there are too few to hold any back)."""
        chosen = {answer.prompt for answer in answers_of(len(self.prompts), self.options) if answer.held_out}
        return [self.prompts[i] for i in sorted(chosen)]

    def some(self, most: int = 512) -> list[FeatureRecord]:
        found = (self.buffer.get(entry.key) for entry in self.buffer.entries()[:most])
        return [record for record in found if record is not None]

    def flush(self) -> None:
        self.buffer.flush()
        self._held.flush()

    def close(self) -> None:
        self.buffer.close()
        self._held.close()

    def _ask(self, engine: Engine, answer: Answer, owners: dict[int, Answer]) -> None:
        asked = self.prompts[answer.prompt]
        try:
            # Each sample is a key of its own: its seed does not depend on which others are asked for now.
            (request,) = engine.add(encoded(engine, asked), self.options.params, 1, f"{asked.key}/{answer.sample}")
        except (ValueError, TemplateError) as error:
            self.refused.append(f"{asked.key}: {' '.join(str(error).split())}")
            return
        owners[request] = answer

    def _keep(self, answer: Answer, rollout: Rollout, index: AppendOnlyFile) -> None:
        record = rollout.features
        key = None
        if record is not None and rollout.error is None:
            key = (self._held if answer.held_out else self.buffer).add(record, 0)
        line = {"answer": answer.number, "held_out": answer.held_out, "key": key, "tokens": len(rollout.token_ids)}
        index.append((json.dumps(line) + "\n").encode())
        self._done.add(answer.number)


def answers_of(num_prompts: int, options: CaptureOptions) -> list[Answer]:
    """The first prompts' first, round and round. Every eighth prompt is held out, up to 64 of them, with all its answers: which
    ones does not depend on how many answers are asked for. Of fewer than eight prompts, every eighth answer."""
    found = []
    for number in range(options.answers):
        turn, place = divmod(number, num_prompts * options.n)
        prompt = place // options.n
        which = prompt if num_prompts >= _EVERY else number
        held_out = which % _EVERY == _EVERY // 2 and which < _EVERY * _MOST_HELD_OUT
        found.append(Answer(number, prompt, turn * options.n + place % options.n, held_out))
    return found


def read_index(folder: Path) -> dict[tuple[bool, int | None], set[int]]:
    """(held out, key of its record) → number of the answer; without a record: of all such answers. A key that was given twice
    belongs to the later line: the first record was never written."""
    found: dict[tuple[bool, int | None], set[int]] = {}
    path = folder / INDEX
    if not path.is_file():
        return found
    for line in path.read_bytes().splitlines():
        try:
            raw = json.loads(line)
            place = (bool(raw["held_out"]), raw["key"])
            number = int(raw["answer"])
        except (ValueError, KeyError, TypeError):
            continue  # torn by a kill
        found[place] = found.get(place, set()) | {number} if place[1] is None else {number}
    return found


def read_records(folder: Path, most: int, device: torch.device | str = "cpu") -> list[FeatureRecord]:
    """Of a folder that training left (what it held out) or of records; nothing is changed there."""
    place = folder / HELD_OUT if (folder / HELD_OUT).is_dir() else folder
    whole = (path for path in sorted(place.glob(f"*{SUFFIX}")) if read_entry(path) is not None)
    found = [read_record(place, int(path.stem), device) for path in islice(whole, most)]
    if not found:
        raise ValueError(f"--records {folder}: no records there")
    return found


def _remove_unnamed(folder: Path, held_out: bool, named: set[int | None]) -> None:
    for path in (folder / (HELD_OUT if held_out else TRAINED_ON)).glob(f"*{SUFFIX}"):
        if int(path.stem) not in named:
            path.unlink()
