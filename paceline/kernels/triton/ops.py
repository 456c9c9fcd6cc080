"""The CUDA family: Triton kernels for bfloat16, float16 and float32; everything else falls through to torch.

Nothing here reads the device, and every grid follows from shapes alone, so all of it can be captured in a CUDA graph
(prompt chunks excepted: their lengths are the host's). Import this module only where Triton is installed: `ops_for` does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from paceline.kernels.base import (
    Beam,
    Candidates,
    DecodeRows,
    DraftRows,
    DraftTree,
    Drawn,
    Lines,
    Normed,
    PagedCache,
    SamplingTensors,
    Segments,
    SlotTensors,
)
from paceline.kernels.reference.draft_rank import Ranked, draft_topk
from paceline.kernels.reference.ops import TorchOps
from paceline.kernels.triton import (
    attention as triton_attention,
)
from paceline.kernels.triton import (
    attention_fixed as triton_attention_fixed,
)
from paceline.kernels.triton import (
    beam as triton_beam,
)
from paceline.kernels.triton import (
    draft as triton_draft,
)
from paceline.kernels.triton import (
    fused as triton_fused,
)
from paceline.kernels.triton import (
    linear as triton_linear,
)
from paceline.kernels.triton import (
    move as triton_move,
)
from paceline.kernels.triton import (
    noise as triton_noise,
)
from paceline.kernels.triton import (
    norm as triton_norm,
)
from paceline.kernels.triton import (
    pdl as triton_pdl,
)
from paceline.kernels.triton import (
    plan as triton_plan,
)
from paceline.kernels.triton import (
    sample as triton_sample,
)
from paceline.kernels.triton import (
    tree as triton_tree,
)
from paceline.kernels.triton.move import Movables
from paceline.kernels.triton.plan import Plan, Prefill

_OURS = (torch.bfloat16, torch.float16, torch.float32)
_NARROW = 2048
"""Streams up to so wide spend more of a step between products: fusing pays for twice as many rows."""


class TritonOps(TorchOps):
    """See `base.Ops`. Falls back to torch where a gradient is asked for or a dtype is not ours. One object per stream: it
    owns the counters by which programs of one product find out who is last."""

    name = "triton"

    def __init__(self, device: torch.device | str = "cuda", deterministic: bool = False, max_context: int = 32768,
                 pdl: bool = True, fused: bool = True, ahead: int = 2 << 20,
                 min_chunk: int = triton_plan.MIN_CHUNK, fused_rows: int = 32) -> None:
        """max_context: the longest context of any request; in deterministic mode it fixes the order of sums.
        Up to `fused_rows` rows, where launches and what lies between them are a good part of a step:
        pdl: kernels start before the one in front has ended, and products fetch `ahead` bytes of weight meanwhile;
        fused: products take along the norm, activation or rotation beside them.
        min_chunk: keys of the smallest split of a context."""
        self.deterministic, self.min_chunk = deterministic, min_chunk
        self.pdl = pdl and not deterministic and triton_pdl.supported(device)
        self.fused, self.fused_rows, self._ahead = fused and not deterministic, fused_rows, ahead if self.pdl else 0
        self._chunk = triton_plan.fixed_chunk(max_context)
        self._max_chunks = triton.cdiv(max_context + triton_plan.MASK_BITS, self._chunk)
        self._counters = torch.zeros(triton_linear.MAX_TILES, dtype=torch.int32, device=device)

    def _overlaps(self, rows: Tensor) -> bool:
        return self.pdl and rows.shape[0] <= 2 * self.fused_rows

    # -- matrix products

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not _ours(x, weight) or x.dim() != 2:
            assert not self.deterministic or _needs_grad(x, weight) or x.dtype == torch.float64, (x.shape, x.dtype)
            return F.linear(x, weight, bias)
        if self.deterministic:
            return triton_linear.fixed_linear(x, weight, bias, self._counters)
        config = triton_linear.config_of("linear", x, weight)
        if config is None:
            return F.linear(x, weight, bias)
        return triton_linear.linear(x, weight, bias, config, self._counters, pdl=self._overlaps(x), ahead=self._ahead)

    # -- between the products

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return triton_norm.rms_norm(x, weight, eps, self._overlaps(x)) if _ours(x, weight) else super().rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if _ours(x, residual, weight):
            return triton_norm.add_rms_norm(x, residual, weight, eps, self._overlaps(x))
        return super().add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return triton_norm.silu_mul(gate_up, self._overlaps(gate_up)) if _ours(gate_up) else super().silu_mul(gate_up)

    def rope_write(self, qkv: Tensor, num_heads: int, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
                   cos: Tensor, sin: Tensor, write: Tensor, cache: PagedCache) -> Tensor:
        if not _ours(qkv, cache.k) or cos.dtype != torch.float32:
            return super().rope_write(qkv, num_heads, q_norm, k_norm, eps, cos, sin, write, cache)
        return triton_norm.rope_write(qkv, num_heads, q_norm, k_norm, eps, cos, sin, write, cache, self._overlaps(qkv))

    # -- products with what stands beside them

    def fuses(self, num_rows: int, hidden: int, head_dim: int) -> bool:
        most = self.fused_rows if hidden > _NARROW else 2 * self.fused_rows
        return self.fused and 0 < num_rows <= most and head_dim >= 32 and head_dim & (head_dim - 1) == 0

    def linear_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor,
                    eps: float) -> tuple[Normed, Tensor]:
        if not self.fused or not _ours(x, weight, norm):
            return super().linear_norm(x, weight, bias, residual, norm, eps)
        config = triton_linear.fused_config("linear_norm", x, weight)
        return triton_fused.linear_norm(x, weight, bias, residual, norm, eps, config, self._counters, self.pdl, self._ahead)

    def gated_linear(self, x: Normed, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.fused or not _ours(x.rows, weight):
            return super().gated_linear(x, weight, bias)
        config = triton_linear.fused_config("gated", x.rows, weight)
        return triton_fused.gated(x, weight, bias, config, self._counters, self.pdl, self._ahead)

    def qkv_rope(self, x: Normed, weight: Tensor, bias: Tensor | None, num_heads: int, cos: Tensor, sin: Tensor, write: Tensor,
                 cache: PagedCache) -> Tensor:
        dim, (rows, hidden) = cache.k.shape[2], x.rows.shape
        if not self.fuses(rows, hidden, dim) or not _ours(x.rows, weight, cache.k) or cos.dtype != torch.float32:
            return super().qkv_rope(x, weight, bias, num_heads, cos, sin, write, cache)
        config = triton_linear.fused_config("qkv", x.rows, weight, dim // 2)
        return triton_fused.qkv_rope(x, weight, bias, num_heads, cos, sin, write, cache, config, self._counters, self.pdl,
                                     self._ahead)

    # -- attention

    def plan(self, segments: Segments, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int,
             prefill: Prefill | None = None, trees: bool = True) -> Plan:
        """What `attention` reads in every layer of a step: make it once, inside the graph. prefill: the segments behind
        `prefill.first_row` are prompt chunks (see `triton_plan.prefill_chunks`); never captured."""
        if self.deterministic:
            return triton_plan.make_plan(segments, num_rows, num_heads, num_kv_heads, triton_attention_fixed.BLOCK_M,
                                         self._max_chunks, self._chunk)
        rows = num_rows if prefill is None else prefill.first_row
        splits = triton_plan.default_splits(max(rows, 1), num_kv_heads)
        plan = triton_plan.make_plan(segments, rows, num_heads, num_kv_heads, triton_plan.tile_size(rows, trees), splits,
                                     min_chunk=self.min_chunk)
        return plan._replace(prefill=prefill, launch=triton_plan.launch_for(rows, num_kv_heads, head_dim, trees))

    def plan_step(self, segments: Segments, num_rows: int, num_heads: int, cache: PagedCache,
                  chunks: list[tuple[int, int, int]], trees: bool = False) -> Plan | None:
        if cache.k.dtype not in _OURS:
            return None
        first = num_rows - sum(count for _, _, count in chunks)
        prefill = triton_plan.prefill_chunks(first, chunks, cache) if chunks else None
        return self.plan(segments, num_rows, num_heads, cache.k.shape[1], cache.k.shape[2], prefill, trees)

    def attention(self, q: Tensor, cache: PagedCache, segments: Segments, scale: float, plan: Plan | None = None) -> Tensor:
        if not _ours(q, cache.k):
            return super().attention(q, cache, segments, scale)
        if plan is None:
            plan = self.plan(segments, q.shape[0], q.shape[1], cache.k.shape[1], cache.k.shape[2])
        if plan.chunk:
            return triton_attention_fixed.attention(q, cache, segments, plan, scale)
        if plan.prefill is None:
            return triton_attention.attention(q, cache, segments, plan, scale, pdl=self._overlaps(q))
        first = plan.prefill.first_row
        prompts = self.prefill_attention(q[first:], cache, plan.prefill, scale)
        if first == 0:
            return prompts
        return torch.cat([triton_attention.attention(q[:first], cache, segments, plan, scale), prompts])

    def prefill_attention(self, q: Tensor, cache: PagedCache, prefill: Prefill, scale: float) -> Tensor:
        """q: the rows of the prompt chunks only."""
        return triton_attention.prefill_attention(q, cache, prefill, scale)

    # -- rows

    def flatten(self, tokens: Tensor, parents: Tensor, depths: Tensor, draft: Tensor, tree: DraftTree, max_depth: int) -> None:
        triton_tree.flatten(tokens, parents, depths, draft, tree, max_depth)

    def build_rows(self, slots: Tensor, tree: DraftTree, of: SlotTensors) -> DecodeRows:
        return triton_tree.build_rows(slots, tree, of)

    def advance(self, slots: Tensor, tree: DraftTree, of: SlotTensors, sampled: Tensor, logprobs: Tensor, raw: Tensor | None,
                max_depth: int) -> Drawn:
        return triton_tree.advance(slots, tree, of, sampled, logprobs, raw, max_depth)

    # -- sampling and drafting

    def sample(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        return triton_sample.sample(logits, params) if _ours(logits) else super().sample(logits, params)

    def gumbel(self, seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
        return triton_noise.gumbel(seed, position, token_ids)

    def draft_topk(self, logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, tau: float | Tensor, k: int,
                   token_ids: Tensor | None = None) -> Ranked:
        rank = triton_draft.draft_topk if _ours(logits) and k <= triton_draft.MAX_K else draft_topk
        return rank(logits, seed, position, temperature, tau, k, token_ids)

    def follow_rows(self, lines: Lines, stored: Tensor, cache: PagedCache, request: Tensor, back: Tensor, counts: Tensor,
                    least: int, spare: int) -> DraftRows:
        return triton_beam.follow_rows(lines, stored, cache, request, back, counts, least, spare)

    def collect(self, ranked: Ranked, scores: Tensor, origin: Tensor, ids: Tensor | None, into: Candidates, first: int) -> None:
        triton_beam.collect(ranked, scores, origin, ids, into, first)

    def grow(self, found: Candidates, first: int, bits: Tensor, lines: Lines, cache: PagedCache, depth: int, width: int) -> Beam:
        return triton_beam.grow(found, first, bits, lines, cache, depth, width)

    def choose(self, found: Candidates, width: int, budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return triton_beam.choose(found, width, budget)

    # -- moving

    def movable(self, tensors: list[Tensor]) -> Movables:
        return triton_move.movables(tensors)

    def move_tokens(self, what: Movables, source: Tensor, target: Tensor) -> None:
        triton_move.move_tokens(what, source, target)


def _ours(*tensors: Tensor) -> bool:
    return all(tensor.dtype in _OURS for tensor in tensors) and not _needs_grad(*tensors)


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
