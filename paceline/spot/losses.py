"""What a drafter is held to. Mathematics only: no state. p is the policy's distribution, q the drafter's.

Each objective has two faces: the value alone, differentiable, as the formula reads; and value with gradient with respect to the
drafter's logits, worked out on the spot, which is what `target_loss` uses chunk by chunk (on a GPU a kernel does all of a chunk).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def step_weights(unroll: int, decay: float) -> list[float]:
    """Step k weighs decay^k; together 1."""
    raw = [decay**k for k in range(unroll)]
    return [x / sum(raw) for x in raw]


def hidden_distance(own: Tensor, wanted: Tensor) -> Tensor:
    """SmoothL1 [..., H] -> [...]: the mean over H of d²/2 where |d| < 1 and of |d| - 1/2 beyond."""
    return F.smooth_l1_loss(own, wanted.expand_as(own), reduction="none").mean(-1)


def cross_entropy(logits: Tensor, policy_logits: Tensor) -> Tensor:
    """-Σ p log q, [..., V] -> [...]."""
    return -(policy_logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def overlap(logits: Tensor, policy_logits: Tensor) -> Tensor:
    """Σ min(p, q) = 1 - total variation, [..., V] -> [...]. Two samplers that share their Gumbel noise draw the same token with a
    chance between (1 - TV) / (1 + TV) and 1 - TV, so raising the overlap is raising the acceptance."""
    return torch.minimum(policy_logits.softmax(-1), logits.softmax(-1)).sum(-1)


def disagreement(logits: Tensor, policy_logits: Tensor) -> Tensor:
    """-log Σ min(p, q). Total variation itself hardly pulls on tokens that q thinks impossible; its logarithm does: where the
    policy is certain this is the cross-entropy, where it is not it asks for the overlap and nothing else."""
    return -torch.minimum(policy_logits.log_softmax(-1), logits.log_softmax(-1)).logsumexp(-1)


class Pulled(NamedTuple):
    value: Tensor  # [...]
    gradient: Tensor  # [..., V] of each value with respect to the drafter's logits


def cross_entropy_pull(log_q: Tensor, log_p: Tensor) -> Pulled:
    """d/dz of -Σ p log q is q - p."""
    p = log_p.exp()
    return Pulled(-(p * log_q).sum(-1), log_q.exp() - p)


def disagreement_pull(log_q: Tensor, log_p: Tensor) -> Pulled:
    """With r = min(p, q) / Σ min(p, q) and A = {v: q < p}: d/dz of -log Σ min(p, q) is q Σ_A r - r on A, q Σ_A r elsewhere."""
    smaller = torch.minimum(log_p, log_q)
    total = smaller.logsumexp(-1, keepdim=True)
    rising = smaller.sub_(total).exp_().mul_(log_q < log_p)  # r on A
    return Pulled(-total[..., 0], log_q.exp().mul_(rising.sum(-1, keepdim=True)).sub_(rising))


PULLS: dict[str, Callable[[Tensor, Tensor], Pulled]] = {"cross_entropy": cross_entropy_pull, "agreement": disagreement_pull}


class Heads(NamedTuple):
    """What turns hidden states into logits, over the drafter's vocabulary."""

    drafter: Tensor  # [V, H]
    policy: Tensor  # [V, H] the same tensor unless the drafter has a head of its own
    temperature: float


class TargetLoss(NamedTuple):
    """Weighted sums by unroll step, each [J]. Only the first has a gradient."""

    loss: Tensor
    overlap: Tensor
    top1: Tensor  # the drafter's likeliest token is the policy's


def target_loss(own: Tensor, wanted: Tensor, weight: Tensor, heads: Heads, objective: str, most: int | None = None,
                fused: bool | None = None) -> TargetLoss:
    """own [J, R, H] the drafter's hidden states, wanted [R, H] the policy's, weight [J, R].

    Logits exist for a chunk of rows at a time (`most` elements), so a large vocabulary does not fill the memory. Over a reduced
    vocabulary both distributions are those given that the token is in it. fused: by Triton's kernel; None: where it can be."""
    if most is None:
        most = 2**22 if own.device.type == "cpu" else 2**27
    if fused is None:
        fused = own.is_cuda and heads.policy.dtype in (torch.bfloat16, torch.float16) and find_spec("triton") is not None
    pull = partial(_fused if fused else _plain, temperature=heads.temperature, objective=objective)
    return TargetLoss(*_Chunked.apply(own, wanted, weight, heads.drafter, heads.policy, pull, most))


class _Chunked(torch.autograd.Function):
    """The gradient is worked out together with the value: the backward pass needs no second product with the head."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, wanted: Tensor, weight: Tensor, head: Tensor, policy_head: Tensor,
                pull: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]], most: int) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(own)
        head_gradient = torch.zeros_like(head) if ctx.needs_input_grad[3] else None
        loss, shared, top1 = (weight.new_zeros(len(own)) for _ in range(3))
        narrow, wide = head.to(policy_head.dtype), own.dtype
        size = max(1, most // (len(own) * len(head)))
        for first in range(0, len(wanted), size):
            rows = slice(first, first + size)
            each = weight[:, rows]  # [J, c]
            p = wanted[rows].to(policy_head.dtype) @ policy_head.T
            q = own[:, rows].to(narrow.dtype) @ narrow.T
            pulled, *sums = pull(q, p, each)
            for total, found in zip((loss, shared, top1), sums, strict=True):
                total += (each * found).sum(-1)
            gradient[:, rows] = (pulled @ narrow).to(wide)
            if head_gradient is not None:
                head_gradient += (pulled.flatten(0, 1).T @ own[:, rows].flatten(0, 1).to(narrow.dtype)).to(head.dtype)
        ctx.save_for_backward(gradient, head_gradient)
        ctx.mark_non_differentiable(shared, top1)
        return loss, shared, top1

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """A head of the drafter's own takes the sum over steps, so they must then be weighed alike from outside."""
        gradient, head_gradient = ctx.saved_tensors
        head = None if head_gradient is None else head_gradient * outer[0].mean()
        return gradient * outer[0][:, None, None], None, None, head, None, None, None


def _plain(q: Tensor, p: Tensor, weight: Tensor, temperature: float, objective: str) -> tuple[Tensor, ...]:
    """Logits q [J, c, V] and p [c, V] -> gradient of weight * value with respect to q; value, overlap and top-1 [J, c]."""
    log_p, log_q = ((x.to(weight.dtype) / temperature).log_softmax(-1) for x in (p, q))
    shared = torch.minimum(log_p, log_q).exp_().sum(-1)
    top1 = log_q.argmax(-1) == log_p.argmax(-1)
    value, pulled = PULLS[objective](log_q, log_p.expand_as(log_q))
    return pulled.mul_(weight[..., None] / temperature).to(q.dtype), value, shared, top1


def _fused(q: Tensor, p: Tensor, weight: Tensor, temperature: float, objective: str) -> tuple[Tensor, ...]:
    """The same in one kernel, into q."""
    from paceline.kernels.triton.loss import pull_  # only where Triton is

    return q, *pull_(q, p, weight, temperature, objective == "agreement")
