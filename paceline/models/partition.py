"""Which part of a policy a rank of a tensor parallel engine holds.

Products are split by output where their inputs are whole (qkv, gate and up, the head by vocabulary), and by input where a rank
has only a part of it (o, down). Those sum over ranks: the depth K is cut into a fixed number of *shares*, each share is one
product, and the shares are added up in a fixed binary tree. Every rank has consecutive shares, a subtree, so sums have the same
bits on 1, 2, 4, ... ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.models.config import ModelConfig

_VECTOR = 32
"""PyTorch computes so many elements of an activation at once on a CPU at most, and the remaining ones by another routine."""


class Group(Protocol):
    """What ranks tell each other. All of them make the same calls in the same order."""

    def gather(self, x: Tensor) -> Tensor:
        """The tensors x [...] of all ranks, on every rank: [ranks, ...]."""
        ...

    def gather_first(self, x: Tensor) -> Tensor | None:
        """The tensors x [...] of all ranks on rank 0: [ranks, ...]. None on the others."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's tensor, on every rank. The other ranks pass one of the same shape."""
        ...


@dataclass(frozen=True, slots=True)
class Partition:
    """One rank's part of a policy."""

    rank: int = 0
    size: int = 1
    """Number of ranks."""
    shares: int = 1
    """Number of shares of K in products that sum over ranks, over all ranks together."""

    def __post_init__(self) -> None:
        if self.shares & (self.shares - 1) or self.shares % self.size:
            raise ValueError(f"tensor_parallel: {self.size} ranks with reduction_shares {self.shares}: both have to be powers of "
                             "two, and there has to be at least one share for every rank")

    @property
    def own_shares(self) -> int:
        """Number of shares of one rank."""
        return self.shares // self.size

    def part(self, count: int) -> slice:
        """This rank's part of so many things."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def kv_part(self, config: ModelConfig) -> slice:
        """The key/value heads that this rank's query heads attend with; several ranks have the same if there are fewer heads than
        ranks."""
        if config.num_kv_heads >= self.size:
            return self.part(config.num_kv_heads)
        first = self.rank * config.num_kv_heads // self.size
        return slice(first, first + 1)

    def check(self, config: ModelConfig) -> None:
        """Raise a ValueError unless this policy can be split into so many parts."""
        if self.size == 1:
            return
        sizes = {"num_heads": config.num_heads, "intermediate_size": config.intermediate_size}
        for index in range(config.num_layers):
            experts = config.layer(index).experts
            if experts is not None:
                sizes["the size of an expert"] = experts.size
        for name, value in sizes.items():
            if value % self.size:
                raise ValueError(f"tensor_parallel: {name} {value} is not a multiple of {self.size}")
        if any(spec.activation == "gelu_tanh" for spec in config.layers) and config.intermediate_size // self.size % _VECTOR:
            raise ValueError(f"tensor_parallel: a rank's part of intermediate_size {config.intermediate_size} is not a multiple "
                             f"of {_VECTOR}, so that PyTorch's gelu would not have the bits of one rank")
        if config.num_kv_heads % self.size and self.size % config.num_kv_heads:
            raise ValueError(f"tensor_parallel: num_kv_heads {config.num_kv_heads} neither divides {self.size} nor is a multiple "
                             "of it")

    def local(self, config: ModelConfig) -> ModelConfig:
        """The sizes of this rank's layers."""
        self.check(config)
        kv = self.kv_part(config)
        layers = tuple(spec if spec.experts is None else
                       replace(spec, experts=replace(spec.experts, size=spec.experts.size // self.size))
                       for spec in config.layers)
        return replace(config, num_heads=config.num_heads // self.size, num_kv_heads=kv.stop - kv.start,
                       intermediate_size=config.intermediate_size // self.size, layers=layers)


class Part(NamedTuple):
    """Rows of a parameter of the whole policy that a rank has, and where."""

    start: int
    """First row in the whole parameter. A parameter [E, N, K] of experts has E * N rows."""
    length: int
    target: str
    """Name of the rank's parameter."""
    target_start: int = 0
    columns: slice | None = None
    """Columns of the whole parameter; None: all of them."""
    target_columns: slice | None = None

    @property
    def stop(self) -> int:
        return self.start + self.length


def share_bounds(depth: int, shares: int) -> list[tuple[int, int]]:
    """The shares of a depth: first column, and end."""
    return [(depth * i // shares, depth * (i + 1) // shares) for i in range(shares)]


def parts_of(config: ModelConfig, partition: Partition, whole_head: bool) -> dict[str, list[Part]]:
    """The parts of every parameter that is split, in order, by its name in the whole policy. The others are the same on all
    ranks. `whole_head`: this rank keeps the whole head."""
    found: dict[str, list[Part]] = {}
    if not whole_head:
        rows = partition.part(config.vocab_size)
        found["head.weight"] = [Part(rows.start, rows.stop - rows.start, "head.weight")]
    for index in range(config.num_layers):
        found |= _attention_parts(config, partition, f"layers.{index}.attention.")
        experts = config.layer(index).experts
        if experts is None:
            found |= _mlp_parts(config.intermediate_size, config.hidden_size, partition, f"layers.{index}.mlp.")
        else:
            found |= _expert_parts(experts.count, experts.size, config.hidden_size, partition, f"layers.{index}.mlp.")
    return found


def _attention_parts(config: ModelConfig, partition: Partition, name: str) -> dict[str, list[Part]]:
    heads, kv, dim = partition.part(config.num_heads), partition.kv_part(config), config.head_dim
    rows, place, target = [], 0, 0
    for part, count in ((heads, config.num_heads), (kv, config.num_kv_heads), (kv, config.num_kv_heads)):
        length = (part.stop - part.start) * dim
        rows.append((place + part.start * dim, length, target))
        place, target = place + count * dim, target + length
    found = {f"{name}qkv.{kind}": [Part(start, length, f"{name}qkv.{kind}", to) for start, length, to in rows]
             for kind in ("weight", "bias")}
    columns = slice(heads.start * dim, heads.stop * dim)
    found[f"{name}o.weight"] = [Part(0, config.hidden_size, f"{name}o.weight", columns=columns)]
    found[f"{name}sinks"] = [Part(heads.start, heads.stop - heads.start, f"{name}sinks")]
    return found


def _mlp_parts(inner: int, hidden: int, partition: Partition, name: str) -> dict[str, list[Part]]:
    own = partition.part(inner)
    length = own.stop - own.start
    found = {f"{name}gate_up.{kind}": [Part(own.start, length, f"{name}gate_up.{kind}"),
                                       Part(inner + own.start, length, f"{name}gate_up.{kind}", length)]
             for kind in ("weight", "bias")}
    found[f"{name}down.weight"] = [Part(0, hidden, f"{name}down.weight", columns=own)]
    return found


def _expert_parts(count: int, size: int, hidden: int, partition: Partition, name: str) -> dict[str, list[Part]]:
    """Every share has parameters of its own: thin experts."""
    first = partition.part(size).start
    bounds = [(first + a, first + b) for a, b in share_bounds(size // partition.size, partition.own_shares)]
    gate_up, down, bias = [], [], []
    for share, (a, b) in enumerate(bounds):
        width, target = b - a, f"{name}thin.{share}."
        for expert in range(count):
            gate_up += [Part(2 * expert * size + a, width, f"{target}gate_up", 2 * expert * width),
                        Part((2 * expert + 1) * size + a, width, f"{target}gate_up", (2 * expert + 1) * width)]
        down.append(Part(0, count * hidden, f"{target}down", columns=slice(a, b)))
        bias += [Part(0, count, f"{target}gate_up_bias", 0, slice(a, b), slice(0, width)),
                 Part(0, count, f"{target}gate_up_bias", 0, slice(size + a, size + b), slice(width, 2 * width))]
    with_bias = [Part(0, count, f"{name}thin.0.down_bias")] if partition.rank == 0 else []
    return {f"{name}gate_up": sorted(gate_up), f"{name}down": down, f"{name}gate_up_bias": bias, f"{name}down_bias": with_bias}
