"""Generating a policy's answers and keeping them with their features in a folder: most to train a drafter on, some to evaluate it
on.

`answers.jsonl` maps answers to records. A killed process leaves complete records; answers whose record is missing, and records
that no line names, are generated again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from paceline.engine import Engine
from paceline.engine.pool import RequestPool
from paceline.generation import NamedPrompt, encode_prompt
from paceline.report.files import AppendOnlyFile
from paceline.spot import FeatureBuffer
from paceline.spot.records import RECORD_SUFFIX, read_record, read_record_info
from paceline.trainer.feature_downloads import FeatureDownloads
from paceline.types import FeatureRecord, Rollout, SamplingParams

TRAINED_ON, HELD_OUT, INDEX = "records", "held_out", "answers.jsonl"
_EVERY, _MOST_HELD_OUT = 8, 64
_PLENTY = 1 << 62


class Answer(NamedTuple):
    """One wanted answer. Its number determines the other fields."""

    number: int
    prompt: int
    """Index of the prompt."""
    sample: int
    """Number of the answer among those to the same prompt."""
    held_out: bool
    """Whether the answer is used for evaluation instead of training."""


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """How many answers are captured, and how much space their features may take."""

    answers: int
    """Number of answers, including those that are held out."""
    n: int
    """Number of answers to a prompt before the next prompt is used."""
    params: SamplingParams
    """How the answers are sampled."""
    memory_bytes: int = 4 << 30
    """Maximum size of the records in memory."""
    disk_bytes: int = 64 << 30
    """Maximum size of the records on disk; no more answers are generated once it is reached."""
    device: torch.device | str = "cpu"
    """Device that holds the records in memory."""


class AnswerCapture:
    """The captured answers in a folder: the buffer to train from and the held-out records."""

    def __init__(self, folder: Path, prompts: Sequence[NamedPrompt], options: CaptureOptions) -> None:
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
        # A key of None belongs to an answer that is too short to learn from and has no record.
        self._done = {number for (held, key), numbers in lines.items() if key is None or (held, key) in present
                      for number in numbers}
        self.refused: list[str] = []
        """Messages about prompts that the engine refused."""
        self._downloads = FeatureDownloads()

    @property
    def missing(self) -> list[Answer]:
        """Answers that are still to be generated; none if the disk space is used up."""
        if self.is_full:
            return []
        return [answer for answer in answers_of(len(self.prompts), self.options) if answer.number not in self._done]

    @property
    def num_done(self) -> int:
        """Number of captured answers."""
        return len(self._done)

    @property
    def is_full(self) -> bool:
        """Whether the disk space is used up."""
        return self.buffer.disk_bytes + self._held.disk_bytes >= self.options.disk_bytes

    def run(self, engine: Engine, on_step: Callable[[Engine, int], None] = lambda engine, finished: None,
            stopped: Callable[[], bool] = lambda: False) -> None:
        """Generates all missing answers with an engine that captures the layers the drafter needs. `on_step` receives the
        number of answers that an engine step has finished."""
        index = AppendOnlyFile(self.folder / INDEX)
        index.append(b"\n")  # ends a line that a killed process may have left incomplete
        try:
            waiting = iter(self.missing)
            with RequestPool[Answer](engine) as requests:
                while not stopped():
                    for answer in islice(waiting, 0 if self.is_full else requests.num_to_add(engine.scheduler.max_batch)):
                        self._request(requests, answer)
                    if not requests:
                        break
                    finished = requests.step().finished
                    for answer, rollout in finished:
                        self._take(answer, rollout, index)
                    self._downloads.poll()
                    on_step(engine, len(finished))
        finally:
            try:
                self._downloads.wait()
                self.flush()
            finally:
                index.close()

    def require_enough(self) -> None:
        """Raises a ValueError unless there are records both to train on and to evaluate on."""
        if not (len(self.buffer) and len(self._held)):
            why = f" (refused: {self.refused[0]})" if self.refused else ""
            raise ValueError(f"answers: {len(self.buffer)} to train on and {len(self._held)} to evaluate on are long enough "
                             f"of {self.num_done}; both are needed{why}")

    def held_out(self) -> list[FeatureRecord]:
        """The held-out records, at most the first 64, on the buffer's device."""
        found = (self._held.get(entry.key) for entry in self._held.entries()[:_MOST_HELD_OUT])
        return [record for record in found if record is not None]

    def held_out_prompts(self) -> list[NamedPrompt]:
        """Prompts with held-out answers."""
        chosen = {answer.prompt for answer in answers_of(len(self.prompts), self.options) if answer.held_out}
        return [self.prompts[i] for i in sorted(chosen)]

    def some(self, most: int = 512) -> list[FeatureRecord]:
        """The first records to train on, at most `most`."""
        found = (self.buffer.get(entry.key) for entry in self.buffer.entries()[:most])
        return [record for record in found if record is not None]

    def flush(self) -> None:
        """Waits until all records are written."""
        try:
            self.buffer.flush()
        finally:
            self._held.flush()

    def close(self) -> None:
        """Writes all records and closes the folder."""
        try:
            self.buffer.close()
        finally:
            self._held.close()

    def _request(self, requests: RequestPool[Answer], answer: Answer) -> None:
        prompt = self.prompts[answer.prompt]
        try:
            # Each sample has a key of its own, so its seed does not depend on which others are generated now.
            requests.add(encode_prompt(requests.engine, prompt), self.options.params, [answer], f"{prompt.key}/{answer.sample}")
        except ValueError as error:
            self.refused.append(f"{prompt.key}: {' '.join(str(error).split())}")

    def _take(self, answer: Answer, rollout: Rollout, index: AppendOnlyFile) -> None:
        """Keeps a finished answer, after its features have been copied to the buffer's device if necessary."""
        if rollout.error is not None:
            raise ValueError(f"answer {answer.number} ended with an error: {rollout.error}")
        keep, record = partial(self._keep, answer, len(rollout.token_ids), index), rollout.features
        if record is None or torch.device(self.buffer.device).type == record.features.device.type:
            keep(record)
        else:
            self._downloads.add(record, keep)

    def _keep(self, answer: Answer, num_tokens: int, index: AppendOnlyFile, record: FeatureRecord | None) -> None:
        key = None
        if record is not None:
            key = (self._held if answer.held_out else self.buffer).add(record, 0)
        line = {"answer": answer.number, "held_out": answer.held_out, "key": key, "tokens": num_tokens}
        index.append((json.dumps(line) + "\n").encode())
        self._done.add(answer.number)


def answers_of(num_prompts: int, options: CaptureOptions) -> list[Answer]:
    """All wanted answers: `n` to each prompt in turn, then `n` more, and so on. Every eighth prompt, up to 64 of them, is held
    out with all its answers; which ones does not depend on the number of answers. With fewer than eight prompts, every
    eighth answer is."""
    found = []
    for number in range(options.answers):
        turn, place = divmod(number, num_prompts * options.n)
        prompt = place // options.n
        which = prompt if num_prompts >= _EVERY else number
        held_out = which % _EVERY == _EVERY // 2 and which < _EVERY * _MOST_HELD_OUT
        found.append(Answer(number, prompt, turn * options.n + place % options.n, held_out))
    return found


def read_index(folder: Path) -> dict[tuple[bool, int | None], set[int]]:
    """Maps (held out, key of the record) to the number of the answer; answers without a record share the key None. A key that
    occurs twice belongs to the later line, because the first record was never written."""
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
            continue  # incomplete line of a killed process
        found[place] = found.get(place, set()) | {number} if place[1] is None else {number}
    return found


def read_records(folder: Path, most: int, device: torch.device | str = "cpu") -> list[FeatureRecord]:
    """At most `most` records from a folder of drafter training (its held-out records) or from a folder of records."""
    place = folder / HELD_OUT if (folder / HELD_OUT).is_dir() else folder
    whole = (path for path in sorted(place.glob(f"*{RECORD_SUFFIX}")) if read_record_info(path) is not None)
    found = [read_record(place, int(path.stem), device) for path in islice(whole, most)]
    if not found:
        raise ValueError(f"records {folder}: there are no records in it")
    return found


def _remove_unnamed(folder: Path, held_out: bool, named: set[int | None]) -> None:
    for path in (folder / (HELD_OUT if held_out else TRAINED_ON)).glob(f"*{RECORD_SUFFIX}"):
        if int(path.stem) not in named:
            path.unlink()
