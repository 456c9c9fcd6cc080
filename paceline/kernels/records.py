"""The tensors that pass through `Ops`, in records.

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

from typing import Any, Literal, NamedTuple

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
