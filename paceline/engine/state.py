"""Per-request state on the device, indexed by slot. A step reads and advances it without involving the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from paceline.engine.request import Request
from paceline.kernels import SlotTensors
from paceline.kernels.upload import upload


class SlotState:
    """Context length, last token, sampling parameters and page table of every slot, with one more slot for padding: a request
    that never ends, on the store's spare page, whose rows pad a step to one of the row sizes. On a CPU the tensors share
    memory with the host's arrays."""

    def __init__(self, max_batch: int, max_pages: int, page_size: int, spare_page: int, device: torch.device) -> None:
        self.device = device
        slots = max_batch + 1
        self.padding = max_batch
        """Slot of the padding request."""
        self._host: dict[str, np.ndarray] = {
            "context": np.zeros(slots, np.int64),
            "last_token": np.zeros(slots, np.int64),
            "seed": np.zeros(slots, np.int64),
            "temperature": np.zeros(slots, np.float32),
            "top_k": np.zeros(slots, np.int32),
            "top_p": np.ones(slots, np.float32),
            "min_p": np.zeros(slots, np.float32),
            "shared": np.zeros(slots, np.int64),
        }
        self._host_pages = np.zeros((slots, max_pages), np.int32)
        self._host_pages[self.padding] = spare_page
        tensors = {name: torch.from_numpy(array).to(device) for name, array in self._host.items()}
        self.tensors = SlotTensors(**tensors, page_table=torch.from_numpy(self._host_pages).to(device), page_size=page_size)
        self._num_pages = [0] * slots

    @contextmanager
    def lent_slots(self, num_requests: int, context: int) -> Iterator[list[int]]:
        """Slots of dummy requests that read so many tokens of context, each from other pages, and write to the spare page.
        Afterwards the slots are as before. `context`: whole pages."""
        lent = [tensor[:num_requests] for tensor in self.tensors[:-1]]
        saved = [tensor.clone() for tensor in lent]
        spare, filled = int(self._host_pages[self.padding, 0]), context // self.tensors.page_size
        pages = torch.arange(num_requests * filled, dtype=torch.int32).view(num_requests, filled) % spare
        try:
            for tensor, whole in zip(lent, self.tensors[:-1], strict=True):
                tensor[:] = whole[self.padding]
            self.tensors.page_table[:num_requests, :filled] = pages.to(self.device)
            yield list(range(num_requests))
        finally:
            for tensor, before in zip(lent, saved, strict=True):
                tensor.copy_(before)

    def update(self, admitted: list[Request], running: list[Request]) -> None:
        """Upload the slots of newly admitted requests, and the page tables of all running requests that got pages since the last
        step."""
        self._admit(admitted)
        self._update_pages(running)

    def _admit(self, requests: list[Request]) -> None:
        for request in requests:
            slot, params = request.slot, request.params
            seed = params.seed & (2**64 - 1)
            values = (len(request.tokens) - 1, request.tokens[-1], seed - 2**64 if seed >= 2**63 else seed,
                      params.temperature, params.top_k, params.top_p, params.min_p, request.num_shared)
            for array, value in zip(self._host.values(), values, strict=True):
                array[slot] = value
            self._num_pages[slot] = 0
        if self.device.type != "cpu" and requests:
            slots = [request.slot for request in requests]
            index = upload(slots, self.device)
            tensors = self.tensors._asdict()
            for name, array in self._host.items():
                tensors[name][index] = upload(array[slots], self.device)

    def _update_pages(self, requests: list[Request]) -> None:
        known = self._num_pages
        grown = [request for request in requests if len(request.pages) != known[request.slot]]
        changed = [request.slot for request in grown]
        for request, slot in zip(grown, changed, strict=True):
            self._host_pages[slot, known[slot] : len(request.pages)] = request.pages[known[slot] :]
            known[slot] = len(request.pages)
        if changed and self.device.type != "cpu":
            self.tensors.page_table[upload(changed, self.device)] = upload(self._host_pages[changed], self.device)
