"""Log-probabilities of given tokens and of the most likely alternatives to them: `echo`, `prompt_logprobs`, `top_logprobs`.

The engine reports the log-probability of what it samples. For all else the tokens go through the policy once more, in one forward
pass without a KV cache, between two steps of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.engine import Engine
from paceline.models.attend import PackedAttend

_ROWS = 256
"""Number of positions whose logits over the whole vocabulary exist at the same time."""


class TokenScore(NamedTuple):
    """What the policy thinks of one token, in the plain softmax at temperature 1."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]]
    """The most likely tokens and their log-probabilities, most likely first."""


@torch.inference_mode()
def score(engine: Engine, tokens: Sequence[int], start: int, num_top: int) -> list[TokenScore]:
    """Return the scores of the tokens from number `start` (at least 1) on. To be called where the engine does not step
    meanwhile."""
    engine.executor.require_weights()
    runner, ids = engine.executor.runner, torch.tensor(tokens, device=engine.device)
    num_rows = len(tokens) - 1
    if num_rows < start:
        return []
    cos, sin = runner.rope(torch.arange(num_rows, device=engine.device))
    hidden = engine.model(ids[:-1], PackedAttend(runner.ops, cos, sin, (num_rows,))).final[start - 1 :]
    scores: list[TokenScore] = []
    for part, following in zip(hidden.split(_ROWS), ids[start:].split(_ROWS), strict=True):
        logits = engine.model.logits(part, runner.ops)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        logprobs = wide.log_softmax(dim=1)
        own = logprobs.gather(1, following[:, None])
        ranks = (logprobs > own).sum(dim=1) + 1
        top = logprobs.topk(min(num_top, logprobs.shape[1]), dim=1)
        scores += [TokenScore(value, rank, list(zip(which, values, strict=True))) for value, rank, which, values
                   in zip(own[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)]
    return scores
