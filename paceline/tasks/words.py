"""A word-guessing game: the environment shows which letters of the last guess are in their right places."""

from __future__ import annotations

import random

from pydantic import Field, model_validator

from paceline.config import Config
from paceline.tasks.base import Problem
from paceline.tasks.environment import Message, Transcript, opening

_WORDS = ("apple baker candy dance eagle flame grape house ivory jolly knife lemon mango night ocean piano queen river sugar "
          "table uncle violet water yacht zebra bread chair dream earth fruit green heart image juice kitten light money north "
          "olive paper quiet round stone tiger under voice wheat young")
_HIDDEN = "?"


class WordsConfig(Config):
    alphabet: str | None = Field(None, min_length=2)
    """Words are random strings of these letters. None: they are from a short list of English words."""
    length: int = Field(5, ge=1, le=64)
    """Number of letters of a word."""
    guesses: int = Field(6, ge=1)
    """Number of guesses."""
    size: int = Field(1000, ge=1)
    """Number of problems, if words are random."""
    instructions: bool = True
    """Whether the game is explained. False: the opening shows hidden letters only, for policies that know no language."""
    partial: float = Field(0.5, ge=0, le=1)
    """Part of the reward that letters in their right places earn without the word being guessed."""
    seed: int = 0

    @model_validator(mode="after")
    def _has_words(self) -> WordsConfig:
        if self.alphabet is None and not _english(self.length):
            raise ValueError(f"length: the list has no words of {self.length} letters; give an alphabet")
        if self.alphabet is not None and (_HIDDEN in self.alphabet or any(letter.isspace() for letter in self.alphabet)):
            raise ValueError(f"alphabet: {self.alphabet!r} has white space or {_HIDDEN}, which stands for a hidden letter")
        return self


def _english(length: int) -> list[str]:
    return [word for word in _WORDS.split() if len(word) == length]


class Words:
    """Guess a word. After each guess the letters in their right places are shown, and `?` for the others; those that were shown
    before stay. The reward is 1 for the word; otherwise the share of its letters that were found, times `partial`."""

    name = "words"

    def __init__(self, config: WordsConfig) -> None:
        self.config = config
        self._words = [] if config.alphabet is not None else _english(config.length)

    def __len__(self) -> int:
        return len(self._words) or self.config.size

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(index)
        config = self.config
        if config.alphabet is None:
            word = self._words[index]
        else:
            word = "".join(random.Random(f"{config.seed}/{index}").choices(config.alphabet, k=config.length))
        hidden = _HIDDEN * config.length
        asked = hidden if not config.instructions else (
            f"Guess a word of {config.length} letters. You have {config.guesses} guesses; after each I show the letters that are "
            f"in their right places. Answer with the word only. {hidden}")
        return Problem(f"words-{index}", [{"role": "user", "content": asked}], word)

    def reset(self, problem: Problem) -> list[Message]:
        return opening(problem)

    def reply(self, transcript: Transcript) -> list[Message] | None:
        turns, word = transcript.turns, transcript.problem.truth
        if len(turns) >= self.config.guesses or _guess(turns[-1], word) == word:
            return None
        return [{"role": "user", "content": _shown(turns, word)}]

    def reward(self, transcript: Transcript) -> float:
        word = transcript.problem.truth
        guesses = [_guess(turn, word) for turn in transcript.turns[: self.config.guesses]]
        if word in guesses:
            return 1.0
        found = sum(letter != _HIDDEN for letter in _shown(transcript.turns[: self.config.guesses], word))
        return self.config.partial * found / len(word)


def _guess(turn: str, word: str) -> str:
    """The guess in a turn; one of another length is none."""
    guess = turn.strip().lower()
    return guess if len(guess) == len(word) else ""


def _shown(turns: list[str], word: str) -> str:
    """The letters that some guess had in their right places."""
    guesses = [_guess(turn, word) for turn in turns]
    return "".join(letter if any(guess[i : i + 1] == letter for guess in guesses) else _HIDDEN for i, letter in enumerate(word))
