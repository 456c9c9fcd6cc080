"""Per-request state on the device, indexed by slot. A step reads and advances it without involving the host."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.engine.command import PageEdits, SlotUpdates
from paceline.kernels import SlotTensors
from paceline.kernels.upload import upload

_FIELDS = {"context": torch.int64, "last_token": torch.int64, "seed": torch.int64, "shared": torch.int64,
           "temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
"""The fields of `SlotTensors` but the page table, those of eight bytes first."""


class SlotState:
    """Context length, last token, sampling parameters and page table of every slot, with one more slot for padding: a request
    that never ends, on the store's spare page, whose rows pad a step to one of the row sizes.

    All of it lies in one buffer of 32-bit words, so that whatever changes before a step is one upload and one scatter."""

    def __init__(self, max_batch: int, max_pages: int, page_size: int, spare_page: int, device: torch.device) -> None:
        self.device, self._spare_page, self._max_pages = device, spare_page, max_pages
        slots = max_batch + 1
        self.padding = max_batch
        """Slot of the padding request."""
        sizes = [dtype.itemsize // 4 * slots for dtype in _FIELDS.values()]
        self._starts = dict(zip((*_FIELDS, "page_table"), np.cumsum([0, *sizes]).tolist(), strict=True))
        """First word of every field."""
        self._words = torch.zeros(sum(sizes) + slots * max_pages, dtype=torch.int32, device=device)
        self.tensors = SlotTensors(**{name: self._field(name, size) for name, size in zip(_FIELDS, sizes, strict=True)},
                                   page_table=self._words[sum(sizes) :].view(slots, max_pages), page_size=page_size)
        self.tensors.top_p.fill_(1.0)
        self.tensors.page_table[self.padding] = spare_page
        self._lent: list[tuple[Tensor, Tensor]] = []
        """The part of every tensor that is lent, and what it held before."""

    def _field(self, name: str, size: int) -> Tensor:
        start = self._starts[name]
        return self._words[start : start + size].view(_FIELDS[name])

    def lend(self, num_requests: int, context: int) -> None:
        """Give the first slots to dummy requests; see `LendSlots`."""
        assert not self._lent, "they are lent already"
        self._lent = [(tensor[:num_requests], tensor[:num_requests].clone()) for tensor in self.tensors[:-1]]
        filled = context // self.tensors.page_size
        pages = torch.arange(num_requests * filled, dtype=torch.int32).view(num_requests, filled) % self._spare_page
        for (part, _), whole in zip(self._lent, self.tensors[:-1], strict=True):
            part[:] = whole[self.padding]
        self.tensors.page_table[:num_requests, :filled] = pages.to(self.device)

    def take_back(self) -> None:
        """End `lend`: the slots are as they were before."""
        for part, before in self._lent:
            part.copy_(before)
        self._lent = []

    def update(self, admitted: SlotUpdates, edits: PageEdits) -> None:
        """Write the slots of newly admitted requests, and new entries of the page table."""
        places = [self._starts["page_table"] + edits.slots * self._max_pages + edits.columns] if len(edits.slots) else []
        values = [edits.pages] if len(edits.slots) else []
        if len(admitted.slots):
            for name, dtype in _FIELDS.items():
                width = dtype.itemsize // 4
                first = self._starts[name] + width * admitted.slots
                places.append((first[:, None] + np.arange(width)).ravel())
                values.append(np.ascontiguousarray(getattr(admitted, name)).view(np.int32))
        if places:
            count = sum(map(len, places))
            both = np.empty(count + (count + 1) // 2, np.int64)  # places of eight bytes, then values of four
            np.concatenate(places, out=both[:count])
            np.concatenate(values, out=both[count:].view(np.int32)[:count])
            found = upload(both, self.device)
            self._words.index_copy_(0, found[:count], found[count:].view(torch.int32)[:count])
