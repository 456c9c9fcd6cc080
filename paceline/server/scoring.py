"""Log-probabilities of given tokens and of the most likely alternatives to them: `echo`, `prompt_logprobs`, `top_logprobs`.

The engine reports the log-probability of what it samples. For all else the tokens go through the policy once more, piece by piece
between the engine's steps, so that a long text holds nobody up."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import NamedTuple

from paceline.engine import Engine
from paceline.engine.command import EndScoring, ScoreTokens
from paceline.engine.thread import EngineThread, Unavailable
from paceline.server.errors import GenerationFailed

_ROWS = 256
"""Number of tokens that are processed between two steps of the engine."""
_TEXTS = count()


class TokenScore(NamedTuple):
    """What the policy thinks of one token, in the plain softmax at temperature 1."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]]
    """The most likely tokens and their log-probabilities, most likely first."""


async def score(thread: EngineThread, tokens: Sequence[int], start: int, num_top: int) -> list[TokenScore]:
    """Return the scores of the tokens from number `start` (at least 1) on."""
    scoring = _Scoring(tokens, start, num_top)
    try:
        while not await thread.call(scoring.advance):
            pass
    except RuntimeError as error:  # most likely there is not enough memory
        raise GenerationFailed(f"scoring {len(tokens)} tokens failed: {error}") from None
    finally:
        with suppress(Exception):  # an engine that has ended keeps nothing
            await thread.call(scoring.end)
    return scoring.scores


class _Scoring:
    """The scores of one text, as far as they are known."""

    def __init__(self, tokens: Sequence[int], start: int, num_top: int) -> None:
        self._tokens, self._start, self._num_top = tokens, start, num_top
        self._text, self._version, self._done = next(_TEXTS), -1, 0
        self.scores: list[TokenScore] = []

    def advance(self, engine: Engine) -> bool:
        """Process the next piece. Returns whether it was the last one."""
        if engine.executor.is_asleep:
            raise Unavailable("the engine is asleep")
        if engine.version != self._version:  # new weights: all is computed with the same ones
            self.end(engine)
            self._version, self._done, self.scores = engine.version, 0, []
        num_rows = len(self._tokens) - 1
        if num_rows < self._start:
            return True
        begin, end = self._done, min(num_rows, self._done + _ROWS)
        piece = list(self._tokens[begin : end + 1])
        found = engine.executor.execute(
            ScoreTokens(self._text, piece, begin, num_rows, max(0, self._start - 1 - begin), self._num_top))
        if found is not None:
            self.scores += [TokenScore(value, rank, list(zip(which, values, strict=True))) for value, rank, which, values
                            in zip(*(part.tolist() for part in found), strict=True)]
        self._done = end
        return end == num_rows

    def end(self, engine: Engine) -> None:
        """Free what the engine keeps of the text."""
        engine.executor.execute(EndScoring(self._text))
