"""What every kernel family offers. One object per device, chosen once (`kernels.ops_for`) and handed to the model.

A step is a flat list of rows. Rows of one request lie side by side and form a *segment*: its last token and the nodes of
its draft tree, or a chunk of its prompt. Every row's key and value are written into the paged cache before attention
reads it, so a segment's rows see the committed context through the page table and each other through the mask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from paceline.kernels.draft_rank import Ranked


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


class SamplingTensors(NamedTuple):
    """Per row to be sampled."""

    seed: Tensor  # [R] int64
    position: Tensor  # [R] int64 position of the token being drawn
    temperature: Tensor  # [R] float32; 0 = greedy
    top_k: Tensor  # [R] int32; 0 = all
    top_p: Tensor  # [R] float32
    min_p: Tensor  # [R] float32


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

    def plan_step(self, segments: Segments, num_rows: int, num_heads: int, cache: PagedCache,
                  chunks: list[tuple[int, int, int]]) -> Any:
        """What `attention` wants worked out once for all layers of a step. chunks: (slot, start, rows) of the prompt chunks,
        whose segments come last."""
        ...

    def attention(self, q: Tensor, cache: PagedCache, segments: Segments, scale: float, plan: Any = None) -> Tensor:
        """q [R, H, D] -> [R, H, D]; rows outside every segment come back as anything finite."""
        ...

    def sample(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        """Shared-noise sampling: logits [R, V] -> (token [R] int64, log-probability [R] of logits' precision)."""
        ...

    def draft_topk(self, logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, tau: float | Tensor, k: int,
                   token_ids: Tensor | None = None) -> Ranked:
        """The k likeliest to be drawn after each row: largest log q / tau + G; see `draft_rank`."""
        ...

    def gumbel(self, seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
        """G(seed, position, token): [R], [R], [V] int64 -> [R, V] float32."""
        ...
