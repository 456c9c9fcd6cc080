"""An engine's parts, made once: storage sized by the configuration, and what works on it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.cache import PageAllocator, PagedStore
from paceline.config import EngineConfig
from paceline.drafters.checkpoint import load_eagle
from paceline.drafters.eagle import Eagle
from paceline.drafters.eagle_drafter import EagleDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.drafting import Drafting
from paceline.engine.graphs import GRAPH_SIZES, GraphPool
from paceline.engine.limits import Limits
from paceline.engine.runner import Runner
from paceline.engine.scheduler import Scheduler
from paceline.engine.state import SlotState
from paceline.kernels import Ops, ops_for
from paceline.models.decoder import Decoder, Rope


class Parts(NamedTuple):
    ops: Ops
    scheduler: Scheduler
    store: PagedStore
    state: SlotState
    runner: Runner
    drafting: Drafting
    pipelined: bool
    """On a GPU the host works one step ahead of what it has read, and steps are captured graphs."""


def build(model: Decoder, drafter: str | Path | Eagle | None, config: EngineConfig) -> Parts:
    suffix, eagle = _drafters(drafter, model, config)
    shape, device, dtype = model.config, model.norm.device, model.norm.dtype
    capture = tuple(dict.fromkeys((*config.capture, *(eagle.config.feature_layers if eagle else ()))))
    bad = [layer for layer in capture if not -1 <= layer < shape.num_layers]
    if bad:
        raise ValueError(f"capture: layer {bad[0]} is not in -1..{shape.num_layers - 1}")
    layers = [(shape.num_kv_heads, shape.head_dim)] * (shape.num_layers + (eagle is not None))
    width = len(capture) * shape.hidden_size
    context = min(config.max_context or shape.max_context, shape.max_context)
    limits = Limits.of(config, device)
    num_pages = limits.num_pages(config, PagedStore.bytes_per_token(layers, width, dtype), context)
    ops = ops_for(device, dtype, config.deterministic, context, config.kernels)
    scheduler = Scheduler(PageAllocator(num_pages, config.page_size), limits.max_batch, limits.max_rows, context)
    length = scheduler.max_length
    store = PagedStore(num_pages, config.page_size, layers, width, dtype, device)
    state = SlotState(limits.max_batch, -(-length // config.page_size), config.page_size, num_pages, device)
    rope = Rope(shape, length + 1, dtype, device)
    pipelined = device.type == "cuda"
    row_sizes = config.row_sizes or (GRAPH_SIZES if pipelined else ())
    capturable = ops.name == "triton" and dtype != torch.float64
    graphs = GraphPool(device) if capturable and config.cuda_graphs else None
    runner = Runner(model, rope, store, state, ops, capture, graphs)
    learned = None
    if eagle is not None:
        columns = columns_of(capture, eagle.config.feature_layers, shape.hidden_size).to(device)
        learned = EagleDrafter(eagle.to(device, dtype), model, rope, ops, columns, config.tau)
    drafting = Drafting(state, store, ops, suffix, learned, config.suffix_tau, row_sizes, graphs)
    return Parts(ops, scheduler, store, state, runner, drafting, pipelined)


def columns_of(stored: tuple[int, ...], wanted: tuple[int, ...], hidden: int) -> Tensor:
    """Columns of the stored features that belong to the wanted layers, in their order."""
    return torch.cat([torch.arange(hidden) + stored.index(layer) * hidden for layer in wanted])


def _drafters(drafter: str | Path | Eagle | None, model: Decoder,
              config: EngineConfig) -> tuple[SuffixDrafter | None, Eagle | None]:
    if drafter is None or drafter == "none":
        return None, None
    suffix = SuffixDrafter(max_tokens=config.suffix_tokens, shared=config.suffix_scope == "all")
    if drafter == "suffix":
        return suffix, None
    return suffix, drafter if isinstance(drafter, Eagle) else load_eagle(drafter, model)
