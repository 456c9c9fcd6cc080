"""The CUDA backend: Triton kernels for bfloat16, float16 and float32; everything else falls back to torch.

Nothing here synchronises with the device and every grid depends on shapes only, so all of it can be captured in a CUDA graph,
except for prompt chunks, whose lengths are known on the host. Import this module only where Triton is installed, as `ops_for`
does.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.records import (
    PLAIN_ATTENTION,
    AttentionForm,
    Beam,
    Candidates,
    DecodeRows,
    DraftLayer,
    DraftRequests,
    DraftRows,
    DraftTree,
    ExpertWeights,
    Normed,
    PagedCache,
    RankedTokens,
    SampledTokens,
    SamplingTensors,
    Segments,
    SlotTensors,
)
from paceline.kernels.reference.drafting import draft_topk
from paceline.kernels.reference.ops import TorchOps, add_in_tree
from paceline.kernels.triton import (
    drafting,
    elementwise,
    exact,
    experts,
    fixed_attention,
    fused_linear,
    linear,
    noise,
    sampling,
)
from paceline.kernels.triton import tree as tree_kernels
from paceline.kernels.triton.fixed_plan import FixedPlan
from paceline.kernels.triton.linear import TileConfig
from paceline.kernels.triton.pdl import supports_pdl
from paceline.kernels.triton.tree import Movables

logger = logging.getLogger(__name__)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LIBRARY_ROWS = 72
"""Fewest rows with which the library multiplies shares of K."""
_AHEAD_BYTES = 2 << 20
"""Bytes of the weight that a product prefetches under programmatic dependent launch."""
_NARROW = 2048
"""Up to this hidden size, fusing pays for twice as many rows, because products take a smaller part of a step."""


class TritonOps(TorchOps):
    """`base.Ops` with Triton kernels. Falls back to torch if gradients are needed or the dtype is not supported. CUDA streams
    must not share an object, because it owns the counters by which the programs of a split-K product find out which one finishes
    last."""

    name = "triton"

    def __init__(self, device: torch.device | str = "cuda", max_context: int = 32768, fused_rows: int = 32,
                 whole_depth: bool = False) -> None:
        """
        Args:
            device: A CUDA device (the CPU under Triton's interpreter).
            max_context: The longest context of any request.
            fused_rows: Steps of up to this many rows use products that are fused with the norm, activation or rotary embedding
                next to them (twice as many if the hidden size is small).
            whole_depth: Products never sum shares of K by themselves, so that a part of a weight's rows gives the bits of the
                whole (tensor parallelism).
        """
        self._pdl, self._max_context = supports_pdl(device), max_context
        self._fused_rows, self._whole_depth = fused_rows, whole_depth
        self._ahead = _AHEAD_BYTES if self._pdl else 0
        self._uses_library = torch.device(device).type == "cuda"
        self._checked: set[tuple[torch.dtype, torch.Size]] = set()
        self._without_library: set[tuple[torch.dtype, torch.Size]] = set()
        self._small_tiles: set[tuple[torch.dtype, torch.Size]] = set()
        self._counters = torch.zeros(linear.MAX_TILES, dtype=torch.int32, device=device)

    def _uses_pdl(self, rows: Tensor) -> bool:
        """Whether a step of so many rows uses programmatic dependent launch."""
        return self._pdl and rows.shape[0] <= 2 * self._fused_rows

    # -- matrix products

    def prepare(self, weights: list[Tensor]) -> None:
        """Check once for every shape that equal bits can be had from the library here; if not, do without it."""
        for weight in weights:
            shape = (weight.dtype, weight.shape)
            if not self._uses_library or not _supported(weight) or shape in self._checked:
                continue
            self._checked.add(shape)
            if weight.dim() == 3:
                self._check_experts(weight)
                continue
            with torch.inference_mode():
                if not exact.rows_agree(self._one_pass, weight):
                    self._without_library.add(shape)
                    logger.warning("deterministic: products of %s differ between numbers of rows with this device's library; "
                                   "using Paceline's own kernels, which are slower for large batches", tuple(weight.shape))
                    if not exact.rows_agree(self._one_pass, weight):
                        logger.error("deterministic: products of %s differ with Paceline's own kernels, too", tuple(weight.shape))

    def _check_experts(self, weight: Tensor) -> None:
        """Check that large tiles of experts' products round like small ones; if not, do without them."""
        with torch.inference_mode():
            x = torch.randn(128, weight.shape[2], device=weight.device).to(weight.dtype)
            chosen = torch.zeros(128, 1, dtype=torch.int64, device=weight.device)
            few, many = (experts.grouped_linear(x, weight, None, experts.plan_experts(chosen, len(weight), rows), 128, True)
                         for rows in (experts.FEW, experts.MANY))
            if not torch.equal(few, many):
                self._small_tiles.add((weight.dtype, weight.shape))
                logger.warning("deterministic: products of experts %s differ between tiles of %d and %d rows; using the smaller "
                               "ones, which are slower for long prompts", tuple(weight.shape), experts.FEW, experts.MANY)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not _supported(x, weight) or x.dim() != 2:
            assert _needs_grad(x, weight) or x.dtype == torch.float64, (x.shape, x.dtype)
            return F.linear(x, weight, bias)
        return self._one_pass(x, weight, bias)

    def _one_pass(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._is_for_library(x, weight):
            shares = 1 if self._whole_depth else linear.shares_of(*weight.shape)
            if shares == 1:
                return exact.library_linear(x, weight, bias)
            return elementwise.add_parts(exact.library_parts(x, weight, shares), bias, x.dtype)
        config = linear.one_pass_config("linear", x, weight)
        assert config is not None
        config = config._replace(split_k=1) if self._whole_depth else config
        return linear.linear(x, weight, bias, config, self._counters, self._uses_pdl(x), self._ahead)

    def linear_shares(self, x: Tensor, weight: Tensor, shares: int) -> Tensor:
        (rows, depth), width = x.shape, weight.shape[0]
        is_aligned = depth % (8 * shares) == 0 and width % 8 == 0
        if shares == 1 or not self._uses_library or x.element_size() != 2 or not is_aligned:
            return super().linear_shares(x, weight, shares)
        # The library has other kernels for very few rows, which may sum in another order.
        padded = x if rows >= _LIBRARY_ROWS else F.pad(x, (0, 0, 0, _LIBRARY_ROWS - rows))
        return add_in_tree(list(exact.library_parts(padded, weight, shares)[:, :rows]))

    def _is_for_library(self, x: Tensor, weight: Tensor) -> bool:
        if not self._uses_library or x.dtype == torch.float32 or (weight.dtype, weight.shape) in self._without_library:
            return False
        return exact.is_aligned(weight) and not linear.serves_few_rows(x.shape[0], *weight.shape)

    # -- elementwise operations

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if _supported(x, weight):
            return elementwise.rms_norm(x, weight, eps, self._uses_pdl(x))
        return super().rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if _supported(x, residual, weight):
            return elementwise.add_rms_norm(x, residual, weight, eps, self._uses_pdl(x))
        return super().add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return elementwise.silu_mul(gate_up, self._uses_pdl(gate_up)) if _supported(gate_up) else super().silu_mul(gate_up)

    # -- mixtures of experts

    def route(self, logits: Tensor, num_active: int, normalised: bool, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if given is not None or not _supported(logits):
            return super().route(logits, num_active, normalised, given)
        return experts.route(logits, num_active, normalised)

    def experts(self, x: Tensor, weights: ExpertWeights, shares: Tensor, chosen: Tensor) -> Tensor:
        gate_up, down = weights.gate_up, weights.down
        if not _supported(x, gate_up, down) or _needs_grad(shares):
            return super().experts(x, weights, shares, chosen)
        num_pairs, count = chosen.numel(), len(gate_up)
        is_small = not {(matrix.dtype, matrix.shape) for matrix in (gate_up, down)}.isdisjoint(self._small_tiles)
        rows = experts.tile_rows(num_pairs, count, experts.FEW if is_small else experts.MANY)
        plan = experts.plan_experts(chosen, count, rows)
        inner = experts.grouped_linear(x, gate_up, weights.gate_up_bias, plan, num_pairs, True, weights.activation)
        outer = experts.grouped_linear(inner, down, weights.down_bias, plan, num_pairs, False)
        return experts.combine(outer, shares)

    def rope_write(self, qkv: Tensor, num_heads: int, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
                   cos: Tensor, sin: Tensor, write: Tensor, cache: PagedCache) -> Tensor:
        if not _supported(qkv, cache.k) or cos.dtype != torch.float32:
            return super().rope_write(qkv, num_heads, q_norm, k_norm, eps, cos, sin, write, cache)
        return elementwise.rope_write(qkv, num_heads, q_norm, k_norm, eps, cos, sin, write, cache, self._uses_pdl(qkv))

    # -- fused products

    def should_fuse(self, num_rows: int, hidden: int, head_dim: int) -> bool:
        """For any number of rows, because many have to round like few (`_fused_config`)."""
        return num_rows > 0 and _halves_evenly(head_dim)

    def linear_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor,
                    eps: float) -> tuple[Normed, Tensor]:
        if not _supported(x, weight, norm):
            return super().linear_norm(x, weight, bias, residual, norm, eps)
        config = self._fused_config("linear_norm", x, weight)
        if config is None:
            if self._is_for_library(x, weight) and (shares := linear.shares_of(*weight.shape)) > 1:
                return elementwise.add_norm(exact.library_parts(x, weight, shares), residual, norm, eps, bias)
            return elementwise.add_norm(self._one_pass(x, weight, bias), residual, norm, eps)
        return fused_linear.linear_norm(x, weight, bias, residual, norm, eps, config, self._counters, self._uses_pdl(x),
                                        self._ahead)

    def gated_linear(self, x: Normed, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not _supported(x.rows, weight):
            return super().gated_linear(x, weight, bias)
        config = self._fused_config("gated", x.rows, weight)
        if config is None:
            return elementwise.silu_mul(self._one_pass(x.rows, weight), self._uses_pdl(x.rows), x, bias)
        return fused_linear.gated_linear(x, weight, bias, config, self._counters, self._uses_pdl(x.rows), self._ahead)

    def qkv_rope(self, x: Normed, weight: Tensor, bias: Tensor | None, num_heads: int, cos: Tensor, sin: Tensor, write: Tensor,
                 cache: PagedCache) -> Tensor:
        dim, (rows, hidden) = cache.k.shape[2], x.rows.shape
        if not self.should_fuse(rows, hidden, dim) or not _supported(x.rows, weight, cache.k) or cos.dtype != torch.float32:
            return super().qkv_rope(x, weight, bias, num_heads, cos, sin, write, cache)
        config = self._fused_config("qkv", x.rows, weight, dim // 2)
        if config is None:
            return elementwise.rope_write(self._one_pass(x.rows, weight), num_heads, None, None, 0.0, cos, sin, write, cache,
                                          self._uses_pdl(x.rows), x, bias)
        return fused_linear.qkv_rope(x, weight, bias, num_heads, cos, sin, write, cache, config, self._counters,
                                     self._uses_pdl(x.rows), self._ahead)

    def _fused_config(self, kind: str, x: Tensor, weight: Tensor, half: int = 0) -> TileConfig | None:
        """None: compute a product and the operation next to it separately, with the same bits."""
        hidden = weight.shape[0] if kind == "linear_norm" else weight.shape[1]
        return linear.one_pass_config(kind, x, weight, half) if x.shape[0] <= self._most_fused_rows(hidden) else None

    def _most_fused_rows(self, hidden: int) -> int:
        return self._fused_rows if hidden > _NARROW else 2 * self._fused_rows

    # -- attention

    def plan_step(self, segments: Segments, num_rows: int, num_heads: int, cache: PagedCache,
                  chunks: list[tuple[int, int, int]], trees: bool = False, forced: bool = False) -> FixedPlan | None:
        """The metadata that `attention` reads in every layer of a step; made once per step, inside the captured graph. Steps with
        prompt chunks are never captured: they have a plan of the rows before the chunks, and one of the chunks' own rows."""
        if cache.k.dtype not in _DTYPES:
            return None
        _, num_kv_heads, head_dim = cache.k.shape
        heads, first = (num_heads, num_kv_heads, head_dim), num_rows - sum(count for _, _, count in chunks)
        plan = fixed_attention.fixed_plan(segments, first, *heads, self._max_context, trees, forced)
        if first == num_rows:
            return plan
        prompts = fixed_attention.fixed_plan(segments, num_rows - first, *heads, self._max_context, False, prompts_from=first)
        return plan._replace(prompts=prompts, first_prompt=first)

    def attention(self, q: Tensor, cache: PagedCache, segments: Segments, scale: float, plan: FixedPlan | None = None,
                  form: AttentionForm = PLAIN_ATTENTION) -> Tensor:
        if not _supported(q, cache.k):
            return super().attention(q, cache, segments, scale, plan, form)
        assert form is PLAIN_ATTENTION, "no Triton kernel has windows, sinks or caps; `engine.build` refuses such a policy"
        if plan is None:
            plan = self.plan_step(segments, q.shape[0], q.shape[1], cache, [], trees=True)
            assert plan is not None
        if plan.prompts is None:
            return fixed_attention.fixed_attention(q, cache, plan, scale, self._uses_pdl(q))
        first = plan.first_prompt
        prompts = fixed_attention.fixed_attention(q[first:], cache, plan.prompts, scale)
        if first == 0:
            return prompts
        return torch.cat([fixed_attention.fixed_attention(q[:first], cache, plan, scale), prompts])

    # -- draft trees

    def flatten_drafts(self, tokens: Tensor, parents: Tensor, depths: Tensor, draft: Tensor, tree: DraftTree,
                       max_depth: int) -> None:
        tree_kernels.flatten_drafts(tokens, parents, depths, draft, tree, max_depth)

    def build_rows(self, slots: Tensor, tree: DraftTree, of: SlotTensors) -> DecodeRows:
        return tree_kernels.build_rows(slots, tree, of)

    def verify(self, slots: Tensor, tree: DraftTree, of: SlotTensors, sampled: Tensor, logprobs: Tensor, raw: Tensor | None,
               max_depth: int) -> SampledTokens:
        return tree_kernels.verify(slots, tree, of, sampled, logprobs, raw, max_depth)

    # -- sampling and drafting

    def sample(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        return sampling.sample(logits, params) if _supported(logits) else super().sample(logits, params)

    def logprobs_of(self, logits: Tensor, tokens: Tensor, params: SamplingTensors) -> Tensor:
        if not _supported(logits):
            return super().logprobs_of(logits, tokens, params)
        return sampling.sample(logits, params, given=tokens)[1]

    def gumbel(self, seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
        return noise.gumbel(seed, position, token_ids)

    def draft_topk(self, logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, tau: float | Tensor, k: int,
                   token_ids: Tensor | None = None) -> RankedTokens:
        rank = drafting.draft_topk if _supported(logits) and k <= drafting.MAX_K else draft_topk
        return rank(logits, seed, position, temperature, tau, k, token_ids)

    def catch_up_rows(self, requests: DraftRequests, stored: Tensor, cache: PagedCache, request: Tensor, back: Tensor,
                      counts: Tensor, least: int, spare: int) -> DraftRows:
        return drafting.catch_up_rows(requests, stored, cache, request, back, counts, least, spare)

    def recent_pages(self, requests: DraftRequests, cache: PagedCache, window: int, into: Tensor) -> tuple[Tensor, Tensor]:
        return drafting.recent_pages(requests, cache, window, into)

    def draft_layer(self, layer: DraftLayer, rows: DraftRows, state: Tensor, above: Tensor | None,
                    cache: PagedCache) -> Tensor | None:
        """See `base.Ops.draft_layer`. The products are fused, which takes eight kernel launches instead of sixteen; for many rows
        the result is None, because separate products are faster there."""
        (num_rows,), dim = rows.tokens.shape, cache.k.shape[2]
        if not self.should_fuse(num_rows, layer.embed.shape[1], dim) or not _supported(layer.embed, state, cache.k):
            return None
        # The plan comes first: the attention kernel reads it before it waits for its predecessor.
        plan = self.plan_step(rows.segments, num_rows, layer.num_heads, cache, [], trees=True)
        x, residual, cos, sin = drafting.layer_inputs(layer, rows, state, above)
        if layer.fc is not None:
            x = residual = self.linear(x, layer.fc)
        q = self.qkv_rope(Normed(x), layer.qkv, None, layer.num_heads, cos, sin, rows.write, cache)
        heads = self.attention(q, cache, rows.segments, dim**-0.5, plan).flatten(1)
        normed, residual = self.linear_norm(heads, layer.o, None, residual, layer.mlp_norm, layer.eps)
        inner = self.gated_linear(normed, layer.gate_up, None)
        return self.linear_norm(inner, layer.down, None, residual, layer.mlp_norm, layer.eps)[1]

    def add_candidates(self, ranked: RankedTokens, scores: Tensor, origin: Tensor, ids: Tensor | None, into: Candidates,
                       first: int) -> None:
        drafting.add_candidates(ranked, scores, origin, ids, into, first)

    def select_beam(self, found: Candidates, first: int, bits: Tensor, requests: DraftRequests, cache: PagedCache, depth: int,
                    width: int) -> Beam:
        return drafting.select_beam(found, first, bits, requests, cache, depth, width)

    def select_nodes(self, found: Candidates, width: int, budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return drafting.select_nodes(found, width, budget)

    def movable(self, tensors: list[Tensor]) -> Movables:
        return tree_kernels.movables(tensors)

    def move_tokens(self, what: Movables, source: Tensor, target: Tensor) -> None:
        tree_kernels.move_tokens(what, source, target)


def _halves_evenly(head_dim: int) -> bool:
    """Whether the rotary embedding of such heads can be fused with a product."""
    return head_dim >= 32 and head_dim & (head_dim - 1) == 0


def _supported(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors: supported dtypes, and no gradient is needed."""
    return all(tensor.dtype in _DTYPES for tensor in tensors) and not _needs_grad(*tensors)


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
