"""How much one engine holds: what the configuration says, or what suits the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from paceline.config import EngineConfig


class Limits(NamedTuple):
    max_batch: int
    max_rows: int
    kv_bytes: int
    free_bytes: int | None
    """What the device has left; None on a CPU, where pages cost memory only when they are written."""

    @classmethod
    def of(cls, config: EngineConfig, device: torch.device) -> Limits:
        on_gpu = device.type == "cuda"
        free = torch.cuda.mem_get_info(device)[0] if on_gpu else None
        batch = config.max_batch or (256 if on_gpu else 64)
        rows = max(config.max_rows or (8192 if on_gpu else 512), batch)
        given = None if config.kv_memory_gb is None else int(config.kv_memory_gb * 2**30)
        return cls(batch, rows, given or (int(0.85 * free) if free is not None else 2 << 30), free)

    def num_pages(self, config: EngineConfig, bytes_per_token: int, context: int) -> int:
        """Pages of the cache: no more than every slot at full context could use, no more than there is room for."""
        tokens = config.kv_tokens or self.kv_bytes // bytes_per_token
        pages = max(1, min(tokens, self.max_batch * (context + config.page_size)) // config.page_size)
        wanted = (pages + 1) * config.page_size * bytes_per_token
        if self.free_bytes is not None and wanted > self.free_bytes:
            free_gb = self.free_bytes / 2**30
            raise ValueError(f"kv_memory_gb: the cache wants {wanted / 2**30:.1f} GiB, the device has {free_gb:.1f} GiB free; "
                             "lower kv_memory_gb, kv_tokens or max_context")
        return pages
