"""Environments that misbehave. A module of its own, so that worker processes can import it."""

from __future__ import annotations

import os
import random
import signal
import string
import time
from pathlib import Path
from typing import Any

from paceline.tasks import Concurrent, Problem, Transcript
from paceline.tasks.sessions import SessionEnvironment


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
            case "unpicklable":
                return [{"role": "user", "content": "", "call": lambda: None}]
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


class ManyTalkers(Talker, Concurrent):
    """Talks with many at the same time."""

    concurrency = 32

    def reply(self, transcript: Transcript) -> Any:
        if transcript.answer == "pid":
            return [{"role": "user", "content": str(os.getpid())}]
        if transcript.answer.startswith("wait "):
            time.sleep(float(transcript.answer[5:]))
        return super().reply(transcript)


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


class Held(Echo, Concurrent):
    """Does not answer one problem's turns before there is a file."""

    def __init__(self, problem: str, file: str) -> None:
        self.problem, self.file = problem, file

    def reply(self, transcript: Transcript) -> list[dict[str, Any]] | None:
        while transcript.problem.id == self.problem and not Path(self.file).exists():
            time.sleep(0.01)
        return super().reply(transcript)


class CountingSession:
    """Adds up the numbers that it is told, until it is told something else."""

    def __init__(self, start: int) -> None:
        Counting.num_opened += 1
        self.sum, self.rewards = start, list[float]()

    def start(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"begin at {self.sum}"}]

    def advance(self, turn: dict[str, Any]) -> list[dict[str, Any]] | None:
        self.rewards.append(float(turn["content"]) if turn["content"].isdigit() else 0.0)
        self.sum += int(self.rewards[-1])
        return [{"role": "user", "content": str(self.sum)}] if turn["content"].isdigit() else None

    def finish(self) -> list[float]:
        return self.rewards

    def close(self) -> None:
        Counting.num_closed += 1


class Counting(SessionEnvironment):
    """An environment that holds a state."""

    name = "counting"
    num_opened = num_closed = 0

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Problem:
        return Problem(f"counting-{index}", "", index)

    def open(self, problem: Problem) -> CountingSession:
        return CountingSession(problem.truth)


class CountingTogether(Counting, Concurrent):
    """Takes its time, and others' turns meanwhile."""

    concurrency = 16

    def reply(self, transcript: Transcript) -> list[dict[str, Any]] | None:
        time.sleep(0.02)
        return super().reply(transcript)


class Forgetful(Counting):
    """Begins somewhere else each time."""

    def open(self, problem: Problem) -> CountingSession:
        return CountingSession(random.randrange(10**9))


class Mortal(Echo):
    """Fails before its second reply to one problem: once, if there is a file to remember it by, otherwise always."""

    def __init__(self, problem: str, how: str, file: str) -> None:
        self.problem, self.how, self.file = problem, how, file

    def reply(self, transcript: Transcript) -> list[dict[str, Any]] | None:
        if transcript.problem.id == self.problem and len(transcript.turns) == 2 and not (self.file and Path(self.file).exists()):
            if self.file:
                Path(self.file).touch()
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hang":
                time.sleep(1000)
            if self.how == "raise":
                raise RuntimeError("broken")
        return super().reply(transcript)
