"""The interface of the kernel backends: `Ops`. What passes through it is in `records`, with the vocabulary.

There is one implementation per device: plain torch (`reference`), numba (`cpu`) and Triton (`triton`). `kernels.ops_for` chooses
one when the engine is built, and the model and the runner call it through `Ops`.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

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
)


class Ops(Protocol):
    """The operations that every kernel backend implements under the same names and signatures: torch (reference: any device,
    differentiable), numba (CPU) and Triton (CUDA)."""

    name: str

    # -- matrix products and elementwise operations

    def prepare(self, weights: list[Tensor]) -> None:
        """Announce that these matrices [N, K] have new values and will be multiplied with many times. A backend may repack
        them."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [R, K] @ weight [N, K]ᵀ + bias [N] -> [R, N]."""
        ...

    def linear_shares(self, x: Tensor, weight: Tensor, shares: int) -> Tensor:
        """x [R, K] @ weight [N, K]ᵀ -> [R, N] in at least float32. K is cut into so many shares, a power of two; each is one
        product, and they are added up in a binary tree."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension, computed in at least float32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Add the residual stream and normalise: returns (rms_norm(x + residual), x + residual)."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """The gated activation: [R, 2I] -> [R, I], silu(first half) * second half."""
        ...

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """A gated activation: [R, 2I] -> [R, I] of gate (first half) and up (second half)."""
        ...

    # -- mixtures of experts

    def route(self, logits: Tensor, num_active: int, normalised: bool, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The experts of each row: those with the largest router logits [R, E], the largest first and of equal ones the lower
        index, or the experts `given` [R, k] int64. Returns their weights [R, k], in at least float32, and their indices [R, k]
        int64. The weights are the softmax over all logits, or, if `normalised`, over those of the row's experts."""
        ...

    def experts(self, x: Tensor, weights: ExpertWeights, shares: Tensor, chosen: Tensor) -> Tensor:
        """The weighted sum of every row's experts: x [R, K], weights shares [R, k] of the experts chosen [R, k] int64 -> [R, K].
        A row's experts are added up in their order in `chosen`, in at least float32. A backend that promises deterministic
        results sums every product in one pass, so a row's bits depend neither on the other rows nor on who else has chosen an
        expert."""
        ...

    def rope_write(self, qkv: Tensor, num_heads: int, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
                   cos: Tensor, sin: Tensor, write: Tensor, cache: PagedCache) -> Tensor:
        """Split qkv [R, (H + 2 Hkv) D], normalise the heads of q and k where a norm is given, apply the rotary embedding to q and
        k, store k and v at cache index `write` [R] int64, and return q [R, H, D]. cos and sin are [R, D/2] float32 (float64 for a
        float64 model)."""
        ...

    # -- fused products

    def should_fuse(self, num_rows: int, hidden: int, head_dim: int) -> bool:
        """Whether `linear_norm`, `gated_linear` and `qkv_rope` are faster than the operations they consist of, for a step of
        `num_rows` rows of width `hidden`."""
        ...

    def linear_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor,
                    eps: float) -> tuple[Normed, Tensor]:
        """Fused add_rms_norm(linear(x, weight, bias), residual, norm, eps)."""
        ...

    def gated_linear(self, x: Normed, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Fused silu_mul(linear(x, weight, bias))."""
        ...

    def qkv_rope(self, x: Normed, weight: Tensor, bias: Tensor | None, num_heads: int, cos: Tensor, sin: Tensor, write: Tensor,
                 cache: PagedCache) -> Tensor:
        """Fused rope_write(linear(x, weight, bias), num_heads, None, None, …), for models without q and k norms."""
        ...

    def decode(self, weights: DecoderWeights, tokens: Tensor, positions: Tensor | None, cos: Tensor, sin: Tensor, write: Tensor,
               segments: Segments, caches: list[PagedCache], capture: tuple[int, ...]) -> tuple[Tensor, Tensor | None] | None:
        """Run all decoder layers over the rows of a step in one call. Returns the final hidden states [R, H] and the features
        captured at the layers `capture`, or None if the backend has no such call and the caller has to run the layers operation
        by operation. cos and sin are [positions, D/2], or [R, D/2] if `positions` [R] is None."""
        ...

    def serves_whole_steps(self, of: StepTensors, num_rows: int) -> bool:
        """Whether `whole_step` can run steps of so many rows. New weights have been announced with `prepare`."""
        ...

    def whole_step(self, of: StepTensors, inputs: StepInputs, trees: TreeTensors | None, max_depth: int) -> SampledTokens:
        """Run a step in one call: `flatten_drafts`, `build_rows`, all layers, the head, `sample`, `verify` and `move_tokens`."""
        ...

    # -- attention

    def plan_step(self, segments: Segments, num_rows: int, num_heads: int, cache: PagedCache,
                  chunks: list[tuple[int, int, int]], trees: bool = False, forced: bool = False) -> Any:
        """Metadata that `attention` needs and that is the same for all layers of a step. `chunks` lists (slot, start, rows) of
        forced rows whose numbers are known on the host, so that kernels for long prompts can serve them; their segments come
        last. `trees` says that rows may belong to draft trees: adjacent rows share most of their keys. `forced` says that forced
        rows may be among the others, which a captured step does not know beforehand."""
        ...

    def attention(self, q: Tensor, cache: PagedCache, segments: Segments, scale: float, plan: Any = None,
                  form: AttentionForm = PLAIN_ATTENTION) -> Tensor:
        """Attention over the paged KV cache with causal or tree masks: q [R, H, D] -> [R, H, D]. Rows that belong to no segment
        (padding) return arbitrary finite values. A window counts positions: those of a tree row are its path's, so its bits in
        `Segments.mask` say where it is."""
        ...

    # -- draft trees: rows before the forward pass, verification after it

    def flatten_drafts(self, tokens: Tensor, parents: Tensor, depths: Tensor, draft: Tensor, tree: DraftTree,
                       max_depth: int) -> None:
        """Write drafted nodes into the rows of `tree`, whose `node`, `request`, `first` and `length` say where they go. tokens,
        parents and depths are [N, n] int64, one line per drafted request; a parent is a node of the same line, or -1 for the
        root. draft [B] int64 is the line that holds a request's draft. Forced rows are left as they are."""
        ...

    def build_rows(self, slots: Tensor, tree: DraftTree, of: SlotTensors) -> DecodeRows:
        """Turn draft trees and forced rows into the rows of a step: tokens, positions, cache indices, segments and sampling
        parameters. slots [B] int64 are the slots of the tree's requests. The key and value of row i of a request are written at
        position context + i."""
        ...

    def verify(self, slots: Tensor, tree: DraftTree, of: SlotTensors, sampled: Tensor, logprobs: Tensor, raw: Tensor | None,
               max_depth: int) -> SampledTokens:
        """Accept the longest path from the root on which every draft token equals the token that the policy sampled after its
        parent; forced rows are accepted without comparison. sampled, logprobs and raw [L] belong to the sampled rows. Updates
        `context` and `last_token` of `of` in place."""
        ...

    def movable(self, tensors: list[Tensor]) -> Any:
        """Handle for `move_tokens` on these tensors [T, ...], which are indexed by cache index. It becomes invalid when one of
        the tensors is reallocated."""
        ...

    def move_tokens(self, what: Any, source: Tensor, target: Tensor) -> None:
        """Copy cache indices source [B, M] to target [B, M] in all tensors of the handle `what`; pairs of equal indices are
        skipped. Within one request all sources are read before any target is written; requests must not touch each other's
        indices."""
        ...

    # -- sampling

    def sample(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        """Sample with Gumbel noise that depends only on (seed, position, token id): logits [R, V] -> (token [R] int64,
        log-probability [R] in the precision of the logits)."""
        ...

    def logprobs_of(self, logits: Tensor, tokens: Tensor, params: SamplingTensors) -> Tensor:
        """Log-probabilities [R] of given tokens [R] int64, with the bits that `sample` returns where it samples them. A token
        that the filters exclude counts as if they kept it. Seed and position have no influence."""
        ...

    def gumbel(self, seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
        """The Gumbel noise G(seed, position, token) of `kernels.noise`: [R], [R], [V] int64 -> [R, V] float32."""
        ...

    # -- drafting

    def draft_topk(self, logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, tau: float | Tensor, k: int,
                   token_ids: Tensor | None = None) -> RankedTokens:
        """The k tokens of each row that the policy is most likely to sample: the largest log q / tau + G(seed, position, token),
        where q = softmax(logits / temperature). Greedy rows, and all rows if tau is 0, rank by log q alone. logits [R, V];
        token_ids [V] are the token ids of the columns (None: columns are token ids)."""
        ...

    def catch_up_rows(self, requests: DraftRequests, stored: Tensor, cache: PagedCache, request: Tensor, back: Tensor,
                      counts: Tensor, least: int, spare: int) -> DraftRows:
        """The drafter's rows for committed tokens that are not in its KV cache yet. Row i belongs to the request request[i] [R]
        and lies back[i] [R] positions before the end of its context; rows are in order, counts [B] rows per request. Its input is
        the token after its position; stored [T] is the token at every cache index. Rows on shared pages, or before the beginning
        of the text, are padding and write to cache index `spare`; the last `least` rows of a request are always computed. A
        caller may pass only some of the rows; the segments are then invalid."""
        ...

    def recent_pages(self, requests: DraftRequests, cache: PagedCache, window: int, into: Tensor) -> tuple[Tensor, Tensor]:
        """Write the pages of each request from the one on that holds the token `window` before the end of its context (the first
        page if the context is shorter) into a line of `into` [B, P] int32. Returns the position [B] int32 at which each line
        begins, and the number [B] int32 of committed tokens from there on."""
        ...

    def draft_layer(self, layer: DraftLayer, rows: DraftRows, state: Tensor, above: Tensor | None,
                    cache: PagedCache) -> Tensor | None:
        """Run the drafter's layer over these rows in one call -> [R, H], or return None if the caller has to run it operation by
        operation. state [N, H] holds features or drafter outputs; above [R] int64 is the entry each row continues (None: row i
        continues entry i)."""
        ...

    def draft_trees(self, of: DraftTensors, slots: Tensor, max_missing: int, depth: int, width: int,
                    budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Draft whole trees for the requests in slots [B] int64 in one call, after processing the last `max_missing` committed
        tokens of each, as `catch_up_rows` gives them. Returns the same as `select_nodes`, in memory that the next call may write
        to, or None if the caller has to draft level by level. New weights have been announced with `prepare`."""
        ...

    def add_candidates(self, ranked: RankedTokens, scores: Tensor, origin: Tensor, ids: Tensor | None, into: Candidates,
                       first: int) -> None:
        """Write the children of N nodes per request (ranked: [B * N, W]) into the candidates from index `first` on. scores and
        origin [B, N] are the nodes' own scores and candidate indices. A child's score is its parent's plus the child's
        log-probability, minus a small constant so that a child always ranks below its parent."""
        ...

    def select_beam(self, found: Candidates, first: int, bits: Tensor, requests: DraftRequests, cache: PagedCache, depth: int,
                    width: int) -> Beam:
        """The `width` most likely candidates per request among those from index `first` on, which are all at `depth`. The
        drafter's keys and values of level d are written behind the context, `width` positions per level; bits [B, N, 2] are the
        attention masks of the candidates' parents over these positions."""
        ...

    def select_nodes(self, found: Candidates, width: int, budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The `budget` most likely candidates per request in descending order, hence parents before children. Returns tokens,
        parents (-1: the root) and depths [B, n] int64, and the probability of acceptance [B, n] float32."""
        ...
