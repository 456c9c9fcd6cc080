"""Per-request state on the device, indexed by slot. A step reads and advances it without involving the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from paceline.engine.command import PageEdits, SlotUpdates
from paceline.kernels import SlotTensors
from paceline.kernels.upload import upload


class SlotState:
    """Context length, last token, sampling parameters and page table of every slot, with one more slot for padding: a request
    that never ends, on the store's spare page, whose rows pad a step to one of the row sizes."""

    def __init__(self, max_batch: int, max_pages: int, page_size: int, spare_page: int, device: torch.device) -> None:
        self.device, self._spare_page = device, spare_page
        slots = max_batch + 1
        self.padding = max_batch
        """Slot of the padding request."""
        wide, real = (torch.zeros(slots, dtype=dtype, device=device) for dtype in (torch.int64, torch.float32))
        page_table = torch.zeros(slots, max_pages, dtype=torch.int32, device=device)
        page_table[self.padding] = spare_page
        self.tensors = SlotTensors(
            context=wide, last_token=wide.clone(), seed=wide.clone(), temperature=real, top_k=wide.int(), top_p=real + 1,
            min_p=real.clone(), shared=wide.clone(), page_table=page_table, page_size=page_size)

    @contextmanager
    def lent_slots(self, num_requests: int, context: int) -> Iterator[list[int]]:
        """Slots of dummy requests that read so many tokens of context, each from other pages, and write to the spare page.
        Afterwards the slots are as before. `context`: whole pages."""
        lent = [tensor[:num_requests] for tensor in self.tensors[:-1]]
        saved = [tensor.clone() for tensor in lent]
        filled = context // self.tensors.page_size
        pages = torch.arange(num_requests * filled, dtype=torch.int32).view(num_requests, filled) % self._spare_page
        try:
            for tensor, whole in zip(lent, self.tensors[:-1], strict=True):
                tensor[:] = whole[self.padding]
            self.tensors.page_table[:num_requests, :filled] = pages.to(self.device)
            yield list(range(num_requests))
        finally:
            for tensor, before in zip(lent, saved, strict=True):
                tensor.copy_(before)

    def update(self, admitted: SlotUpdates, edits: PageEdits) -> None:
        """Write the slots of newly admitted requests, and new entries of the page table."""
        if len(admitted.slots):
            integers = upload(np.stack([admitted.slots, admitted.context, admitted.last_token, admitted.seed, admitted.shared,
                                        admitted.top_k.astype(np.int64)]), self.device)
            reals = upload(np.stack([admitted.temperature, admitted.top_p, admitted.min_p]), self.device)
            slots, of = integers[0], self.tensors
            for tensor, values in zip((of.context, of.last_token, of.seed, of.shared, of.top_k), integers[1:], strict=True):
                tensor[slots] = values.to(tensor.dtype)
            for tensor, values in zip((of.temperature, of.top_p, of.min_p), reals, strict=True):
                tensor[slots] = values
        if len(edits.slots):
            slots, columns, pages = upload(np.stack(edits), self.device)
            self.tensors.page_table[slots, columns] = pages.int()
