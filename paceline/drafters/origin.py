"""Which policy a drafter was trained for: its shape, a hash of a sample of its weights, and its version in the run."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import torch

from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder

_SAMPLED = 32
"""Values of every tensor: enough to tell two steps of training apart, few enough to read at once."""


@dataclass(frozen=True, slots=True)
class Origin:
    shape: str
    """Like `qwen2 hidden 1536 layers 28 heads 12/2x128 mlp 8960 vocabulary 151936`."""
    weights: str
    """Hash of a sample of every tensor, rounded to bfloat16: the same policy in another dtype is the same."""
    version: int = 0
    """Policy version, counted by the run that trained the drafter."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: object) -> Origin | None:
        """None: nothing was written, or not by us."""
        if not isinstance(found, dict) or not found.keys() >= {"shape", "weights", "version"}:
            return None
        return cls(str(found["shape"]), str(found["weights"]), int(found["version"]))

    def differs(self, policy: Decoder) -> str | None:
        """What to say of this drafter beside a policy with other weights; None: it was trained for these."""
        here = origin_of(policy)
        if here.shape == self.shape and here.weights == self.weights:
            return None
        return (f"the drafter was trained for other weights (policy {self.weights}, version {self.version}) than this policy's "
                f"({here.weights}): fewer of its guesses may be right; tokens do not change")


def shape_of(config: ModelConfig) -> str:
    return (f"{config.architecture} hidden {config.hidden_size} layers {config.num_layers} heads {config.num_heads}/"
            f"{config.num_kv_heads}x{config.head_dim} mlp {config.intermediate_size} vocabulary {config.vocab_size}")


@torch.no_grad()
def origin_of(policy: Decoder, version: int = 0) -> Origin:
    """One read of the device."""
    sampled = [p.detach().flatten()[:: max(1, p.numel() // _SAMPLED)][:_SAMPLED] for p in policy.parameters()]
    values = torch.cat([part.float() for part in sampled]).bfloat16().view(torch.int16)
    return Origin(shape_of(policy.config), hashlib.blake2b(values.cpu().numpy().tobytes(), digest_size=8).hexdigest(), version)
