"""The executor: the device's half of an engine. It owns the policy, the KV cache, the learned drafter, the CUDA graphs and the
state of every slot, and does what commands say (`command.py`).

It knows no request and takes no decisions. The same commands on an executor with the same weights give the same outputs, bit for
bit, so recorded commands can be replayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from paceline.cache import PagedStore
from paceline.config import EngineConfig
from paceline.drafters.eagle_drafter import EagleDrafter
from paceline.drafters.tree import Drafts
from paceline.engine.command import (
    Command,
    DummyCatchUp,
    DummyDraft,
    DummyStep,
    EndScoring,
    ExportPages,
    HostDrafts,
    ImportPages,
    LendSlots,
    LoadDrafter,
    LoadWeights,
    NewWeights,
    ObservedTrees,
    ReadFeatures,
    ReturnSlots,
    ScoreTokens,
    Sleep,
    StepCommand,
    StepOutputs,
    TokenMasks,
    UpdateEnd,
    Wake,
)
from paceline.engine.downloads import Download, record_event
from paceline.engine.failures import describe_error
from paceline.engine.grammar import Grammars
from paceline.engine.graphs import CudaGraphs
from paceline.engine.learned_drafting import LearnedDrafting
from paceline.engine.logit_adjustments import LogitAdjustments
from paceline.engine.rank_part import RankPart
from paceline.engine.ranks import Ranks
from paceline.engine.rows import RowBuilder, StepRows
from paceline.engine.runner import Chunks, Runner
from paceline.engine.scoring import Scorer
from paceline.engine.state import SlotState
from paceline.engine.token_masks import TokenMasker
from paceline.engine.weights import PolicyWeights, copy_drafter, offload, prepare_linears, restore
from paceline.kernels import Ops
from paceline.kernels.upload import upload
from paceline.models.decoder import Decoder
from paceline.models.state_dict import ParamSlice

_LOOK_S = 2e-5
"""Seconds between two looks whether a step is done."""


class PendingStep(NamedTuple):
    """A step that is queued on the device."""

    num_rows: int
    """Number of rows, padding included."""
    sampled: Download
    """Tokens, log-probabilities, raw log-probabilities and numbers of tokens."""
    observed: Download | None
    """Tokens, parents, depths and survival of draft trees, if they are observed."""
    ranks: Ranks | None = None
    """The other ranks that take part in the step."""

    def wait(self) -> None:
        """Wait for the step."""
        while self.ranks is not None and not self.sampled.has_arrived:
            self.ranks.require_alive()  # for a rank that has died the device would wait for ever
            time.sleep(_LOOK_S)
        self.sampled.wait()

    def read(self) -> StepOutputs:
        """Wait for the step and return its outputs."""
        self.wait()
        tokens, logprobs, raw, counts = self.sampled.optional_arrays()
        assert tokens is not None and logprobs is not None
        drafts = None if self.observed is None else ObservedTrees(*self.observed.arrays())
        return StepOutputs(tokens, logprobs, raw, counts, drafts)


class Executor:
    """Runs commands on one device."""

    def __init__(self, model: Decoder, config: EngineConfig, ops: Ops, store: PagedStore, state: SlotState, graphs: CudaGraphs,
                 runner: Runner, learned: LearnedDrafting | None, feature_columns: Tensor | None, grammars: Grammars | None,
                 split: RankPart | None = None, ranks: Ranks | None = None) -> None:
        """`feature_columns`: columns of the stored features that `ReadFeatures` returns; None if it returns none. `split`: this
        rank's place among those that the policy is split over. `ranks`: on rank 0, the others."""
        self.model, self.config, self.ops, self.store, self.state, self.graphs = model, config, ops, store, state, graphs
        self.runner, self.learned, self._feature_columns = runner, learned, feature_columns
        self.rows = RowBuilder(graphs, ops, state.padding, state.device)
        self._weights, self._masker = PolicyWeights(model), None if grammars is None else TokenMasker(grammars)
        self._split, self.ranks = split, ranks
        self.is_asleep = False
        scorer = Scorer(model, runner)
        self._handlers: dict[type, Callable[[Any], Any]] = {
            StepCommand: self._step, ExportPages: self._export, ImportPages: self._import, ReadFeatures: self._read_features,
            LoadWeights: self._load_weights, LoadDrafter: self._load_drafter, Sleep: self._sleep, Wake: self._wake,
            DummyStep: self._dummy_step, DummyDraft: self._dummy_draft, DummyCatchUp: self._dummy_catch_up,
            LendSlots: self._lend_slots, ReturnSlots: self._return_slots,
            ScoreTokens: scorer.score, EndScoring: scorer.end,
        }
        self._prepare_weights()

    @property
    def device(self) -> torch.device:
        return self.state.device

    @property
    def eagle(self) -> EagleDrafter | None:
        """The learned drafter, if there is one."""
        return None if self.learned is None else self.learned.eagle

    def execute(self, command: Command) -> Any:
        """Do what a command says. A `StepCommand` is queued without waiting for it and returns a `PendingStep`; what other
        commands return is in their docstrings."""
        handler = self._handlers[type(command)]
        return handler(command) if self.ranks is None else self._on_all_ranks(self.ranks, command, handler)

    def _on_all_ranks(self, ranks: Ranks, command: Command, handler: Callable[[Any], Any]) -> Any:
        if isinstance(command, ReadFeatures | LoadDrafter | DummyDraft | DummyCatchUp):
            return handler(command)  # features and the learned drafter are rank 0's alone
        ranks.require_alive()
        if isinstance(command, LoadWeights):
            return self._load_weights_everywhere(ranks, command)
        if isinstance(command, ImportPages):
            tensors, pages, own, each = list(command.tensors), command.pages, len(self.store.tensors()), self._num_of_policy
            ranks.send_each(lambda rank: ImportPages(pages, tensors[own + (rank - 1) * each : own + rank * each]))
            command = ImportPages(pages, tensors[:own])
        else:
            ranks.send(command)
        with ranks.together():
            found = handler(command)
        answers = ranks.replies() if isinstance(command, ExportPages | ImportPages | Sleep | Wake) else []
        return [*found, *(tensor for answer in answers for tensor in answer)] if isinstance(command, ExportPages) else found

    @property
    def stored_dtypes(self) -> list[torch.dtype]:
        """Data types of the tensors that `ExportPages` returns."""
        own = self.store.tensors()
        return [tensor.dtype for tensor in own + own[: self._num_of_policy] * (0 if self.ranks is None else self.ranks.size - 1)]

    @property
    def _num_of_policy(self) -> int:
        """Number of stored tensors that every rank has: tokens, and the policy's keys and values."""
        return 1 + 2 * self.model.config.num_layers

    def require_weights(self) -> None:
        """Raise RuntimeError if the policy's weights are incomplete, the executor sleeps, or it has ended with a rank."""
        if self.ranks is not None:
            self.ranks.require_open()
        if self.is_asleep:
            raise RuntimeError("step: the engine is asleep; call wake() first")
        self._weights.require_complete()

    def reject_weights(self, error: BaseException) -> None:
        """The engine could not take note of new weights: no step may run with them."""
        self._weights.mark_incomplete(error)

    # -- steps

    @torch.inference_mode()
    def _step(self, command: StepCommand) -> PendingStep:
        self.state.update(command.admitted, command.page_edits)
        self.runner.copy_pages(command.copies)
        started = record_event(self.device)
        drafts = self._drafts(command)
        rows = self._rows(command, drafts)
        observed = None
        if command.observe and rows.survival is not None:
            # Before verification: captured graphs share memory, and it may overwrite what the drafter's graph left there.
            observed = Download.start(rows.tree.tokens, rows.tree.parents, rows.tree.depths, rows.survival)
        edits = None
        if command.edits is not None:
            edits = LogitAdjustments(command.edits, self.device, self._masks(command, command.edits.masks, drafts))
        output = self.runner.run(rows, _chunks(command), command.raw_logprobs, adjustments=edits)
        counts = output.num_drawn if rows.max_depth or rows.has_forced else None  # otherwise every request gets one token
        sampled = Download.start(output.tokens, output.logprobs, output.raw_logprobs, counts, started=started)
        return PendingStep(rows.num_rows, sampled, observed, self.ranks)

    def _rows(self, command: StepCommand, drafts: Drafts | None) -> StepRows:
        """Lay out a step for the way in which it runs."""
        if self.runner.runs_in_one_call(command):
            return self.rows.build_for_one_call(command, drafts)
        return self.rows.build(command, drafts)

    def _masks(self, command: StepCommand, masks: TokenMasks | None,
               drafts: Drafts | None) -> Callable[[], tuple[np.ndarray, np.ndarray]] | None:
        """Return what computes the masks of a step's rows. What the learned drafter has drafted is on its way to the host."""
        if masks is None or self._masker is None:
            return None
        masker = self._masker
        if isinstance(command.draft, HostDrafts) or drafts is None:
            trees = None if command.draft is None else tuple(command.draft.nodes[:2])  # type: ignore[union-attr]
            return lambda: masker.masks(masks, trees)
        download = Download.start(drafts.tokens, drafts.parents)
        return lambda: masker.masks(masks, (download.arrays()[0], download.arrays()[1]))

    def _drafts(self, command: StepCommand) -> Drafts | None:
        """Return the step's draft trees on the device."""
        found = command.draft
        if found is None:
            return None
        if not isinstance(found, HostDrafts):
            drafts = None if self.learned is None else self.learned.draft(found, command.slots[found.requests])
            return drafts if self._split is None else self._split.share_drafts(found, drafts)
        if not command.max_depth:
            return None
        tokens, parents, depths = upload(found.nodes, self.device).unbind()
        return Drafts(tokens, parents, depths, torch.from_numpy(found.survival))

    @torch.inference_mode()
    def _dummy_step(self, command: DummyStep) -> None:
        if command.context is not None:
            self.state.tensors.context[: len(command.command.slots)] = command.context
        self.runner.run(self._rows(command.command, self._drafts(command.command)), [], capture_now=True)

    def dummy_rows(self, command: DummyStep) -> StepRows:
        """Lay out a step of padding requests that runs later."""
        return self.rows.build(command.command, self._drafts(command.command), keep=True)

    @torch.inference_mode()
    def _lend_slots(self, command: LendSlots) -> None:
        self.state.lend(command.num_requests, command.context)

    @torch.inference_mode()
    def _return_slots(self, command: ReturnSlots) -> None:
        self.state.take_back()

    @torch.inference_mode()
    def _dummy_draft(self, command: DummyDraft) -> None:
        if self.learned is not None and command.strategy.drafter == "eagle":
            self.learned.draft_dummy(command.num_requests, command.strategy)

    @torch.inference_mode()
    def _dummy_catch_up(self, command: DummyCatchUp) -> None:
        assert self.learned is not None
        self.learned.catch_up_dummy(command.num_requests, command.missing)

    # -- pages

    def _export(self, command: ExportPages) -> list[Tensor]:
        return self.store.export_request(command.pages, command.num_tokens, command.on_device)

    def _import(self, command: ImportPages) -> None:
        self.store.import_request(command.pages, list(command.tensors))

    def _read_features(self, command: ReadFeatures) -> Tensor | None:
        if self.store.features is None or self._feature_columns is None:
            return None
        return self.store.features[self.store.slots(command.pages, command.num_tokens)][:, self._feature_columns]

    # -- weights and memory

    def _load_weights(self, command: LoadWeights) -> None:
        self._weights.replace(command.state, self._on_new_weights)

    def _load_weights_everywhere(self, ranks: Ranks, command: LoadWeights) -> None:
        """Replace the weights of all ranks, tensor by tensor: no rank has the whole policy. What is refused is refused here."""
        ranks.send(LoadWeights(()))
        error: str | None = None
        try:
            self._weights.replace(command.state, self._on_new_weights, self._pass_on)
        except BaseException as problem:
            error = describe_error(problem)
            raise
        finally:
            ranks.send(UpdateEnd(error))
            ranks.replies()

    def _pass_on(self, name: str, tensor: Tensor, slot: ParamSlice) -> None:
        """Send every rank its part of a tensor."""
        assert self.ranks is not None and self._split is not None
        split = self._split
        self.ranks.send_each(lambda rank: NewWeights(name, split.cut(tensor, slot, rank)))

    def _on_new_weights(self) -> None:
        self._prepare_weights()
        if self.eagle is not None and not self.is_asleep:  # otherwise `Wake` does it
            self.eagle.policy_changed()

    def _load_drafter(self, command: LoadDrafter) -> None:
        assert self.eagle is not None
        copy_drafter(command.drafter, into=self.eagle.module)
        self._on_new_weights()  # it may have another reduced vocabulary

    def _sleep(self, command: Sleep) -> None:
        if not self.is_asleep:
            self.runner.release_cache()
            self.is_asleep = True
        if command.weights:
            discard = command.weights == "discard"
            if discard:
                self._weights.discard(command.keep if self.model.parts is None else ())  # a part's memory is its own
            offload(self._modules()[1:] if discard else self._modules())
            if self.eagle is not None:
                self.eagle.module.policy_changed()  # also frees the rows that it gathered from the policy's head
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _wake(self, command: Wake) -> None:
        if self.is_asleep:
            restore(self._modules(), self.device)
            self._weights.allocate()
            self.runner.allocate_cache()
            if self.eagle is not None:
                self.eagle.policy_changed()
            self.is_asleep = False

    def _prepare_weights(self) -> None:
        if self.config.pack_weights or self.device.type != "cpu":  # only CPU kernels keep a copy
            prepare_linears(self._modules(), self.ops)

    def _modules(self) -> list[nn.Module]:
        return [self.model] if self.eagle is None else [self.model, self.eagle.module]


def _chunks(command: StepCommand) -> Chunks:
    """Return the forced rows of a step for the kernels of long prompts."""
    if not command.num_forced_rows:
        return []
    chosen = command.forced > 0
    fields = (command.slots, command.starts, command.forced)
    return list(zip(*(field[chosen].tolist() for field in fields), strict=True))
