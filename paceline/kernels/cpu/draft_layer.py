"""A small drafter in one call on a CPU, its layer or all of a tree: it has a few rows at a time, and what a dozen calls cost is
more than the work. Twins: `Eagle.forward` and `EagleDrafter.draft`, operation by operation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.base import DraftLayer, DraftRows, Lines, PagedCache
from paceline.kernels.cpu.call import address_of, addresses, double, run
from paceline.kernels.cpu.tree import TreeOps
from paceline.kernels.reference import draft_rows

FUSED_ROWS = 64
"""More rows than this are run operation by operation, if there are threads to share the work …"""
FUSED_ROWS_ALONE = 1024
"""… or else at most this many."""
_ANY_LENGTH = 1 << 59  # no segment is too long for the kernel
_PARTS = ("linear", "rope_write", "silu_mul", "attention")
_NO_ROWS = (0,) * 7  # number and addresses of segments


class DraftOps(TreeOps, ABC):
    """See `base.Ops`."""

    @abstractmethod
    def panels_of(self, weight: Tensor) -> Tensor | None:
        """What `linear` reads of a small weight; None: there is none, or it is stale."""

    def draft_layer(self, layer: DraftLayer, rows: DraftRows, state: Tensor, above: Tensor | None,
                    cache: PagedCache) -> Tensor | None:
        num_rows, segments = len(rows.tokens), rows.segments
        out = state.new_empty(num_rows, state.shape[1])
        words = self._words(layer, cache, state, num_rows, addresses(torch.int64, rows.tokens, rows.positions, rows.write),
                            0 if above is None else addresses(torch.int64, above)[0], out.data_ptr(),
                            (len(segments.row), *(field.data_ptr() for field in segments)))
        if words is None:
            return None
        run("draft_layer", state.dtype, 1, *words)
        return out

    def draft_tree(self, layer: DraftLayer, lines: Lines, state: Tensor, cache: PagedCache, tau: Tensor, depth: int, width: int,
                   budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        batch, dtype = len(lines.slots), state.dtype
        words = self._words(layer, cache, state, batch * width, (0, 0, 0), 0, 0, _NO_ROWS)
        head = None if layer.head is None else self.panels_of(layer.head)
        if words is None or head is None or layer.head is None:
            return None
        count = min(budget, width + (depth - 1) * width * width)
        tokens, parents, depths = torch.empty(3, batch, count, dtype=torch.int64).unbind()
        survival = torch.empty(batch, count)
        ids = 0 if layer.draft_ids is None else addresses(torch.int64, layer.draft_ids)[0]
        run("draft_tree", dtype, 1, address_of("draft_topk", dtype),
            *(address_of(name, torch.int64) for name in ("collect", "grow", "choose")), address_of("draft_layer", dtype),
            *addresses(torch.int64, lines.slots, lines.context, lines.seed), *addresses(torch.float32, tau), ids, head.data_ptr(),
            0 if layer.norm is None else layer.norm.data_ptr(), tokens.data_ptr(), parents.data_ptr(), depths.data_ptr(),
            survival.data_ptr(), batch, depth, width, count, layer.head.shape[0], *addresses(torch.float32, lines.temperature),
            *addresses(dtype, state), double(draft_rows.SHRINK), *words)
        return tokens, parents, depths, survival

    def _words(self, layer: DraftLayer, cache: PagedCache, state: Tensor, num_rows: int, rows: Sequence[int], above: int,
               out: int, segments: tuple[int, ...]) -> tuple[int, ...] | None:
        """What the kernel of the layer reads; None: it is not for this one."""
        dtype, (k, v, table, page_size) = state.dtype, cache
        matrices = [0 if weight is None else self._matrix(weight) for weight in layer[1:6]]
        most = FUSED_ROWS if torch.get_num_threads() > 1 else FUSED_ROWS_ALONE
        if -1 in matrices or not 0 < num_rows <= most or not dtype == layer.embed.dtype == k.dtype == layer.cos.dtype:
            return None
        _, num_kv_heads, head_dim = k.shape
        norms = (0 if norm is None else norm.data_ptr() for norm in (layer.mlp_norm, layer.input_norm, layer.hidden_norm))
        return (*rows, *addresses(dtype, layer.embed, state), above, out, *addresses(dtype, layer.cos, layer.sin), *matrices,
                *norms, *(address_of(name, dtype) for name in _PARTS), *addresses(dtype, k, v), *addresses(torch.int32, table),
                table.shape[1], page_size, num_rows, state.shape[1], layer.num_heads, num_kv_heads, head_dim, layer.down.shape[1],
                double(layer.eps), double(head_dim**-0.5), _ANY_LENGTH, *segments)

    def _matrix(self, weight: Tensor) -> int:
        panels = self.panels_of(weight)
        return -1 if panels is None else panels.data_ptr()
