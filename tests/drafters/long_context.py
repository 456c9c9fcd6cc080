"""Drafts of a random drafter behind long prompts, on any device and with any kernels. Tokens do not depend on drafts, so nothing
else would notice that a drafter misreads its context."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline import Engine, SamplingParams, Strategy
from paceline.config import EngineConfig
from paceline.drafters.eagle import Form
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.spot import fresh_eagle
from paceline.types import Decision, StepOutcome, StepView

SHAPE = ModelConfig("qwen2", 61, 64, 48, 2, 4, 2, 16, max_context=8192, qkv_bias=True)


class Observing:
    """A fixed strategy, every step of which is observed."""

    def __init__(self, strategy: str) -> None:
        self.decision = Decision(Strategy.parse(strategy), observe=True)

    def select(self, view: StepView) -> Decision:
        return self.decision

    def observe(self, outcome: StepOutcome) -> None:
        pass

    def drafter_replaced(self) -> None:
        pass


def drafts_behind_long_prompts(lengths: Sequence[int], device: str, dtype: torch.dtype, kernels: str = "auto",
                               form: Form = "eagle", seed: int = 1, window: int | None = None,
                               strategy: str = "eagle:d1w4v4") -> torch.Tensor:
    """The probabilities [prompts, 4] that the drafter gave the likeliest of the first draft tokens behind random prompts of these
    lengths."""
    plain = Decoder.random(SHAPE, 0, 0.35, torch.float64)
    policy = Decoder(SHAPE).to(device, dtype)
    policy.load_state_dict(plain.state_dict())
    drafter = fresh_eagle(plain, form, window=window)
    with torch.no_grad():  # the layer reads its context
        drafter.attention.qkv.weight *= 2
        drafter.attention.o.weight.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(2))
    config = EngineConfig(kernels=kernels, kv_tokens=2 * max(lengths), max_batch=4, profile=False)
    engine = Engine(policy.requires_grad_(False), drafter=drafter.to(device, dtype), strategy="off", config=config)
    generator, params = torch.Generator().manual_seed(seed), SamplingParams(max_new_tokens=4, seed=3, temperature=8.0)
    found = []
    for length in lengths:
        prompt, steps = torch.randint(0, SHAPE.vocab_size, (length,), generator=generator).tolist(), []
        engine.generate([prompt], params, 1, strategy=Observing(strategy), on_step=steps.append)
        drafted = [step.drafts for step in steps if step.num_requests and step.drafts is not None]  # without the last prompt's
        found.append(next(drafts.survival[:4] for drafts in drafted if len(drafts.survival)))
    return torch.stack([torch.as_tensor(each).double() for each in found])
