"""A decoder of which this process holds one rank's part: layers of local size, products that sum over ranks, and a head that is
split by vocabulary. See `partition` for what is split, and how sums keep their bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.kernels import ExpertWeights, Ops
from paceline.models.attend import Attend
from paceline.models.config import ExpertsSpec, ModelConfig
from paceline.models.decoder import MLP, Decoder, Experts, Layer, Linear
from paceline.models.partition import Group, Partition, parts_of, share_bounds


class Sums:
    """Sums of products over all shares of K, on all ranks."""

    def __init__(self, partition: Partition, group: Group | None) -> None:
        """`group`: the ranks; None if there is one only."""
        assert (group is None) == (partition.size == 1)
        self.partition, self.group = partition, group

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, ops: Ops) -> Tensor:
        """x [R, K] @ weight [N, K]ᵀ + bias of this rank's part of K, summed over the ranks -> [R, N]."""
        total = self.over_ranks(ops.linear_shares(x, weight, self.partition.own_shares))
        return (total if bias is None else total + bias).to(x.dtype)

    def over_ranks(self, part: Tensor) -> Tensor:
        """The sum of all ranks' subtrees."""
        return part if self.group is None else tree_sum(self.group.gather(part))


def tree_sum(parts: Tensor) -> Tensor:
    """The sum over the first dimension, a power of two, as a binary tree."""
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


class SummedLinear(Linear):
    """A projection whose input is split over the ranks."""

    def __init__(self, whole: Linear, sums: Sums) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.weight, self.bias, self._sums = whole.weight, whole.bias, sums

    def forward(self, x: Tensor, ops: Ops) -> Tensor:  # type: ignore[override]
        return self._sums.product(x, self.weight, self.bias, ops)

    def product_weights(self) -> list[Tensor]:
        return []  # `Ops.linear_shares` lays them out by itself


class SplitHead(Linear):
    """The head. Every rank computes the logits of its part of the vocabulary; rank 0 puts them together."""

    def __init__(self, config: ModelConfig, sums: Sums, whole: bool, drafts: bool) -> None:
        """`whole`: all rows are here, because they are the embedding's or because a drafter needs them (`drafts`)."""
        self._rows = sums.partition.part(config.vocab_size)
        self._sums, self._whole, self._drafts, self._vocabulary = sums, whole, drafts, config.vocab_size
        super().__init__(config.hidden_size, config.vocab_size if whole else self._rows.stop - self._rows.start, bias=False)
        self._own: Tensor | None = None

    def logits(self, hidden: Tensor, ops: Ops) -> Tensor | None:
        """The logits [R, V] of hidden states [R, H]; None on other ranks than 0."""
        own, partition = ops.linear(hidden, self._own_rows()), self._sums.partition
        if self._sums.group is None:
            return own
        width = -(-self._vocabulary // partition.size)  # the ranks' parts may differ by one
        padded = own if own.shape[1] == width else torch.nn.functional.pad(own, (0, width - own.shape[1]))
        found = self._sums.group.gather_first(padded)
        if found is None:
            return None
        sizes = [Partition(rank, partition.size, partition.shares).part(self._vocabulary) for rank in range(partition.size)]
        return torch.cat([part[:, : rows.stop - rows.start] for part, rows in zip(found, sizes, strict=True)], dim=1)

    def product_weights(self) -> list[Tensor]:
        return [self._own_rows(), *([self.weight] if self._drafts and self._sums.group is not None else [])]

    def _own_rows(self) -> Tensor:
        """This rank's rows: always the same tensor, because kernels know weights by identity."""
        if not self._whole or self._sums.group is None:
            return self.weight
        rows = self.weight.detach()[self._rows]
        if self._own is None or self._own.data_ptr() != rows.data_ptr() or self._own.dtype != rows.dtype:
            self._own = rows
        return self._own


class ThinExperts(nn.Module):
    """All experts of a layer, of whose intermediate activations it has one share."""

    def __init__(self, count: int, width: int, hidden: int, bias: bool, down_bias: bool) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(count, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, width))
        self.gate_up_bias = nn.Parameter(torch.zeros(count, 2 * width)) if bias else None
        self.down_bias = nn.Parameter(torch.zeros(count, hidden)) if down_bias else None


class SplitExperts(nn.Module):
    """A mixture of experts, each of which is split over the ranks. The experts' outputs are added up in the router's order for
    every share, then over the shares."""

    def __init__(self, experts: Experts, spec: ExpertsSpec, hidden: int, sums: Sums) -> None:
        super().__init__()
        partition = sums.partition
        self.spec, self.activation, self.router, self._sums = spec, experts.activation, experts.router, sums
        self._index = experts.index
        self.thin = nn.ModuleList(
            ThinExperts(spec.count, b - a, hidden, spec.bias, spec.bias and partition.rank == 0 and share == 0)
            for share, (a, b) in enumerate(share_bounds(spec.size, partition.own_shares)))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        ops, logits = attend.ops, self.router(x, attend.ops)
        shares, chosen = ops.route(logits, self.spec.active, self.spec.normalised, None)
        if attend.routing is not None:
            x = attend.routing.observe(self._index, x, logits, chosen)
        wide = torch.promote_types(x.dtype, torch.float32)
        parts = [ops.experts(x, ExpertWeights(one.gate_up, one.gate_up_bias, one.down, one.down_bias, self.activation),  # type: ignore[arg-type]
                             shares, chosen).to(wide) for one in self.thin]
        return self._sums.over_ranks(tree_sum(torch.stack(parts))).to(x.dtype)

    def product_weights(self) -> list[Tensor]:
        """The weights of all matrix products."""
        return [weight for one in self.thin for weight in (one.gate_up, one.down)]  # type: ignore[misc]

    @property
    def products(self) -> tuple[nn.Module, ...]:
        return ()


def split_decoder(config: ModelConfig, partition: Partition, group: Group | None, drafts: bool = False) -> Decoder:
    """A decoder that is one rank's part of a policy, with uninitialised parameters: call it on the meta device. `drafts`: a
    learned drafter works here, which needs the whole head."""
    model = Decoder(partition.local(config))
    model.config, sums = config, Sums(partition, group)  # `local_config` stays
    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.attention.o = SummedLinear(layer.attention.o, sums)
        if isinstance(layer.mlp, MLP):
            layer.mlp.down = SummedLinear(layer.mlp.down, sums)
        else:
            layer.mlp = SplitExperts(layer.mlp, layer.mlp.spec, config.hidden_size, sums)  # type: ignore[assignment]
    whole_head = config.tie_embeddings or drafts or partition.size == 1
    model.head = SplitHead(config, sums, whole_head, drafts)
    if config.tie_embeddings:
        model.head.weight = model.embed.weight
    model.parts = parts_of(config, partition, whole_head)
    return model
