"""Configuration of drafter training. It is frozen, and unknown keys are errors."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import Field

from paceline.config import Config
from paceline.drafters.eagle import MIN_WINDOW, Form
from paceline.optim import Schedule

TrainingForm = Literal["eagle", "hass", "eagle3"]
ObjectiveName = Literal["cross_entropy", "agreement"]


class Recipe(NamedTuple):
    """Settings of the loss that follow from the training form and the objective."""

    unroll: int
    decay: float
    hidden_weight: float
    target_weight: float


RECIPES: dict[TrainingForm, Recipe] = {
    "eagle": Recipe(1, 1.0, 1.0, 0.1),
    "hass": Recipe(3, 1.0, 1.0, 0.1),
    "eagle3": Recipe(7, 0.8, 0.0, 1.0),
}
_DRAFT_VOCAB = 32768
_AGREEMENT_WEIGHT = 1.0
"""Weight of the agreement objective. Unlike a cross-entropy it converges to zero, so it needs no support by the feature loss."""


class SpotConfig(Config):
    """Configuration of drafter training. Two trainers with the same config and the same records end with the same weights."""

    form: TrainingForm = "hass"
    """Training scheme. `eagle`: one step on the policy's features. `hass`: the same drafter unrolled on its own features.
    `eagle3`: three layers of the policy fused, unrolled for seven steps."""
    objective: ObjectiveName = "agreement"
    """Objective for the drafter's distribution. `cross_entropy`: cross-entropy to the policy's distribution. `agreement`:
    negative log-overlap with it, which bounds how often policy and drafter sample the same token from shared noise."""
    unroll: int | None = Field(None, ge=1, le=16)
    """Number of unroll steps, including the first one on the policy's features. None uses the form's default."""
    decay: float | None = Field(None, gt=0, le=1)
    """Weight of unroll step k relative to step k - 1. None uses the form's default."""
    hidden_weight: float | None = Field(None, ge=0)
    """Weight of the SmoothL1 loss to the policy's next features. None uses the form's default."""
    target_weight: float | None = Field(None, ge=0)
    """Weight of the objective. None uses the form's default."""
    draft_vocab: int | None = Field(None, ge=0)
    """Number of tokens that a new drafter can predict: the most frequent ones of the captured answers. 0: all. None: 32,768 if
    the policy's vocabulary is more than twice as large, because most of a drafter's time would go into its head."""
    window: int | None = Field(1024, ge=MIN_WINDOW)
    """Number of tokens before its draft that a new drafter attends to. None: all of them. A drafter predicts worse where it
    attends to more tokens than in training, and the policy's hidden states know what was said before. Longer answers are trained
    on in parts."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of the rollouts, at which both distributions are compared."""
    feature_noise: float = Field(0.0, ge=0)
    """Amplitude of uniform noise on the features during training, relative to their root mean square."""
    lr: float | None = Field(None, gt=0)
    """Learning rate. None means 0.5 / hidden size."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Betas of AdamW."""
    eps: float = Field(1e-8, gt=0)
    """Epsilon of AdamW."""
    weight_decay: float = Field(0.01, ge=0)
    """Weight decay of AdamW. It applies to matrices only."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this norm."""
    warmup_steps: int = Field(20, ge=0)
    """Number of optimizer steps over which the learning rate rises linearly."""
    schedule: Schedule = "constant"
    """Learning-rate schedule after the warm-up. `linear` and `cosine` fall to `min_lr_ratio` at the end of training, if its
    length is known (`total_steps` or `total_seconds`), and stay there."""
    total_steps: int | None = Field(None, ge=1)
    """Number of optimizer steps after which training ends. None: it is not known."""
    total_seconds: float | None = Field(None, gt=0)
    """Seconds of training after which it ends; the learning rate then follows the time, so two trainers no longer end with the
    same weights. None: it is not known."""
    min_lr_ratio: float = Field(0.05, ge=0, le=1)
    """Final learning rate of a schedule relative to `lr`."""
    average: float = Field(0.98, ge=0, lt=1)
    """Decay of the moving average of the weights. The average is what is published, as it is good at any time without knowing
    when training ends. 0 publishes the weights themselves."""
    step_tokens: int | None = Field(None, ge=1)
    """Number of tokens drawn for one optimizer step. None means 512 on a CPU and 12288 on a GPU."""
    micro_batch_tokens: int | None = Field(None, ge=1)
    """Number of tokens that answers are packed up to in one micro-batch; a longer one, or part, has one of its own. Training
    can be interrupted between micro-batches. None means 1024 on a CPU and 16384 on a GPU, which is one for most steps."""
    max_length: int | None = Field(None, ge=3)
    """Answers are truncated to this many tokens, prompt included. None: they are not."""
    seed: int = 0
    """Seed of drawing records and of the feature noise."""

    @classmethod
    def for_drafter(cls, module_form: Form, /, **settings: Any) -> SpotConfig:
        """Returns the configuration to train a drafter of this architecture, with these fields."""
        return cls(**{**({"form": "eagle3"} if module_form == "eagle3" else {}), **settings})

    def resolved(self, hidden_size: int, on_gpu: bool) -> SpotConfig:
        """Returns a copy in which the defaults that depend on the policy and the device are filled in."""
        return self.model_copy(update={
            "lr": self.lr or 0.5 / hidden_size, "step_tokens": self.step_tokens or (12288 if on_gpu else 512),
            "micro_batch_tokens": self.micro_batch_tokens or (16384 if on_gpu else 1024)})

    def draft_vocab_for(self, vocab_size: int) -> int:
        """Number of tokens that a new drafter of a policy with this vocabulary can predict; 0: all."""
        if self.draft_vocab is not None:
            return self.draft_vocab
        return _DRAFT_VOCAB if vocab_size > 2 * _DRAFT_VOCAB else 0

    @property
    def module_form(self) -> Form:
        """Architecture of the drafter that this training form trains."""
        return "eagle3" if self.form == "eagle3" else "eagle"

    @property
    def recipe(self) -> Recipe:
        """Settings of the loss: the form's defaults, overridden by the fields that were given."""
        base = RECIPES[self.form]
        if self.objective == "agreement":
            base = base._replace(target_weight=max(base.target_weight, _AGREEMENT_WEIGHT))
        given = {name: getattr(self, name) for name in Recipe._fields if getattr(self, name) is not None}
        return base._replace(**given)
