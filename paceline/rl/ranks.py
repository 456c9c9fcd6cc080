"""Training on several ranks: processes that each hold a shard of every model (FSDP2) and run a share of the micro-batches.

Every rank is given all samples of a batch and makes the same calls of the learner in the same order. The gradients of all ranks
are summed, so an update does not depend on the number of ranks, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from paceline.rl.batch import MicroBatch, Sample
from paceline.rl.models import Policy, Scorer

_ONE_UNIT_BYTES = 64 << 20
"""Gathering a model of at most this size layer by layer would save little memory and take a collective per layer and pass."""


class Ranks:
    """The processes that train together. Without a mesh: this process alone, which needs no torch.distributed."""

    def __init__(self, mesh: DeviceMesh | None = None, one_unit_bytes: int = _ONE_UNIT_BYTES) -> None:
        """`mesh`: one-dimensional, over all ranks; its process group must be initialized. Models of at most `one_unit_bytes` are
        gathered as a whole, larger ones layer by layer."""
        self._mesh, self._one_unit_bytes = mesh, one_unit_bytes
        self.rank = 0 if mesh is None else mesh.get_local_rank()
        self.size = 1 if mesh is None else mesh.size()

    @property
    def is_sharded(self) -> bool:
        """Whether models are sharded, if only over one rank."""
        return self._mesh is not None

    def shard(self, model: Policy | Scorer) -> None:
        """Keep only this rank's part of every parameter. Whole layers of a large model exist one at a time, while they are
        computed; if it is on the host, it is moved to the mesh's device layer by layer, so it never has to fit there."""
        if self._mesh is None:
            return
        if isinstance(model, Policy):
            model.sharded = True
        size = sum(parameter.nbytes for parameter in model.parameters())
        for part in (*(model.model.layers if size > self._one_unit_bytes else ()), model):
            sharded = fully_shard(part, mesh=self._mesh, reshard_after_forward=True)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # in float32 and bfloat16 it would be an operation that gloo lacks
        for method in ("logprobs", "values", "scores"):  # what is called instead of `forward`
            if hasattr(model, method):
                register_fsdp_forward_method(model, method)

    def micro_batch_tokens(self, samples: Sequence[Sample], largest: int) -> int:
        """Size of micro-batches with which every rank has about the same work, at most `largest`."""
        return min(largest, -(-sum(len(sample.tokens) for sample in samples) // self.size))

    def share(self, batches: list[MicroBatch]) -> list[MicroBatch]:
        """This rank's micro-batches, equally many on all ranks because each takes part in every pass. Where there are too few,
        one that counts for nothing is repeated: it has no members and no weight."""
        mine = batches[self.rank :: self.size]
        if batches and len(mine) < -(-len(batches) // self.size):
            small = min(batches, key=lambda batch: len(batch.tokens))
            mine.append(small._replace(weights=torch.zeros_like(small.weights), members=()))
        return mine

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Maximum over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self._mesh is None:
            return values
        found = values.to(self._mesh.device_type, copy=True)
        dist.all_reduce(found, operation, self._mesh.get_group())
        return found.to(values.device)


def full(tensor: Tensor) -> Tensor:
    """The whole tensor. If it is sharded, all ranks must call this, in the same order."""
    return next(gathered([("", tensor)]))[1]


def gathered(named: Iterable[tuple[str, Tensor]], group_bytes: int = _ONE_UNIT_BYTES) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor as a whole. Sharded tensors are gathered in groups of about `group_bytes`, so all ranks must go through
    the whole iterator."""
    group: list[tuple[str, DTensor]] = []
    for name, tensor in named:
        if not isinstance(tensor, DTensor) or not tensor.placements[0].is_shard():
            yield from _gather(group)
            group = []
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            continue
        if group and (tensor.dtype != group[0][1].dtype or sum(member.nbytes for _, member in group) >= group_bytes):
            yield from _gather(group)
            group = []
        group.append((name, tensor))
    yield from _gather(group)


def _gather(group: Sequence[tuple[str, DTensor]]) -> Iterator[tuple[str, Tensor]]:
    """Not by `DTensor.full_tensor`, whose collective crashes on GPUs where the process group is gloo's."""
    if not group:
        return
    mesh, parts = group[0][1].device_mesh, [local(tensor).detach().flatten() for _, tensor in group]
    rows = [-(-tensor.shape[0] // mesh.size()) for _, tensor in group]  # of the largest part
    sizes = [n * prod(tensor.shape[1:]) for n, (_, tensor) in zip(rows, group, strict=True)]
    mine = parts[0].new_zeros(sum(sizes))
    for place, part in zip(mine.split(sizes), parts, strict=True):
        place[: len(part)] = part
    everyone = mine.new_empty(mesh.size(), len(mine))
    dist.all_gather(list(everyone), mine, mesh.get_group())
    for (name, tensor), found in zip(group, everyone.split(sizes, dim=1), strict=True):
        yield name, found.reshape(-1, *tensor.shape[1:])[: tensor.shape[0]]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: all of it, unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor that every rank has, sharded as `like` is."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def put_together(part: Tensor, like: Tensor) -> Tensor:
    """The sharded tensor of which this rank has `part`, sharded as `like` is; the inverse of `local`."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and values of the parameters that are trained."""
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
