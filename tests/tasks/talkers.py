"""Environments that misbehave. A module of its own, so that worker processes can import it."""

from __future__ import annotations

import os
import random
import string
import time
from pathlib import Path
from typing import Any

from paceline.tasks import Problem, Transcript


def brevity(row: dict[str, Any], answer: str) -> float:
    """The shorter, the better."""
    return 1 / len(answer)


class Talker:
    """The policy's turn says what the environment does."""

    name = "talker"

    def __init__(self, file: str = "") -> None:
        self.file = file

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Problem:
        return Problem(f"talk-{index}", [{"role": "user", "content": f"problem {index}"}], index)

    def reset(self, problem: Problem) -> list[dict[str, Any]]:
        return problem.prompt

    def reply(self, transcript: Transcript) -> Any:
        match transcript.answer:
            case "raise":
                raise KeyError("raise")
            case "hang":
                time.sleep(1000)
            case "die":
                os._exit(3)
            case "number":
                return 7
            case "nothing":
                return []
            case "slow":
                time.sleep(0.3)
            case "wait once":
                if not Path(self.file).exists():
                    Path(self.file + ".new").write_text(str(os.getpid()))
                    os.rename(self.file + ".new", self.file)
                    time.sleep(1000)
                return [{"role": "user", "content": "waited"}]
            case "bye":
                return None
        return [{"role": "user", "content": transcript.answer + "!"}]

    def reward(self, transcript: Transcript) -> float:
        return float(len(transcript.turns))


class Echo:
    """Replies with the first letters of the turn, ends after a turn that begins with a vowel, and counts lower-case letters."""

    name = "echo"
    fails: str | None = None

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Problem:
        return Problem(f"echo-{index}", string.ascii_letters[index : index + 3], None)

    def reset(self, problem: Problem) -> list[dict[str, Any]]:
        if problem.id == self.fails:
            raise RuntimeError("no opening")
        return [{"role": "user", "content": problem.prompt}]

    def reply(self, transcript: Transcript) -> list[dict[str, Any]] | None:
        if self.fails == "reply" and len(transcript.turns) == 2:
            raise RuntimeError("no reply")
        if transcript.answer[:1] in "aeiou":
            return None
        return [{"role": "user", "content": transcript.answer[: random.Random(transcript.answer).randrange(1, 9)]}]

    def reward(self, transcript: Transcript) -> float:
        assert transcript.end is not None
        return sum(letter.islower() for letter in "".join(transcript.turns)) / max(1, len("".join(transcript.turns)))


class Late(Echo):
    """Takes its time."""

    def reply(self, transcript: Transcript) -> list[dict[str, Any]] | None:
        time.sleep(0.05)
        return super().reply(transcript)
