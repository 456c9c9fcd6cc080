"""Scores of given tokens: texts go through the policy once more, piece by piece, beside the KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.engine.command import EndScoring, ScoreTokens, TokenScores
from paceline.engine.runner import Runner
from paceline.kernels import Ops
from paceline.kernels.reference.packed_attention import join_rotated, masked_attention
from paceline.models.attend import Angles, AttentionShape
from paceline.models.decoder import Decoder


class Scorer:
    """Executes `ScoreTokens`. Keys and values of a text are kept between its pieces."""

    def __init__(self, model: Decoder, runner: Runner) -> None:
        self._model, self._runner = model, runner
        self._texts: dict[int, _GrowingAttend] = {}

    @torch.inference_mode()
    def score(self, command: ScoreTokens) -> TokenScores | None:
        """None on other ranks than 0."""
        begin, device, runner = command.begin, self._model.norm.device, self._runner
        ids = torch.tensor(command.tokens, device=device)
        end = begin + len(ids) - 1
        if command.text not in self._texts:
            self._texts[command.text] = _GrowingAttend(runner.ops, command.num_rows)
        attend, positions = self._texts[command.text], torch.arange(begin, end, device=device)
        attend.place(begin, end, (runner.rope(positions), *runner.rope.others_at(positions)))
        hidden = self._model(ids[:-1], attend).final
        if command.first >= end - begin:
            return None
        logits: Tensor | None = self._model.logits(hidden[command.first :], runner.ops)
        return None if logits is None else _scores(logits, ids[1 + command.first :], command.num_top)

    def end(self, command: EndScoring) -> None:
        self._texts.pop(command.text, None)


def _scores(logits: Tensor, following: Tensor, num_top: int) -> TokenScores:
    """Scores of tokens [R], which follow where the logits [R, V] are."""
    logprobs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(dim=1)
    own = logprobs.gather(1, following[:, None])
    top = logprobs.topk(min(num_top, logprobs.shape[1]), dim=1)
    return TokenScores(*(part.cpu().numpy() for part in
                         (own[:, 0], (logprobs > own).sum(dim=1) + 1, top.indices, top.values)))


class _GrowingAttend:
    """Causal attention over one text that comes in pieces."""

    def __init__(self, ops: Ops, num_rows: int) -> None:
        self.ops, self.routing, self._num_rows = ops, None, num_rows
        self._kept: dict[int, Tensor] = {}  # keys and values [2, rows, Hkv, D] of every layer

    def place(self, begin: int, end: int, angles: tuple[Angles, ...]) -> None:
        """The next rows are those from `begin` to `end`; angles are theirs, of each of the model's rotary embeddings."""
        self._begin, self._end, self._angles = begin, end, angles
        self._mask = torch.ones(end - begin, end, dtype=torch.bool, device=angles[0][0].device).tril(begin)

    def __call__(self, layer: AttentionShape, qkv: Tensor) -> Tensor:
        sizes = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        q, k, v = qkv.unflatten(-1, (-1, layer.head_dim)).split(sizes, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self.ops.rms_norm(q, layer.q_norm, layer.eps), self.ops.rms_norm(k, layer.k_norm, layer.eps)
        q, k, v = join_rotated(q, k, v, *self._angles[layer.rope_index]).split(sizes, dim=1)
        kept = self._kept.get(layer.index)
        if kept is None:
            kept = self._kept[layer.index] = k.new_empty(2, self._num_rows, *k.shape[1:])
        kept[0, self._begin : self._end], kept[1, self._begin : self._end] = k, v
        keys, values = kept[:, : self._end].transpose(1, 2)
        return masked_attention(q.transpose(0, 1), keys, values, self._mask, layer.scale, layer.form).transpose(0, 1).flatten(1)
