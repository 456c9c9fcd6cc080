"""What one rank of a tensor parallel executor does beside computing: it passes weights on, and takes rank 0's draft trees."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.drafters.tree import Drafts
from paceline.engine.collectives import RankGroup
from paceline.engine.command import LearnedDrafts
from paceline.engine.drafting import num_drafted
from paceline.models.config import ModelConfig
from paceline.models.partition import Part, Partition, parts_of
from paceline.models.state_dict import CutTensor, ParamSlice, region_of


class RankPart:
    """A rank's place among all ranks."""

    def __init__(self, config: ModelConfig, partition: Partition, group: RankGroup, draft_vocabulary: int | None,
                 device: torch.device) -> None:
        """`draft_vocabulary`: number of tokens that the learned drafter can draft; None if there is none."""
        self.partition, self.group = partition, group
        self._config, self._draft_vocabulary, self._device = config, draft_vocabulary, device
        self._parts: dict[int, dict[str, list[Part]]] = {}

    def share_drafts(self, wanted: LearnedDrafts, drafts: Drafts | None) -> Drafts:
        """Rank 0's draft trees, on every rank: so no rank can have others, whatever its device rounds. `drafts`: on rank 0."""
        assert self._draft_vocabulary is not None
        if drafts is not None:
            count = len(wanted.requests)  # lines of padding requests may follow
            self.group.broadcast(torch.stack((drafts.tokens[:count], drafts.parents[:count], drafts.depths[:count])))
            return drafts
        shape = 3, len(wanted.requests), num_drafted(wanted.strategy, self._draft_vocabulary)
        tokens, parents, depths = self.group.broadcast(torch.empty(shape, dtype=torch.int64, device=self._device)).unbind()
        return Drafts(tokens, parents, depths, torch.empty(0, device=self._device))

    def cut(self, tensor: Tensor, slot: ParamSlice, rank: int) -> Tensor | CutTensor:
        """What a rank needs of a checkpoint's tensor, on the host."""
        if rank not in self._parts:
            partition = Partition(rank, self.partition.size, self.partition.shares)
            self._parts[rank] = parts_of(self._config, partition, whole_head=self._config.tie_embeddings)
        region = region_of(slot, self._parts[rank])
        if region is None:
            return tensor.detach().to("cpu", copy=True)
        return CutTensor(region.of(tensor.detach()).to("cpu", copy=True), region, tuple(tensor.shape))
