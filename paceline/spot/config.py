"""How a drafter is trained: frozen, unknown keys are errors, every default written once."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from paceline.config import Config
from paceline.drafters.eagle import Form

TrainingForm = Literal["eagle", "hass", "eagle3"]
Objective = Literal["cross_entropy", "agreement"]


class Recipe(NamedTuple):
    """What a form and an objective come to."""

    unroll: int
    decay: float
    hidden_weight: float
    target_weight: float


RECIPES: dict[TrainingForm, Recipe] = {
    "eagle": Recipe(1, 1.0, 1.0, 0.1),
    "hass": Recipe(3, 1.0, 1.0, 0.1),
    "eagle3": Recipe(7, 0.8, 0.0, 1.0),
}
_AGREEMENT_WEIGHT = 1.0
"""Of the agreement loss: unlike a cross-entropy it goes to zero by itself, so features need not hold it up."""


class SpotConfig(Config):
    """A drafter's training. Two trainers with the same one and the same records give the same weights."""

    form: TrainingForm = "hass"
    """eagle: one step on the policy's features; hass: more, on the drafter's own; eagle3: three layers fused, seven steps."""
    objective: Objective = "agreement"
    """What the drafter's distribution is held to: cross-entropy to the policy's, or -log of how often shared noise makes both
    draw the same token."""
    unroll: int | None = Field(None, ge=1, le=16)
    """Steps on own outputs, the first (on the policy's) included; None: the form's."""
    decay: float | None = Field(None, gt=0, le=1)
    """Step k weighs decay^k; None: the form's."""
    hidden_weight: float | None = Field(None, ge=0)
    """Of SmoothL1 to the policy's next features; None: the form's."""
    target_weight: float | None = Field(None, ge=0)
    """Of the objective; None: the form's."""
    temperature: float = Field(1.0, gt=0)
    """That rollouts are drawn at: both distributions are taken there."""
    feature_noise: float = Field(0.0, ge=0)
    """Uniform noise on features while training, in parts of their root mean square."""
    lr: float | None = Field(None, gt=0)
    """None: 0.5 / hidden size."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    warmup_steps: int = Field(20, ge=0)
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up, down to `min_lr_ratio` at `total_steps` and on from there (cosine)."""
    total_steps: int = Field(1000, ge=1)
    min_lr_ratio: float = Field(0.05, ge=0, le=1)
    average: float = Field(0.98, ge=0, lt=1)
    """A moving average of the weights is what is published: good at any moment, without knowing when training ends. 0: none."""
    head_start: int = Field(0, ge=0)
    """Steps that the drafter given has behind it: the average leaves it as slowly as after so many."""
    step_tokens: int | None = Field(None, ge=1)
    """Tokens drawn for one optimizer step; None: 512 on a CPU, 8192 on a GPU."""
    micro_batch_tokens: int | None = Field(None, ge=1)
    """Answers are packed side by side up to this many tokens, a longer one goes alone; training yields between such
    micro-batches. None: 1024 on a CPU, 12288 on a GPU: one for most steps, which end with the answer that fills them."""
    max_length: int = Field(8192, ge=3)
    """Longer answers are cut behind so many tokens, their prompts included."""
    seed: int = 0

    def resolved(self, hidden_size: int, on_gpu: bool) -> SpotConfig:
        """With every size filled in."""
        return self.model_copy(update={
            "lr": self.lr or 0.5 / hidden_size, "step_tokens": self.step_tokens or (8192 if on_gpu else 512),
            "micro_batch_tokens": self.micro_batch_tokens or (12288 if on_gpu else 1024)})

    @property
    def module_form(self) -> Form:
        return "eagle3" if self.form == "eagle3" else "eagle"

    @property
    def recipe(self) -> Recipe:
        base = RECIPES[self.form]
        if self.objective == "agreement":
            base = base._replace(target_weight=max(base.target_weight, _AGREEMENT_WEIGHT))
        given = {name: getattr(self, name) for name in Recipe._fields if getattr(self, name) is not None}
        return base._replace(**given)
