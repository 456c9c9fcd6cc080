"""The load-balancing loss and figures of routers."""

from __future__ import annotations

from copy import deepcopy

import pytest
import tiny
import torch
from samples import random_samples
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from paceline.config import LearnerConfig, OptimizerConfig
from paceline.kernels import TorchOps
from paceline.models.decoder import Experts
from paceline.models.routing import Routing, RoutingTotals, load_balancing_loss
from paceline.rl import Learner, make_algorithm, pack
from paceline.rl.adapters import plain_name
from paceline.rl.models import Policy


def test_the_loss_is_transformers():
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    _, chosen = TorchOps().route(logits, 2, True)
    loss, rows = load_balancing_loss(logits, chosen)
    wanted = load_balancing_loss_func((logits,), 6, 2)
    torch.testing.assert_close(loss, wanted.double(), rtol=1e-6, atol=0)
    assert rows.sum() == 100 and rows.tolist() == chosen.flatten().bincount(minlength=6).tolist()
    ours, theirs = (torch.autograd.grad(value, logits)[0] for value in (loss, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-9)


def test_an_even_load_has_the_smallest_loss():
    even = torch.eye(4).repeat(3, 1) * 0.1
    assert load_balancing_loss(even, TorchOps().route(even, 1, True)[1])[0] == pytest.approx(1)
    busy = torch.zeros(12, 4)
    busy[:, 1] = 5
    assert load_balancing_loss(busy, TorchOps().route(busy, 1, True)[1])[0] > 3


def test_figures_are_those_of_all_micro_batches():
    totals = RoutingTotals()
    for chosen in ([[0, 1], [0, 2]], [[0, 1]]):
        routing = Routing()
        routing.observe(3, torch.zeros(len(chosen), 5), torch.zeros(len(chosen), 4), torch.tensor(chosen))
        totals.add(routing, len(chosen))
    found = totals.metrics(lambda values: values)
    assert found["router/unused"] == 0.25 and found["router/max_load"] == 3 / 1.5
    assert found["router/aux_loss"] == pytest.approx(2.0)  # all probabilities are equal
    assert RoutingTotals().metrics(lambda values: values) == {}


@pytest.mark.parametrize("config", [{}, {"gradient_checkpointing": True}, {"exact_logprobs": True}], ids=str)
def test_the_gradient_of_the_loss_is_added(config):
    """The difference that the loss makes is the gradient of the mean loss of all layers over all rows."""
    found = []
    for balance in (0.0, 0.5):
        learner = Learner(deepcopy(tiny.model("qwen3_moe")), make_algorithm("grpo", 16),
                          LearnerConfig(router_aux_loss=balance, micro_batch_tokens=40, **config), OptimizerConfig(), 1, 1.0,
                          torch.float64)
        samples = random_samples(3, 3)
        for number, sample in enumerate(samples):
            sample.advantages = torch.full((sample.num_answer,), 0.5 - number % 3, dtype=torch.float64)
        gradients: dict[str, torch.Tensor] = {}
        learner._apply = lambda losses, policy=learner.policy, into=gradients: into.update(
            {plain_name(name): parameter.grad.clone() for name, parameter in policy.model.named_parameters()}) or {}
        metrics = learner.update(samples, 0)
        assert metrics["router/aux_loss"] > 2 * 0.9
        found.append(gradients)
    model = deepcopy(tiny.model("qwen3_moe")).requires_grad_()
    batches = pack(samples, 40)
    assert len(batches) > 1
    losses = []
    for batch in batches:
        logits = []
        hooks = [layer.mlp.router.register_forward_hook(lambda module, args, out, into=logits: into.append(out))
                 for layer in model.layers if isinstance(layer.mlp, Experts)]
        Policy(model, torch.float64).hidden(batch)
        for hook in hooks:
            hook.remove()
        parts = [load_balancing_loss(each, TorchOps().route(each, 2, True)[1])[0] for each in logits]
        losses.append(torch.stack(parts).mean() * len(batch.tokens))
    loss = torch.stack(losses).sum() / sum(len(batch.tokens) for batch in batches)
    wanted = torch.autograd.grad(0.5 * loss, list(model.parameters()), allow_unused=True)
    for (name, _), grad in zip(model.named_parameters(), wanted, strict=True):
        difference = found[1][name] - found[0][name]
        torch.testing.assert_close(difference, torch.zeros_like(difference) if grad is None else grad, atol=1e-8, rtol=1e-6)
