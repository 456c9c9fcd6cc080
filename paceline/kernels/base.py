"""The interface of the kernel backends (`Ops`) and the tensors that pass through it.

There is one implementation per device: plain torch (`reference`), numba (`cpu`) and Triton (`triton`). `kernels.ops_for` chooses
one when the engine is built, and the model and the runner call it through `Ops`.

Vocabulary:

- A *step* is one forward pass over a flat list of *rows*; a row is one token. The rows of one request are adjacent and form a
  *segment*: either the request's last token followed by the nodes of its draft tree, or *forced* rows, whose tokens are given: a
  chunk of its prompt (chunked prefill), or what a pre-empted request computes again.
- A *slot* is the place of a running request in the batch: its row of the page table and of `SlotTensors`.
- A *cache index* is the index of one token in the flat KV cache [T, Hkv, D] (vLLM calls this the slot mapping); `cache_index`
  computes it.

The keys and values of every row are written to the KV cache before attention reads it, so a row sees the committed tokens of its
request through the page table and the other rows of its segment through the mask.

Letters in shape comments: R rows, B requests, S segments, V vocabulary, H heads (or the hidden size), Hkv key/value heads, D head
dimension (in `[B, D + 1]`: tree depth), T tokens the cache can hold, W width of the draft tree, N nodes or output features,
K input features.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor


class Segments(NamedTuple):
    """The rows of each request in a step, and which keys they may attend to. Padding segments have length 0."""

    row: Tensor  # [S] int32 index of the first row
    length: Tensor  # [S] int32 number of rows
    slot: Tensor  # [S] int32 row of the page table
    context: Tensor  # [S] int32 number of committed tokens before the first row; all rows attend to them
    causal: Tensor  # [S] bool: True if row j attends to rows 0..j of its segment (prompt chunks), False if `mask` decides (trees)
    # [R, 2] int64 bit mask of 128 bits: bit i of word i // 64 is set when this row attends to logical position context + i. For a
    # tree verified in one step that is row i of its segment. A drafter that runs level by level also attends to rows of earlier
    # levels, so i may exceed `length`.
    mask: Tensor


class PagedCache(NamedTuple):
    """The paged KV cache of one layer. `cache_index` maps (slot, position) to an index of dimension T."""

    k: Tensor  # [T, Hkv, D]
    v: Tensor  # [T, Hkv, D]
    page_table: Tensor  # [slots, pages] int32
    page_size: int  # tokens per page


class SlotTensors(NamedTuple):
    """State of all running requests on the device, one row per slot. The last slot belongs to a padding request that never ends:
    its rows pad a step to the size of a captured graph, and its context stays 0."""

    context: Tensor  # [slots] int64 number of committed tokens in the KV cache
    last_token: Tensor  # [slots] int64 token that was sampled last and is not in the KV cache yet
    seed: Tensor  # [slots] int64 sampling seed
    temperature: Tensor  # [slots] float32
    top_k: Tensor  # [slots] int32
    top_p: Tensor  # [slots] float32
    min_p: Tensor  # [slots] float32
    shared: Tensor  # [slots] int64 number of leading positions on pages that are shared with other requests (prefix sharing)
    page_table: Tensor  # [slots, pages] int32
    page_size: int  # tokens per page


def cache_index(pages: PagedCache | SlotTensors, slots: Tensor | int, positions: Tensor) -> Tensor:
    """Index in the flat KV cache of token `positions` of the requests in `slots`, element by element, as int64."""
    return pages.page_table[slots, positions // pages.page_size].long() * pages.page_size + positions % pages.page_size


class DraftTree(NamedTuple):
    """The rows of all requests of one step. The requests follow each other in scheduling order. Within a request with a draft
    tree the root (its last token) comes first and parents come before their children. All rows of a request with forced rows
    are forced: their tokens are given, in the order of their positions, and the last of them may be sampled from."""

    tokens: Tensor  # [R] int64 draft tokens and forced tokens; ignored at a root, since the device knows a request's last token
    parents: Tensor  # [R] int64 row of the parent; a root and a forced row are their own parents
    depths: Tensor  # [R] int64 depth in the tree; 0 for a root; of a forced row its index within the request
    node: Tensor  # [R] int64 index of the row within its request; 0 for a root
    request: Tensor  # [R] int64 index of the request among the step's requests
    mask: Tensor  # [R, 2] int64 rows of the same request that this row attends to; see `Segments.mask`. Forced rows are causal
    first: Tensor  # [B] int64 first row of each request; 0 for a request without rows
    length: Tensor  # [B] int64 number of rows of each request
    forced: Tensor  # [B] int64 number of forced rows: all of the request's rows, or 0
    sample: Tensor  # [B] int64 index of the request's first sampled row among all sampled rows; -1 if none of its rows is
    sampled: Tensor | None  # [L] int64 rows whose next token is sampled; None: all rows, in order


class SamplingTensors(NamedTuple):
    """Sampling parameters of every row whose next token is sampled (`DraftTree.sampled`)."""

    seed: Tensor  # [L] int64
    position: Tensor  # [L] int64 position of the token being sampled
    temperature: Tensor  # [L] float32; 0 is greedy
    top_k: Tensor  # [L] int32; 0 keeps all tokens
    top_p: Tensor  # [L] float32
    min_p: Tensor  # [L] float32


class DecodeRows(NamedTuple):
    """The rows of a step in the form that the model and the sampler read."""

    tokens: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    write: Tensor  # [R] int64 cache index where the key, value and captured features of the row are stored
    segments: Segments
    sampling: SamplingTensors


class SampledTokens(NamedTuple):
    """The tokens that every request gained in a step: column d is the token sampled after the accepted node at depth d, or, in
    column 0, after the last forced row. Columns at and beyond `num_drawn` must be ignored."""

    tokens: Tensor  # [B, D + 1] int64; -1 where the logits were NaN or infinite
    logprobs: Tensor  # [B, D + 1]
    raw_logprobs: Tensor | None  # [B, D + 1] log-probabilities at temperature 1 without filters, if they were asked for
    num_drawn: Tensor  # [B] int64 number of valid columns: accepted rows including the root; 0 for forced rows without a sample
    source: Tensor  # [B, D + 1] int64 cache indices of the accepted nodes, whose keys and values `move_tokens` copies to …
    target: Tensor  # [B, D + 1] int64 … the positions right after the context; equal to `source` where nothing has to move


TreeTensors = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Tokens, parents and depths [N, n] int64 of draft trees, as `Ops.flatten_drafts` takes them; None if there are none."""

INPUT_LINES = ("slots", "first", "length", "draft", "forced", "sample", "request", "node", "tokens", "parents", "depths", "mask",
               "mask_end", "sampled", "next_token")
"""What the host lays out for a step, one line of integers each: the slots, the fields of `DraftTree` (`mask` takes two lines),
`draft` as `Ops.flatten_drafts` takes it, and the token behind every forced row."""


class StepInputs(NamedTuple):
    """The rows of a step without forced rows, as the host has laid them out: roots, and rows whose draft tokens are not filled in
    yet."""

    block: Tensor  # [len(INPUT_LINES), capacity] int64, the same memory in every step
    num_requests: int
    num_rows: int


class StepTensors(NamedTuple):
    """What the steps of a runner read and write beside their rows. It is made anew when weights or the cache are allocated
    anew."""

    weights: DecoderWeights
    head: Tensor  # [V, H]
    cos: Tensor  # [positions, D/2]
    sin: Tensor
    slots: SlotTensors
    caches: list[PagedCache]  # of every layer
    capture: tuple[int, ...]  # layers whose inputs are stored as features; -1: the final hidden states
    tokens: Tensor  # [T] int64 token at every cache index
    features: Tensor | None  # [T, H * captured layers]
    movable: Any  # handle of everything that moves with a token


class DraftRequests(NamedTuple):
    """The requests that the learned drafter drafts for, one row each. A padding request has context 0."""

    slots: Tensor  # [B] int64
    context: Tensor  # [B] int64 number of committed tokens
    last_token: Tensor  # [B] int64 token at position `context`: sampled, not in the KV cache yet
    seed: Tensor  # [B] int64
    temperature: Tensor  # [B] float32
    shared: Tensor  # [B] int64 leading positions on shared pages: the drafter's cache is complete there and must not be written


class Normed(NamedTuple):
    """Hidden states after an RMS norm. A fused kernel may leave out the factor 1 / rms of each row, which the next matrix product
    then applies to its result."""

    rows: Tensor  # [R, H]
    squares: Tensor | None = None  # [P, R] int64 sums of squares before the norm, in units of 2⁻²⁶; None: rows are complete
    eps: float = 0.0

    def complete(self) -> Tensor:
        """The normalised rows [R, H] with the missing factor applied."""
        if self.squares is None:
            return self.rows
        factor = (self.squares.sum(dim=0) / 2.0**26 / self.rows.shape[1] + self.eps).rsqrt()
        return (self.rows * factor[:, None]).to(self.rows.dtype)


class AttentionForm(NamedTuple):
    """How a layer's attention differs from plain causal attention."""

    window: int = 0  # positions that a row attends to, its own included; 0: all
    soft_cap: float = 0.0  # scores become cap * tanh(score / cap); 0: as they are
    sinks: Tensor | None = None  # [H] logit of each head that joins the softmax and stands for no key


PLAIN_ATTENTION = AttentionForm()

Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
"""Activation of a gated MLP. silu(gate) * up; gelu(gate) * up with tanh's approximation of gelu; or gpt-oss's
(clamp(up, -7, 7) + 1) * g * sigmoid(1.702 g) with g = min(gate, 7)."""


class ExpertWeights(NamedTuple):
    """The experts of one layer: gated MLPs of equal size."""

    gate_up: Tensor  # [E, 2 I, K] gate and up projection of each expert, one below the other
    gate_up_bias: Tensor | None  # [E, 2 I]
    down: Tensor  # [E, K, I]
    down_bias: Tensor | None  # [E, K]
    activation: Activation


class LayerWeights(NamedTuple):
    """Weights of one decoder layer. Matrices are [N, K] as in `nn.Linear`; norms and biases are [N]."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [D] shared by all heads
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    router: RouterWeights | None = None  # of a layer with experts, whose gate_up and down are those of `ExpertWeights`


class RouterWeights(NamedTuple):
    """The router of a layer with experts."""

    weight: Tensor  # [E, H]
    bias: Tensor | None
    num_active: int  # experts of one token
    normalised: bool


class DecoderWeights(NamedTuple):
    """Weights of a decoder without its LM head, for `Ops.decode`."""

    embed: Tensor  # [V, H]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [H]
    num_heads: int
    eps: float


class DraftRows(NamedTuple):
    """Input rows of one forward pass of the drafter."""

    tokens: Tensor  # [R] int64
    positions: Tensor  # [R] int64
    write: Tensor  # [R] int64 index in the drafter's KV cache
    segments: Segments


class DraftLayer(NamedTuple):
    """Weights of the one-layer drafter, for `Ops.draft_layer` and `Ops.draft_trees`. Matrices are [N, K]."""

    embed: Tensor  # [V, H] the policy's embedding
    encode: Tensor | None  # [H, F] only EAGLE-3: projects the policy's features to H
    fc: Tensor | None  # [H, 2 H] projects embedding and feature to H; None for EAGLE-3, whose layer takes both side by side
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    mlp_norm: Tensor  # [H]
    input_norm: Tensor | None  # [H] only EAGLE-3
    hidden_norm: Tensor | None  # [H] only EAGLE-3
    cos: Tensor  # [positions, D/2]
    sin: Tensor
    norm: Tensor | None  # [H] only EAGLE-3: final norm before the LM head
    head: Tensor | None  # [V, H]; None if the head is a slice of the policy's that is gathered again from time to time
    draft_ids: Tensor | None  # token ids of a reduced draft vocabulary; None if the head covers all tokens
    num_heads: int
    eps: float


class DraftTensors(NamedTuple):
    """What the learned drafter reads and writes when it drafts in one call. It is made anew when weights or the cache are
    allocated anew."""

    layer: DraftLayer
    slots: SlotTensors
    stored: Tensor  # [T] int64 token at every cache index
    features: list[Tensor]  # [T, ·] side by side the policy's hidden states at every cache index
    cache: PagedCache
    spare: int  # a cache index that is never read
    tau: Tensor  # [1] float32


class RankedTokens(NamedTuple):
    """The k highest-ranked draft tokens of every row; see `Ops.draft_topk`."""

    values: Tensor  # [R, k] ranking scores in descending order
    columns: Tensor  # [R, k] int64 columns of the logits (token ids only if the vocabulary is not reduced)
    logsumexp: Tensor  # [R] over the scores of the whole row: exp(value - logsumexp) is the probability of a token


class Candidates(NamedTuple):
    """All nodes that the drafter proposed for a tree: W children of the root, then W * W per further level."""

    tokens: Tensor  # [B, C] int64
    parents: Tensor  # [B, C] int64 index of the parent candidate; -1 for the root
    scores: Tensor  # [B, C] float32 log-probability that the node is accepted; a child's is lower than its parent's


class Beam(NamedTuple):
    """The W most likely nodes of one tree level per request: the drafter's next input rows."""

    rows: DraftRows
    above: Tensor  # [B * W] int64 row of the parent in the previous level's pass
    scores: Tensor  # [B, W] float32 the nodes' candidate scores
    origin: Tensor  # [B, W] int64 the nodes' indices among the candidates
    seed: Tensor  # [B * W] int64 seed …
    next_position: Tensor  # [B * W] int64 … position …
    temperature: Tensor  # [B * W] float32 … and temperature with which the nodes' children will be sampled


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
