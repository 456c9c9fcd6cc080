"""Fingerprints of policies: a drafter stores which policy it was trained for, so that a mismatch is noticed."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import torch

from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder

_NUM_SAMPLES = 32
"""Number of values of every tensor that are hashed: enough to tell two training steps apart, few enough to read at once."""


@dataclass(frozen=True, slots=True)
class PolicyFingerprint:
    """Identity of a policy: its shape, a hash of its weights and its version."""

    shape: str
    """Shape of the model, like `qwen2 hidden 1536 layers 28 heads 12/2x128 mlp 8960 vocabulary 151936`."""
    weights: str
    """Hash of a sample of every tensor, rounded to bfloat16, so that it is the same for the same policy in another dtype.
    Empty if it is not known: of a policy that is split over ranks."""
    version: int = 0
    """Policy version, as counted by the run that trained the drafter."""
    descendant: str = ""
    """Hash of the weights of a later version of this policy, of the same run, with which the drafter was saved."""

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: object) -> PolicyFingerprint | None:
        """Reads a fingerprint from JSON; None if `found` is not one."""
        if not isinstance(found, dict) or not found.keys() >= {"shape", "weights", "version"}:
            return None
        return cls(str(found["shape"]), str(found["weights"]), int(found["version"]), str(found.get("descendant", "")))

    def mismatch(self, policy: Decoder) -> str | None:
        """Returns a warning if the policy has other weights than the one with this fingerprint; None if it is the same, or the
        later version of the same run that the drafter was saved with: a run's drafter is always one version behind."""
        here = fingerprint_of(policy)
        if here.shape == self.shape and (here.weights in (self.weights, self.descendant) or not self.weights or not here.weights):
            return None
        return (f"the drafter was trained for other weights (policy {self.weights}, version {self.version}) than this policy's "
                f"({here.weights}): fewer draft tokens may be accepted; generated tokens do not change")


def shape_of(config: ModelConfig) -> str:
    """Returns the shape of a model in words, see `PolicyFingerprint.shape`."""
    return (f"{config.architecture} hidden {config.hidden_size} layers {config.num_layers} heads {config.num_heads}/"
            f"{config.num_kv_heads}x{config.head_dim} mlp {config.intermediate_size} vocabulary {config.vocab_size}")


@torch.no_grad()
def fingerprint_of(policy: Decoder, version: int = 0) -> PolicyFingerprint:
    """Computes the fingerprint of a policy, with a single transfer from its device."""
    if policy.parts is not None:  # nobody has all of its weights
        return PolicyFingerprint(shape_of(policy.config), "", version)
    sampled = [p.detach().flatten()[:: max(1, p.numel() // _NUM_SAMPLES)][:_NUM_SAMPLES] for p in policy.parameters()]
    values = torch.cat([part.float() for part in sampled]).bfloat16().view(torch.int16)
    digest = hashlib.blake2b(values.cpu().numpy().tobytes(), digest_size=8).hexdigest()
    return PolicyFingerprint(shape_of(policy.config), digest, version)
