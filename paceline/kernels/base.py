"""What every kernel family offers. One object per device, chosen once (`kernels.ops_for`) and handed to the model.

A step is a flat list of rows. Rows of one request lie side by side and form a *segment*: its last token and the nodes of
its draft tree, or a chunk of its prompt. Every row's key and value are written into the paged cache before attention
reads it, so a segment's rows see the committed context through the page table and each other through the mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from paceline.kernels.reference.draft_rank import Ranked


class Segments(NamedTuple):
    """Which rows belong together, and what they may see. Padding segments have length 0."""

    row: Tensor  # [S] int32 first row
    length: Tensor  # [S] int32 number of rows
    slot: Tensor  # [S] int32 row of the page table
    context: Tensor  # [S] int32 committed tokens before the first row
    causal: Tensor  # [S] bool: row j sees rows 0..j of its segment; otherwise the mask says
    # [R, 2] int64: bit i of word i // 64 is set when this row sees logical position context + i. For a tree in one step that
    # is row i of its segment; a drafter going level by level also sees rows of earlier levels, so i may exceed `length`.
    mask: Tensor


class PagedCache(NamedTuple):
    """One layer's keys and values. Logical position p of a slot lies at page_table[slot, p // size] * size + p % size."""

    k: Tensor  # [T, Hkv, D]
    v: Tensor  # [T, Hkv, D]
    page_table: Tensor  # [slots, pages] int32
    page_size: int


class SlotTensors(NamedTuple):
    """What the device knows of every running request, one row per slot. The last slot is padding: a request that never ends,
    whose rows fill a step up to a size; it stays at context 0."""

    context: Tensor  # [slots] int64 committed tokens in the cache
    last_token: Tensor  # [slots] int64 drawn, not yet fed
    seed: Tensor  # [slots] int64
    temperature: Tensor  # [slots] float32
    top_k: Tensor  # [slots] int32
    top_p: Tensor  # [slots] float32
    min_p: Tensor  # [slots] float32
    shared: Tensor  # [slots] int64 leading positions that lie on pages of other requests
    page_table: Tensor  # [slots, pages] int32
    page_size: int


class DraftTree(NamedTuple):
    """The decode rows of one step. Row order: requests as planned, root first, then nodes, parents before children."""

    tokens: Tensor  # [R] int64; roots hold anything (the device knows each request's last token)
    parents: Tensor  # [R] int64 absolute row of the parent; a root is its own
    depths: Tensor  # [R] int64; 0 = root
    node: Tensor  # [R] int64 place within the request's rows; 0 = root
    request: Tensor  # [R] int64 which of the step's decode requests
    mask: Tensor  # [R, 2] int64 rows of the same request that this row sees
    first: Tensor  # [B] int64 row of each request's root; 0 for a request without rows
    length: Tensor  # [B] int64 rows of each request


class SamplingTensors(NamedTuple):
    """Per row to be sampled."""

    seed: Tensor  # [R] int64
    position: Tensor  # [R] int64 position of the token being drawn
    temperature: Tensor  # [R] float32; 0 = greedy
    top_k: Tensor  # [R] int32; 0 = all
    top_p: Tensor  # [R] float32
    min_p: Tensor  # [R] float32


class DecodeRows(NamedTuple):
    """A step's decode rows, ready for the forward pass and the sampler."""

    tokens: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    write: Tensor  # [R] int64 token slot where this row's key, value and features go
    segments: Segments
    sampling: SamplingTensors


class Drawn(NamedTuple):
    """What a step drew. Column d is the token drawn after the accepted node at depth d; columns beyond `num_drawn` repeat the
    root's."""

    tokens: Tensor  # [B, D + 1] int64; -1: the logits were not numbers
    logprobs: Tensor  # [B, D + 1]
    raw_logprobs: Tensor | None
    num_drawn: Tensor  # [B] int64 columns that are real: accepted rows, the root included
    source: Tensor  # [B, D + 1] int64 token slots to be moved together: accepted nodes …
    target: Tensor  # … and where they belong; equal where nothing moves


class Lines(NamedTuple):
    """What drafting reads of the requests it drafts for, a line each. Padding has no committed token."""

    slots: Tensor  # [B] int64
    context: Tensor  # [B] int64 committed tokens
    last_token: Tensor  # [B] int64 the token at position `context`
    seed: Tensor  # [B] int64
    temperature: Tensor  # [B] float32
    shared: Tensor  # [B] int64 leading positions on other requests' pages: complete, and not to be written


class Normed(NamedTuple):
    """Rows behind an RMS norm, perhaps without their row's factor, which the product they enter can apply later."""

    rows: Tensor  # [R, H]
    squares: Tensor | None = None  # [P, R] float32 parts of each row's sum of squares before the norm; None: rows are complete
    eps: float = 0.0

    def complete(self) -> Tensor:
        if self.squares is None:
            return self.rows
        factor = (self.squares.sum(dim=0) / self.rows.shape[1] + self.eps).rsqrt()
        return (self.rows * factor[:, None]).to(self.rows.dtype)


class LayerWeights(NamedTuple):
    """One decoder layer. Matrices [N, K]; norms and biases [N]."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D] per head
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class DecoderWeights(NamedTuple):
    """A decoder without its head, for `decode`."""

    embed: Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [H]
    num_heads: int
    eps: float


class DraftRows(NamedTuple):
    """Rows of one pass of the drafter."""

    tokens: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    write: Tensor  # [R] int64
    segments: Segments


class DraftLayer(NamedTuple):
    """A drafter's one layer, for `draft_layer`. Matrices [N, K]."""

    embed: Tensor  # [V, H] the policy's
    fc: Tensor | None  # [H, 2 H]; None: EAGLE-3, whose layer takes both halves as they are
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    mlp_norm: Tensor  # [H]
    input_norm: Tensor | None  # [H] EAGLE-3's
    hidden_norm: Tensor | None
    cos: Tensor  # [positions, D/2]
    sin: Tensor
    norm: Tensor | None  # [H] EAGLE-3's, before the head
    head: Tensor | None  # [V, H]; None: it is gathered anew now and then
    draft_ids: Tensor | None
    num_heads: int
    eps: float


class Candidates(NamedTuple):
    """Nodes that a tree is chosen from: W children of the root, then W * W of every level."""

    tokens: Tensor  # [B, C] int64
    parents: Tensor  # [B, C] int64 candidate, -1 the root
    scores: Tensor  # [B, C] float32 log-survival; a child's is lower than its parent's


class Beam(NamedTuple):
    """The likeliest nodes of a level, W per line: the drafter's next rows."""

    rows: DraftRows
    above: Tensor  # [B * W] int64 row of the parent among the last level's
    scores: Tensor  # [B, W] float32
    origin: Tensor  # [B, W] int64 their places among the candidates
    seed: Tensor  # [B * W] int64, and so on: what their children are drawn with
    next_position: Tensor  # [B * W] int64
    temperature: Tensor  # [B * W] float32


class Ops(Protocol):
    """Same names and signatures in torch (reference, any device, differentiable), numba (CPU) and Triton (CUDA)."""

    name: str

    def prepare(self, weights: list[Tensor]) -> None:
        """These matrices [N, K] have new values and will be multiplied with often: lay them out anew if that pays."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension, computed in float32 at least."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[R, 2I] -> [R, I]: silu(first half) * second half."""
        ...

    def rope_write(self, qkv: Tensor, num_heads: int, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
                   cos: Tensor, sin: Tensor, write: Tensor, cache: PagedCache) -> Tensor:
        """Split qkv [R, (H + 2 Hkv) D], normalise heads if asked, rotate q and k, store k and v at cache index `write`
        [R] int64, return q [R, H, D]. cos, sin: [R, D/2] float32 (float64 for a float64 model)."""
        ...

    def fuses(self, num_rows: int, hidden: int, head_dim: int) -> bool:
        """Whether the next three are worth calling, with so many rows of that width, instead of what they are made of."""
        ...

    def linear_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor,
                    eps: float) -> tuple[Normed, Tensor]:
        """add_rms_norm(linear(x, weight, bias), residual, norm, eps)."""
        ...

    def gated_linear(self, x: Normed, weight: Tensor, bias: Tensor | None) -> Tensor:
        """silu_mul(linear(x, weight, bias))."""
        ...

    def qkv_rope(self, x: Normed, weight: Tensor, bias: Tensor | None, num_heads: int, cos: Tensor, sin: Tensor, write: Tensor,
                 cache: PagedCache) -> Tensor:
        """rope_write(linear(x, weight, bias), num_heads, None, None, …)."""
        ...

    def decode(self, weights: DecoderWeights, tokens: Tensor, positions: Tensor | None, cos: Tensor, sin: Tensor, write: Tensor,
               segments: Segments, caches: list[PagedCache], capture: tuple[int, ...]) -> tuple[Tensor, Tensor | None] | None:
        """All layers over a step's rows in one call: final hidden states [R, H] and captured features. None: the caller runs them
        operation by operation. cos, sin: [positions, D/2], or [R, D/2] where there are no positions [R]."""
        ...

    def plan_step(self, segments: Segments, num_rows: int, num_heads: int, cache: PagedCache,
                  chunks: list[tuple[int, int, int]], trees: bool = False) -> Any:
        """What `attention` wants worked out once for all layers of a step. chunks: (slot, start, rows) of the prompt chunks,
        whose segments come last. trees: neighbouring rows are of one request, and share most of their keys."""
        ...

    def attention(self, q: Tensor, cache: PagedCache, segments: Segments, scale: float, plan: Any = None) -> Tensor:
        """q [R, H, D] -> [R, H, D]; rows outside every segment come back as anything finite."""
        ...

    def flatten(self, tokens: Tensor, parents: Tensor, depths: Tensor, draft: Tensor, tree: DraftTree, max_depth: int) -> None:
        """Drafted nodes [N, n] int64 (parents: node of the same line, -1 the root) -> the rows of `tree`, whose `node`,
        `request`, `first` and `length` say where they go. draft [B] int64: which line speaks of a request."""
        ...

    def build_rows(self, slots: Tensor, tree: DraftTree, of: SlotTensors) -> DecodeRows:
        """slots [B] int64: those of the requests that `tree` speaks of. A node's row is written at context + node."""
        ...

    def advance(self, slots: Tensor, tree: DraftTree, of: SlotTensors, sampled: Tensor, logprobs: Tensor, raw: Tensor | None,
                max_depth: int) -> Drawn:
        """Verification is one comparison: from the root, through children that equal the policy's own samples. sampled [R]: what
        the policy draws after each row. Context and last token of `of` move on behind what was accepted."""
        ...

    def movable(self, tensors: list[Tensor]) -> Any:
        """Tensors [T, ...] indexed by token slot, for `move_tokens`; made anew whenever one of them is."""
        ...

    def move_tokens(self, what: Any, source: Tensor, target: Tensor) -> None:
        """Token slots [B, M] -> [B, M] in all of them; pairs of equal slots are left alone. Within a line all are read before any
        is written; lines (requests) do not touch each other's slots."""
        ...

    def sample(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        """Shared-noise sampling: logits [R, V] -> (token [R] int64, log-probability [R] of logits' precision)."""
        ...

    def draft_topk(self, logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, tau: float | Tensor, k: int,
                   token_ids: Tensor | None = None) -> Ranked:
        """The k likeliest to be drawn after each row: largest log q / tau + G; see `draft_rank`."""
        ...

    def follow_rows(self, lines: Lines, stored: Tensor, cache: PagedCache, request: Tensor, back: Tensor, counts: Tensor,
                    least: int, spare: int) -> DraftRows:
        """The drafter's rows for committed positions, `back` [R] from the end of the context of line `request` [R], in order;
        counts [B]: rows of each line. Rows before a line's own beginning are nobody's and go to token slot `spare`, but the last
        `least` are always computed. stored [T]: the token of every token slot. A row feeds the token behind its position."""
        ...

    def draft_layer(self, layer: DraftLayer, rows: DraftRows, state: Tensor, above: Tensor | None,
                    cache: PagedCache) -> Tensor | None:
        """The drafter's layer over these rows in one call -> [R, H]; None: it is to be run operation by operation. state [N, H];
        above [R] int64: which of them a row continues (None: row i state i)."""
        ...

    def draft_tree(self, layer: DraftLayer, lines: Lines, state: Tensor, cache: PagedCache, tau: Tensor, depth: int, width: int,
                   budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """A whole tree from the drafter's output at the roots, state [B, H], as `choose` gives it, in one call; None: it is to be
        grown level by level."""
        ...

    def collect(self, ranked: Ranked, scores: Tensor, origin: Tensor, ids: Tensor | None, into: Candidates, first: int) -> None:
        """The children of N nodes per line (ranked: [B * N, W]) as candidates first, first + 1, …; scores, origin [B, N]: the
        nodes'. A child's score is its share of all ranked, shrunk a little so that children lose to parents."""
        ...

    def grow(self, found: Candidates, first: int, bits: Tensor, lines: Lines, cache: PagedCache, depth: int, width: int) -> Beam:
        """The `width` likeliest of the candidates from `first` on, all at `depth`. They lie behind the context, levels side by
        side; bits [B, N, 2]: what their parents see of that."""
        ...

    def choose(self, found: Candidates, width: int, budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The `budget` likeliest candidates in that order, so parents before children: tokens, parents (-1: the root), depths
        [B, n] int64, survival [B, n] float32."""
        ...

    def gumbel(self, seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
        """G(seed, position, token): [R], [R], [V] int64 -> [R, V] float32."""
        ...
