"""Construction of planner and executor: limits from the configuration and the device, storage of that size, and what works on
it."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from paceline.cache import PageAllocator, PagedStore
from paceline.config import EngineConfig
from paceline.drafters.checkpoint import check_drafter_folder, load_eagle
from paceline.drafters.eagle import Eagle, feature_columns
from paceline.drafters.eagle_drafter import EagleDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.collectives import RankGroup
from paceline.engine.drafting import Drafting
from paceline.engine.executor import Executor
from paceline.engine.grammar import Grammars
from paceline.engine.graphs import GRAPH_SIZES, CudaGraphs, GraphPool
from paceline.engine.learned_drafting import LearnedDrafting
from paceline.engine.planner import Planner
from paceline.engine.rank_part import RankPart
from paceline.engine.ranks import Ranks
from paceline.engine.rows import INPUTS_PER_ROW
from paceline.engine.runner import Runner
from paceline.engine.scheduler import Scheduler
from paceline.engine.state import SlotState
from paceline.engine.strategy_control import StrategyControl
from paceline.kernels import PLAIN_ATTENTION, Ops, ops_for
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder, Layer, Rope
from paceline.models.parallel import split_decoder
from paceline.models.partition import Partition
from paceline.models.weights import empty_model, load_model
from paceline.strategy import AnyStrategy, FixedSelector, Selector, make_selector

logger = logging.getLogger(__name__)

_LOADING_S = 3600.0
"""Seconds that a rank may take to read its part of the weights."""


def check_speculation(drafter: str | Path | Eagle | None, strategy: AnyStrategy) -> None:
    """Raises a ValueError if the strategy is not one, the drafter is neither a name nor a learned drafter that is there, or the
    strategy uses a drafter that this engine would not have. Nothing is loaded."""
    selector, has_learned = make_selector(strategy), has_learned_drafter(drafter)
    if has_learned and isinstance(drafter, str | Path):
        check_drafter_folder(drafter)
    require_drafter(selector, has_learned, drafter not in (None, "none"))


def has_learned_drafter(drafter: str | Path | Eagle | None) -> bool:
    """Whether this names a learned drafter, or is one."""
    return drafter not in (None, "suffix", "none")


def require_drafter(selector: Selector, has_learned: bool, has_suffix: bool) -> None:
    """Raises a ValueError if a fixed strategy uses a drafter that there is not."""
    if not isinstance(selector, FixedSelector):
        return
    strategy = selector.strategy
    if strategy.drafter == "eagle" and not has_learned:
        raise ValueError(f"strategy {strategy}: it needs a learned drafter; set drafter to the folder of one")
    if strategy.drafter == "suffix" and not has_suffix:
        raise ValueError(f"strategy {strategy}: it needs the suffix drafter, but drafter is none")


class RankPlan(NamedTuple):
    """What a rank needs to build its part of an executor."""

    model: ModelConfig
    partition: Partition
    dtype: torch.dtype
    source: str | None
    """Where the policy's weights are read from; None: rank 0 sends them."""
    config: EngineConfig
    num_pages: int
    max_batch: int
    max_context: int
    max_length: int
    draft_vocabulary: int | None


def build(model: Decoder, tokenizer: Any, drafter: str | Path | Eagle | None, strategy: AnyStrategy, config: EngineConfig,
          ranks: Ranks | None = None, source: str | None = None) -> tuple[Planner, Executor]:
    """Build the two halves of an engine for this policy. `ranks`: the other ranks, if it is split; they build their parts of
    the executor and read their weights from `source`, or are sent them later if it is None."""
    suffix, eagle = _drafters(drafter, model, config)
    shape, device, dtype = model.config, model.norm.device, model.norm.dtype
    capture = tuple(dict.fromkeys((*config.capture, *(eagle.config.feature_layers if eagle else ()))))
    bad = [layer for layer in capture if not -1 <= layer < shape.num_layers]
    if bad:
        raise ValueError(f"capture: layer {bad[0]} is not in -1..{shape.num_layers - 1}")
    layers = _policy_layers(model)
    if eagle is not None:
        layers.append((eagle.config.model.num_kv_heads, eagle.config.model.head_dim))
    width = len(capture) * shape.hidden_size
    context = min(config.max_context or shape.max_context, shape.max_context)
    limits = Limits.of(config, device, 1 if ranks is None else ranks.num_on(device))
    num_pages = limits.num_pages(config, PagedStore.bytes_per_token(layers, width, dtype), context)
    ops = _ops(model, config, context)
    scheduler = Scheduler(PageAllocator(num_pages, config.page_size), limits.max_batch, limits.max_rows, context)
    length = scheduler.max_length
    store = PagedStore(num_pages, config.page_size, layers, width, dtype, device)
    state = SlotState(limits.max_batch, -(-length // config.page_size), config.page_size, num_pages, device)
    pipelined = device.type == "cuda"
    group = None if ranks is None else ranks.group
    graphs = _graphs(config, ops, state, dtype, pipelined, group)
    learned = None
    if eagle is not None:
        columns = _column_index(capture, eagle.config.feature_layers, shape.hidden_size, device)
        own_rope = Rope(eagle.config.model, length + 1, dtype, device)
        # Tokens do not depend on drafts, so on a GPU the drafter may sum in any order.
        own_ops = ops_for(device, dtype, False, context, config.kernels) if pipelined else ops
        drafts = EagleDrafter(eagle.to(device, dtype), model, own_rope, own_ops, columns, config.tau)
        learned = LearnedDrafting(drafts, state, store, graphs, config.tau)
    runner = Runner(model, Rope(shape, length + 1, dtype, device), store, state, ops, capture, graphs, learned, group)
    recorded = _column_index(capture, config.capture, shape.hidden_size, device) if config.capture else None
    grammars = Grammars(tokenizer, shape.vocab_size, shape.eos_token_ids)
    vocabulary, split = None if eagle is None else eagle.draft_vocab_size, None
    if ranks is not None:
        partition = Partition(0, ranks.size, config.num_shares)
        assert group is not None
        split = RankPart(shape, partition, group, vocabulary, device)
        ranks.send(RankPlan(shape, partition, dtype, source, config, num_pages, limits.max_batch, context, length, vocabulary))
        ranks.replies(_LOADING_S)
    executor = Executor(model, config, ops, store, state, graphs, runner, learned, recorded, grammars, split, ranks)
    drafting = Drafting(suffix, config.suffix_tau, vocabulary, config.tau)
    return Planner(scheduler, drafting, StrategyControl(strategy), tokenizer, grammars, pipelined), executor


def build_rank(plan: RankPlan, device: torch.device, group: RankGroup) -> Executor:
    """Build the part of an executor of another rank than 0: neither a drafter nor features."""
    make = partial(split_decoder, partition=plan.partition, group=group)
    if plan.source is None:
        model = empty_model(plan.model, plan.dtype, device, make)
    else:
        model = load_model(plan.source, device, plan.dtype, quiet=True, check_manifest=False, make=make)[0]
    config, dtype, page_size = plan.config, plan.dtype, plan.config.page_size
    ops = _ops(model, config, plan.max_context)
    store = PagedStore(plan.num_pages, page_size, _policy_layers(model), 0, dtype, device)
    state = SlotState(plan.max_batch, -(-plan.max_length // page_size), page_size, plan.num_pages, device)
    graphs = _graphs(config, ops, state, dtype, device.type == "cuda", group)
    rope = Rope(plan.model, plan.max_length + 1, dtype, device)
    runner = Runner(model, rope, store, state, ops, (), graphs, None, group)
    split = RankPart(plan.model, plan.partition, group, plan.draft_vocabulary, device)
    return Executor(model, config, ops, store, state, graphs, runner, None, None, None, split)


def _policy_layers(model: Decoder) -> list[tuple[int, int]]:
    """Number of key/value heads and head size of the layers that are here."""
    return [(model.local_config.num_kv_heads, model.config.head_dim)] * model.config.num_layers


def _ops(model: Decoder, config: EngineConfig, context: int) -> Ops:
    device, dtype = model.norm.device, model.norm.dtype
    ops = ops_for(device, dtype, config.deterministic, context, config.kernels, whole_depth=config.num_shares > 1)
    _require_kernels(model, ops)
    return ops


def _require_kernels(model: Decoder, ops: Ops) -> None:
    """Raise a ValueError if these kernels lack what the policy's layers need."""
    special = [index for index, layer in enumerate(cast("list[Layer]", list(model.layers)))
               if layer.attention.form is not PLAIN_ATTENTION]
    if special and ops.name == "triton" and model.norm.dtype != torch.float64:
        raise ValueError(f"kernels: layer {special[0]} has a sliding window, sinks or a cap on its scores, which the Triton "
                         "kernels do not compute yet; set kernels = torch, which is slow, or generate on a CPU")


def _graphs(config: EngineConfig, ops: Ops, state: SlotState, dtype: torch.dtype, on_gpu: bool,
            group: RankGroup | None) -> CudaGraphs:
    """Return the captured steps of an executor, of which there are none yet, and the sizes that its steps are padded to."""
    row_sizes = config.row_sizes or (GRAPH_SIZES if on_gpu else ())
    capturable = ops.name == "triton" and dtype != torch.float64
    if group is not None:
        capturable &= group.is_capturable
        if on_gpu and not group.is_capturable:
            logger.info("steps are not captured as CUDA graphs: the ranks share a GPU and exchange through the host")
    pool = GraphPool(state.device) if capturable and config.cuda_graphs else None
    if pool is not None and group is not None:
        pool.max_bytes = 1 << 62  # dropped graphs would be captured again on some ranks only, which would wait for each other
    if on_gpu and config.cuda_graphs and not capturable and group is None:
        logger.info("steps are not captured as CUDA graphs: %s kernels in %s cannot be captured", ops.name, dtype)
    return CudaGraphs(row_sizes, state.padding, state.device, INPUTS_PER_ROW, pool)


class Limits(NamedTuple):
    """How much one engine holds: what the configuration says, or defaults for the device."""

    max_batch: int
    """Largest number of requests that run at the same time."""
    max_rows: int
    """Largest number of rows of one step."""
    kv_bytes: int
    """Memory for the KV cache, in bytes."""
    free_bytes: int | None
    """Free device memory; None on a CPU, where pages take memory only when they are first written."""

    @classmethod
    def of(cls, config: EngineConfig, device: torch.device, sharing: int = 1) -> Limits:
        """Return the limits of a configuration on a device, which so many ranks share."""
        on_gpu = device.type == "cuda"
        free = torch.cuda.mem_get_info(device)[0] // sharing if on_gpu else None
        batch = config.max_batch or (256 if on_gpu else 64)
        rows = max(config.max_rows or (8192 if on_gpu else 512), batch)
        given = None if config.kv_memory_gb is None else int(config.kv_memory_gb * 2**30)
        return cls(batch, rows, given or (int(0.85 * free) if free is not None else 2 << 30), free)

    def num_pages(self, config: EngineConfig, bytes_per_token: int, context: int) -> int:
        """Return the number of pages of the KV cache: no more than every slot could use at full context, and no more than fit
        into the memory."""
        tokens = config.kv_tokens or self.kv_bytes // bytes_per_token
        pages = max(1, min(tokens, self.max_batch * (context + config.page_size)) // config.page_size)
        wanted = (pages + 1) * config.page_size * bytes_per_token
        if self.free_bytes is not None and wanted > self.free_bytes:
            free_gb = self.free_bytes / 2**30
            raise ValueError(f"kv_memory_gb: the KV cache needs {wanted / 2**30:.1f} GiB, but the device has {free_gb:.1f} GiB "
                             "free; lower kv_memory_gb, kv_tokens or max_context")
        return pages


def _column_index(captured: tuple[int, ...], layers: tuple[int, ...], hidden_size: int, device: torch.device) -> Tensor:
    """Return the columns of the captured features that belong to these layers, in their order."""
    return torch.cat([torch.arange(part.start, part.stop) for part in feature_columns(captured, layers, hidden_size)]).to(device)


def _drafters(drafter: str | Path | Eagle | None, model: Decoder,
              config: EngineConfig) -> tuple[SuffixDrafter | None, Eagle | None]:
    """Load the drafters: none, the suffix drafter alone, or the suffix drafter and a learned one."""
    if drafter is None or drafter == "none":
        return None, None
    suffix = SuffixDrafter(int(config.suffix_memory_gb * 2**30), shared=config.suffix_scope == "all")
    if drafter == "suffix":
        return suffix, None
    return suffix, drafter if isinstance(drafter, Eagle) else load_eagle(drafter, model)
