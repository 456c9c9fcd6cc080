"""The reference backend: plain torch on any device and dtype, slow and readable. The faster backends are tested against it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.noise import gumbel, gumbel_all
from paceline.kernels.records import (
    PLAIN_ATTENTION,
    Activation,
    AttentionForm,
    Beam,
    Candidates,
    DecodeRows,
    DecoderWeights,
    DraftLayer,
    DraftRequests,
    DraftRows,
    DraftTensors,
    DraftTree,
    ExpertWeights,
    Normed,
    PagedCache,
    RankedTokens,
    SampledTokens,
    SamplingTensors,
    Segments,
    SlotTensors,
    StepInputs,
    StepTensors,
    TreeTensors,
    cache_index,
)
from paceline.kernels.reference import drafting
from paceline.kernels.reference import experts as expert_ops
from paceline.kernels.reference import tree as tree_ops


class TorchOps:
    """The reference implementation of `base.Ops`. linear, rms_norm, add_rms_norm and silu_mul are differentiable."""

    name = "torch"

    def prepare(self, weights: list[Tensor]) -> None:
        pass

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def linear_shares(self, x: Tensor, weight: Tensor, shares: int) -> Tensor:
        depth = weight.shape[1]
        ends = [depth * i // shares for i in range(shares + 1)]
        parts = [at_least_float32(self.linear(x[:, a:b].contiguous(), weight[:, a:b].contiguous()))
                 for a, b in pairwise(ends)]
        return add_in_tree(parts)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _normalise(at_least_float32(x), weight, eps).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = at_least_float32(gate_up).chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        if activation == "silu":
            return self.silu_mul(gate_up)
        gate, up = at_least_float32(gate_up).chunk(2, dim=-1)
        return expert_ops.activate(gate, up, activation).to(gate_up.dtype)

    def route(self, logits: Tensor, num_active: int, normalised: bool, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return expert_ops.route(at_least_float32(logits), num_active, normalised, given)

    def experts(self, x: Tensor, weights: ExpertWeights, shares: Tensor, chosen: Tensor) -> Tensor:
        return expert_ops.experts(self, x, weights, shares, chosen)

    def rope_write(self, qkv: Tensor, num_heads: int, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
                   cos: Tensor, sin: Tensor, write: Tensor, cache: PagedCache) -> Tensor:
        _, num_kv_heads, head_dim = cache.k.shape
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        q, k = at_least_float32(q), at_least_float32(k)
        if q_norm is not None:
            q = _normalise(q, q_norm, eps)
        if k_norm is not None:
            k = _normalise(k, k_norm, eps)
        cache.k[write] = apply_rope(k, cos, sin).to(cache.k.dtype)
        cache.v[write] = v.to(cache.v.dtype)
        return apply_rope(q, cos, sin).to(qkv.dtype)

    def should_fuse(self, num_rows: int, hidden: int, head_dim: int) -> bool:
        return False

    def linear_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor,
                    eps: float) -> tuple[Normed, Tensor]:
        rows, total = self.add_rms_norm(self.linear(x, weight, bias), residual, norm, eps)
        return Normed(rows), total

    def gated_linear(self, x: Normed, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.silu_mul(self.linear(x.complete(), weight, bias))

    def qkv_rope(self, x: Normed, weight: Tensor, bias: Tensor | None, num_heads: int, cos: Tensor, sin: Tensor, write: Tensor,
                 cache: PagedCache) -> Tensor:
        return self.rope_write(self.linear(x.complete(), weight, bias), num_heads, None, None, 0.0, cos, sin, write, cache)

    def decode(self, weights: DecoderWeights, tokens: Tensor, positions: Tensor | None, cos: Tensor, sin: Tensor, write: Tensor,
               segments: Segments, caches: list[PagedCache], capture: tuple[int, ...]) -> tuple[Tensor, Tensor | None] | None:
        return None

    def serves_whole_steps(self, of: StepTensors, num_rows: int) -> bool:
        return False

    def whole_step(self, of: StepTensors, inputs: StepInputs, trees: TreeTensors | None, max_depth: int) -> SampledTokens:
        raise AssertionError("serves_whole_steps says that these operations run steps one operation at a time")

    def plan_step(self, segments: Segments, num_rows: int, num_heads: int, cache: PagedCache,
                  chunks: list[tuple[int, int, int]], trees: bool = False, forced: bool = False) -> Any:
        return None

    def attention(self, q: Tensor, cache: PagedCache, segments: Segments, scale: float, plan: Any = None,
                  form: AttentionForm = PLAIN_ATTENTION) -> Tensor:
        out = torch.zeros_like(q)
        rows, lengths = segments.row.tolist(), segments.length.tolist()
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if length > 0:
                out[row : row + length] = attend_segment(q[row : row + length], cache, segments, i, scale, form)
        return out

    def flatten_drafts(self, tokens: Tensor, parents: Tensor, depths: Tensor, draft: Tensor, tree: DraftTree,
                       max_depth: int) -> None:
        tree_ops.flatten_drafts(tokens, parents, depths, draft, tree, max_depth)

    def build_rows(self, slots: Tensor, tree: DraftTree, of: SlotTensors) -> DecodeRows:
        return tree_ops.build_rows(slots, tree, of)

    def verify(self, slots: Tensor, tree: DraftTree, of: SlotTensors, sampled: Tensor, logprobs: Tensor, raw: Tensor | None,
               max_depth: int) -> SampledTokens:
        return tree_ops.verify(slots, tree, of, sampled, logprobs, raw, max_depth)

    def movable(self, tensors: list[Tensor]) -> Any:
        return tensors

    def move_tokens(self, what: Any, source: Tensor, target: Tensor) -> None:
        if source.device.type == "cpu":  # comparing costs no synchronisation here, and usually nothing moves
            moved = source != target
            if not bool(moved.any()):
                return
            source, target = source[moved], target[moved]
        for tensor in what:
            tensor[target] = tensor[source]

    def sample(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        logits = at_least_float32(logits)
        greedy = params.temperature == 0
        scaled = logits / torch.where(greedy, 1.0, params.temperature).to(logits.dtype)[:, None]
        kept = torch.where(scaled >= thresholds(scaled, params)[:, None], scaled, -torch.inf)  # [R, V]
        noise = torch.where(greedy[:, None], 0.0, gumbel_all(params.seed, params.position, logits.shape[1]))
        token = (kept + noise).argmax(dim=-1)  # argmax takes the lowest index of a tie
        logprob = scaled.gather(1, token[:, None])[:, 0] - kept.logsumexp(dim=-1)
        logprob = torch.where(greedy, 0.0, logprob)
        bad = ~scaled.amax(dim=-1).isfinite()  # amax is NaN where any logit is
        return torch.where(bad, -1, token), torch.where(bad, torch.nan, logprob)

    def logprobs_of(self, logits: Tensor, tokens: Tensor, params: SamplingTensors) -> Tensor:
        logits = at_least_float32(logits)
        greedy = params.temperature == 0
        scaled = logits / torch.where(greedy, 1.0, params.temperature).to(logits.dtype)[:, None]
        is_kept = (scaled >= thresholds(scaled, params)[:, None]).scatter(1, tokens[:, None], True)
        logprob = scaled.gather(1, tokens[:, None])[:, 0] - scaled.masked_fill(~is_kept, -torch.inf).logsumexp(dim=-1)
        return torch.where(scaled.amax(dim=-1).isfinite(), torch.where(greedy, 0.0, logprob), torch.nan)

    def draft_topk(self, logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, tau: float | Tensor, k: int,
                   token_ids: Tensor | None = None) -> RankedTokens:
        ids = torch.arange(logits.shape[1], device=logits.device) if token_ids is None else token_ids
        return drafting.rank_tokens(logits, self.gumbel(seed, position, ids), temperature, tau, k)

    def catch_up_rows(self, requests: DraftRequests, stored: Tensor, cache: PagedCache, request: Tensor, back: Tensor,
                      counts: Tensor, least: int, spare: int) -> DraftRows:
        return drafting.catch_up_rows(requests, stored, cache, request, back, counts, least, spare)

    def draft_layer(self, layer: DraftLayer, rows: DraftRows, state: Tensor, above: Tensor | None,
                    cache: PagedCache) -> Tensor | None:
        return None

    def recent_pages(self, requests: DraftRequests, cache: PagedCache, window: int, into: Tensor) -> tuple[Tensor, Tensor]:
        return drafting.recent_pages(requests, cache, window, into)

    def draft_trees(self, of: DraftTensors, slots: Tensor, max_missing: int, depth: int, width: int,
                    budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        return None

    def add_candidates(self, ranked: RankedTokens, scores: Tensor, origin: Tensor, ids: Tensor | None, into: Candidates,
                       first: int) -> None:
        drafting.add_candidates(ranked, scores, origin, ids, into, first)

    def select_beam(self, found: Candidates, first: int, bits: Tensor, requests: DraftRequests, cache: PagedCache, depth: int,
                    width: int) -> Beam:
        return drafting.select_beam(found, first, bits, requests, cache, depth, width)

    def select_nodes(self, found: Candidates, width: int, budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return drafting.select_nodes(found, width, budget)

    def gumbel(self, seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
        return gumbel(seed, position, token_ids)


def add_in_tree(parts: list[Tensor]) -> Tensor:
    """The sum of a power of two of tensors as a binary tree."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[0::2], parts[1::2], strict=True)]
    return parts[0]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to pairs (i, i + D/2), as transformers does for Llama. x [R, H, D]; cos, sin [R, D/2]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attend_segment(q: Tensor, cache: PagedCache, segments: Segments, i: int, scale: float,
                   form: AttentionForm = PLAIN_ATTENTION) -> Tensor:
    """Attention of the rows q [n, H, D] of segment i to the committed tokens of its request and to each other."""
    length, num_heads, head_dim = q.shape
    num_kv_heads = cache.k.shape[1]
    index, visible = segment_cache_index(cache, segments, i), visibility(segments, i)  # [L], [n, L]
    if form.window:
        visible = within_window(visible, form.window)
    k, v = at_least_float32(cache.k[index]), at_least_float32(cache.v[index])  # [L, Hkv, D]
    # The query heads of one group share a key/value head: [n, Hkv, G, D]
    grouped = at_least_float32(q).view(length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("nhgd,lhd->hgnl", grouped, k) * scale
    if form.soft_cap:
        scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
    sinks = None if form.sinks is None else form.sinks.view(num_kv_heads, -1)[..., None, None]
    weights = softmax_with_sinks(scores.masked_fill(~visible, -torch.inf), sinks)
    return torch.einsum("hgnl,lhd->nhgd", weights, v).reshape(length, num_heads, head_dim).to(q.dtype)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of scores [..., n, L], in which a logit [..., 1, 1] without a key takes part."""
    if sinks is None:
        return scores.softmax(dim=-1)
    sink = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]


def within_window(visible: Tensor, window: int) -> Tensor:
    """The visible keys [n, L] of each row that are among its last `window` ones. Keys are in the order of their positions along
    every path of a tree, so counting them from the end counts positions."""
    behind = visible.flip(-1).cumsum(dim=-1).flip(-1)  # visible keys from here on
    return visible & (behind <= window)


def segment_cache_index(cache: PagedCache, segments: Segments, i: int) -> Tensor:
    """Cache indices of all keys that segment i can attend to, in logical order: [context + span] int64."""
    positions = torch.arange(int(segments.context[i]) + span(segments, i), device=cache.k.device)
    return cache_index(cache, int(segments.slot[i]), positions)


def visibility(segments: Segments, i: int) -> Tensor:
    """Attention mask of segment i, True where a row attends to a key: [length, context + span] bool."""
    row, length, context = int(segments.row[i]), int(segments.length[i]), int(segments.context[i])
    device = segments.mask.device
    inside = torch.arange(span(segments, i), device=device)
    if bool(segments.causal[i]):
        within = inside[None, :] <= inside[:, None]
    else:
        words = segments.mask[row : row + length][:, inside // 64]  # [length, span]
        within = ((words >> (inside % 64)) & 1).bool()
    return torch.cat((torch.ones(length, context, dtype=torch.bool, device=device), within), dim=1)


def span(segments: Segments, i: int) -> int:
    """Number of positions behind the context that segment i can attend to: its rows, or up to the highest bit of their masks."""
    row, length = int(segments.row[i]), int(segments.length[i])
    if bool(segments.causal[i]):
        return length
    words = segments.mask[row : row + length].tolist()
    return max((low & (2**64 - 1) | (high & (2**64 - 1)) << 64).bit_length() for low, high in words)


def thresholds(scaled: Tensor, params: SamplingTensors) -> Tensor:
    """Filter threshold of every row [R]: exactly the scaled logits >= threshold remain after top-k, then top-p, then min-p."""
    vocab = scaled.shape[1]
    bound = scaled.new_full((scaled.shape[0],), -torch.inf)
    on = params.temperature > 0
    top_k = on & (params.top_k > 0) & (params.top_k < vocab)
    top_p = on & (params.top_p < 1)
    rows = (top_k | top_p).nonzero()[:, 0]
    if len(rows):
        ordered = scaled[rows].sort(dim=-1, descending=True).values
        k = torch.where(top_k[rows], params.top_k[rows].long(), vocab)
        kth = ordered.gather(1, k[:, None] - 1)  # [n, 1]
        # Probabilities are summed in float64: in float32 the rounding errors of a large vocabulary would exceed top_p.
        mass = ordered.double().masked_fill(ordered < kth, -torch.inf).softmax(dim=-1).cumsum(dim=-1)
        num_kept = ((mass < params.top_p[rows, None].double()).sum(dim=-1, keepdim=True) + 1).clamp(max=vocab)
        last = ordered.gather(1, num_kept - 1)
        bound[rows] = torch.where(top_p[rows, None], torch.maximum(last, kth), kth)[:, 0]
    rows = (on & (params.min_p > 0)).nonzero()[:, 0]
    if len(rows):
        floor = scaled[rows].amax(dim=-1) + params.min_p[rows].double().log().to(scaled.dtype)
        bound[rows] = torch.maximum(bound[rows], floor)
    return bound


def at_least_float32(x: Tensor) -> Tensor:
    """x itself in float32 or float64, otherwise converted to float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.to(x.dtype)
