"""Which tokens a grammar or a list of bad words leaves to a request, at every row of its draft tree.

What may follow is a function of the answer before a row: the committed tokens, and the draft tokens on the path to the row. So
the row of an accepted draft token is masked exactly as the same position is without speculation, and tokens do not depend on
drafts. Masks are computed on the host while the device is at the policy's forward pass, which they are not needed for.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from paceline.engine.command import Constraint, TokenMasks
from paceline.engine.grammar import Grammars

Trees = tuple[np.ndarray, np.ndarray]
"""Tokens and parents [lines, N] of a step's draft trees, as in `HostDrafts`."""
_REPLAYED = 64
"""Number of tokens that a grammar is led through at a time when an answer is looked at again."""
_MAX_PROBLEM = 150
"""Number of characters of an error of the grammar's library that a message repeats."""


class TokenMasker:
    """The answers of all slots that have a constraint, and where they are in their grammars."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._slots: dict[int, _Answer] = {}

    def masks(self, found: TokenMasks, trees: Trees | None) -> tuple[np.ndarray, np.ndarray]:
        """Take note of new tokens, and return the masked rows [K] of a step and their masks [K, ceil(V / 8)] uint8, one bit for
        every token that may follow."""
        rows, masks = [], []
        size = -(-self._grammars.vocabulary // 8)
        for slot, first, num_rows, line, tokens, constraint in zip(*found, strict=True):
            if constraint is not None:
                self._slots[slot] = _Answer(self._grammars, constraint)
            answer, own = self._slots[slot], np.full((num_rows, size), 255, np.uint8)
            answer.extend(tokens)
            children: list[list[tuple[int, int]]] = [[] for _ in range(num_rows)]
            if num_rows > 1:
                assert trees is not None and line >= 0
                draft, parents = (each[line, : num_rows - 1].tolist() for each in trees)
                for node, (token, parent) in enumerate(zip(draft, parents, strict=True), start=1):
                    children[parent + 1].append((node, token))
            answer.fill(0, children, own)
            rows.append(np.arange(first, first + num_rows))
            masks.append(own)
        return np.concatenate(rows), np.concatenate(masks)


def why_forbidden(grammars: Grammars, constraint: Constraint, tokens: list[int]) -> tuple[np.ndarray, str]:
    """Return the mask [ceil(V / 8)] uint8 of the token behind these tokens of an answer, and what the grammar's library says if
    it has met one of its limits."""
    answer, masks = _Answer(grammars, constraint), np.full((1, -(-grammars.vocabulary // 8)), 255, np.uint8)
    starts = [*range(0, len(tokens) - 1, _REPLAYED), len(tokens) - 1, len(tokens)] if tokens else [0]
    for start, end in itertools.pairwise([0, *starts]):  # the library's limits hold from one mask to the next
        answer.extend(tokens[start:end])
        answer.fill(0, [[]], masks)
    return masks[0], answer.problem


class _Answer:
    """One answer: its tokens so far, and its place in its grammar."""

    def __init__(self, grammars: Grammars, constraint: Constraint) -> None:
        self._grammars, self._constraint = grammars, constraint
        self._tokens: list[int] = []
        self._matcher: Any = None if constraint.grammar is None else grammars.matcher(constraint.grammar)

    def extend(self, tokens: list[int]) -> None:
        """Append tokens that were sampled."""
        self._tokens += tokens
        if self._matcher is not None and tokens:
            self._matcher.consume_tokens(tokens)

    @property
    def problem(self) -> str:
        """What the grammar's library has failed with; empty if it has not."""
        return "" if self._matcher is None else " ".join(self._matcher.get_error().split())[:_MAX_PROBLEM]

    def fill(self, row: int, children: list[list[tuple[int, int]]], masks: np.ndarray) -> None:
        """Fill in the masks of a row and of those below it. Rows behind a draft token that may not follow keep all tokens: they
        are never reached."""
        masks[row] = self._grammar_mask(masks.shape[1])
        self._forbid_bad_words(masks[row])
        for child, token in children[row]:
            if token in self._grammars.eos or not masks[row, token >> 3] >> (token & 7) & 1:
                continue
            self._tokens.append(token)
            entered = self._matcher is None or self._matcher.try_consume_tokens([token]) == 1
            if entered:
                self.fill(child, children, masks)
            else:  # a limit of the library, at which the answer would end with an error
                masks[child] = 0
            self._tokens.pop()
            if self._matcher is not None and (self._matcher.is_error() or (entered and not self._matcher.rollback(1))):
                self._begin_again()

    def _grammar_mask(self, size: int) -> np.ndarray:
        found = np.full(size, 255, np.uint8)
        if self._matcher is None:
            return found
        if self._matcher.is_error():
            return np.zeros(size, np.uint8)
        raw = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            return np.zeros(size, np.uint8)
        found[:] = 0
        length = min(size, len(raw))
        found[:length] = raw[:length]
        allows_end = self._matcher.is_accepting()
        for token in self._grammars.eos:
            if allows_end:
                found[token >> 3] |= 1 << (token & 7)
            else:
                found[token >> 3] &= 255 ^ (1 << (token & 7))
        return found

    def _forbid_bad_words(self, mask: np.ndarray) -> None:
        for *before, last in self._constraint.bad_words:
            if not before or self._tokens[-len(before) :] == before:
                mask[last >> 3] &= 255 ^ (1 << (last & 7))

    def _begin_again(self) -> None:
        """Draft tokens led the matcher into an error, which it does not leave."""
        assert self._constraint.grammar is not None
        self._matcher = self._grammars.matcher(self._constraint.grammar)
        if self._tokens:
            self._matcher.consume_tokens(self._tokens)
