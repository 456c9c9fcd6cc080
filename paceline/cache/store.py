"""The tensors of the KV cache: keys and values of every layer, hidden features, and the drafter's own keys and values.

All tensors are indexed by the same token slot (page * page_size + offset), so sharing, copying, compaction and migration of a
request move everything that belongs to a token together.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class LayerStore(NamedTuple):
    """Keys and values of one layer."""

    k: Tensor  # [T, Hkv, D]
    v: Tensor  # [T, Hkv, D]


class PagedStore:
    """All tensors that are indexed by token slot."""

    def __init__(self, num_pages: int, page_size: int, layers: list[tuple[int, int]], feature_size: int,
                 dtype: torch.dtype, device: torch.device | str) -> None:
        """`layers`: (KV heads, head size) of each layer; the drafter's is the last. There is one page more than the allocator
        knows: the padding request uses this spare page."""
        self.page_size, self.spare_page = page_size, num_pages
        self._shapes, self._feature_size, self._dtype, self._device = layers, feature_size, dtype, device
        self.layers: list[LayerStore] = []
        self.allocate()

    def allocate(self) -> None:
        """Allocate all tensors: at the beginning, and again after `release`."""
        total = (self.spare_page + 1) * self.page_size
        new = partial(torch.empty, dtype=self._dtype, device=self._device)
        # Uninitialised on purpose: on a CPU, pages take memory only when they are first written.
        self.layers = [LayerStore(*(new(total, heads, dim) for _ in "kv")) for heads, dim in self._shapes]
        self.features = new(total, self._feature_size) if self._feature_size else None
        self.tokens = torch.zeros(total, dtype=torch.int64, device=self._device)
        for tensor in self.tensors():
            tensor[self.spare_page * self.page_size :].zero_()

    def release(self) -> None:
        """Free the memory of all tensors."""
        self.layers, self.features, self.tokens = [], None, torch.zeros(0, dtype=torch.int64)

    @staticmethod
    def bytes_per_token(layers: list[tuple[int, int]], feature_size: int, dtype: torch.dtype) -> int:
        """Return the memory that one token takes in all tensors together, token ids apart."""
        return (sum(2 * heads * dim for heads, dim in layers) + feature_size) * dtype.itemsize

    def export_request(self, pages: list[int], num_tokens: int, on_device: bool = False) -> list[Tensor]:
        """Return copies of everything stored for a request's first `num_tokens` tokens, for another worker's `import_request`: on
        the host, or where it is."""
        slots = self.slots(pages, num_tokens)
        return [tensor[slots] if on_device else tensor[slots].cpu() for tensor in self.tensors()]

    def import_request(self, pages: list[int], tensors: list[Tensor]) -> None:
        """Store on these pages what another worker's `export_request` returned."""
        slots = self.slots(pages, len(tensors[0]))
        for mine, theirs in zip(self.tensors(), tensors, strict=True):
            mine[slots] = theirs.to(mine.device, mine.dtype)

    def slots(self, pages: list[int], num_tokens: int) -> Tensor:
        """Return the token slots [num_tokens] of the first positions of a request that holds `pages`."""
        slots = np.array(pages, np.int64)[:, None] * self.page_size + np.arange(self.page_size)
        found = torch.from_numpy(slots.reshape(-1)[:num_tokens])
        on_cpu = torch.device(self._device).type == "cpu"
        return found if on_cpu else found.pin_memory().to(self._device, non_blocking=True)

    def tensors(self) -> list[Tensor]:
        """Return all tensors that are indexed by token slot."""
        tensors = [self.tokens, *(tensor for layer in self.layers for tensor in layer)]
        return tensors if self.features is None else [*tensors, self.features]
