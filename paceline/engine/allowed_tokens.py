"""Whether the limits of a request leave any token to sample: its allowed ids, bad words, minimum length and grammar. Together
they can forbid every token; that is the request's fault, and not the policy's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.engine.command import Constraint
from paceline.engine.grammar import Grammars
from paceline.engine.request import Request
from paceline.engine.token_masks import why_forbidden
from paceline.types import SamplingParams

BadWords = Sequence[tuple[int, ...]]


def check_first_token(params: SamplingParams, ends: frozenset[int], bad_words: BadWords, vocabulary: int) -> None:
    """Raise ValueError if no token may be sampled at the beginning of an answer, whatever its prompt. `ends`: the token ids that
    end it; `bad_words`: token ids of its bad words."""
    if not params.bad_words and not params.min_tokens:
        return
    allowed = set(params.allowed_token_ids or range(vocabulary))
    if params.min_tokens and ends.issuperset(allowed):
        raise ValueError("min_tokens: every token that is allowed would end the answer, so that none may be sampled")
    left = allowed - {word[0] for word in bad_words if len(word) == 1}
    if not left:
        raise ValueError("bad_words: every token that is allowed is a bad word, so that none may be sampled")
    if params.min_tokens and ends.issuperset(left):
        raise ValueError("bad_words: every token that is allowed is a bad word or would end the answer before min_tokens, so "
                         "that none may be sampled")


def why_none_is_allowed(request: Request, constraint: Constraint, grammars: Grammars) -> str | None:
    """Say in one line why no token may follow those that a request has; None if one may. A grammar is followed from the beginning
    of the answer, which takes as long as generating its masks did."""
    mask, problem = why_forbidden(grammars, constraint, request.output_ids)
    allowed = np.unpackbits(mask, bitorder="little")[: grammars.vocabulary].astype(bool)
    params, position = request.params, len(request.output_ids)
    if params.allowed_token_ids:
        only = np.zeros_like(allowed)
        only[list(params.allowed_token_ids)] = True
        allowed &= only
    if position < params.min_tokens:
        allowed[[token for token in request.stop_ids if 0 <= token < len(allowed)]] = False
    if allowed.any():
        return None
    name = "bad_words" if constraint.grammar is None else "structured_outputs"
    return f"{name}: no token is allowed behind the {position} tokens of the answer{f' ({problem})' if problem else ''}"
