"""The learned drafter's network: one decoder layer on the policy's hidden states, in EAGLE and EAGLE-3 form.

Row i of the drafter combines the policy's features at position i with the token at i + 1 and predicts the token at i + 2.
The embedding and the head are the policy's own tensors, so they are always up to date. (A reduced vocabulary gathers its rows of
the head again after every weight update.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from paceline.drafters.fingerprint import PolicyFingerprint
from paceline.kernels import Ops
from paceline.models.attend import Attend, PagedAttend
from paceline.models.config import ModelConfig
from paceline.models.decoder import MLP, Attention, Decoder, Linear

Form = Literal["eagle", "eagle3"]
MIN_WINDOW = 65
"""Smallest `EagleConfig.window`: a step commits up to one token more than a draft is deep, and all of them must be within it."""


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Architecture of a learned drafter."""

    form: Form
    """`eagle`: reads the final hidden state. `eagle3`: reads three layers, with norms of its own."""
    model: ModelConfig
    """Shape of its one layer: a Llama layer with the sizes of the policy, unless the drafter was trained elsewhere with others.
    The hidden size and the vocabulary are always the policy's."""
    feature_layers: tuple[int, ...]
    """Layers of the policy whose hidden states it reads: i is the input of layer i, -1 the output of the final norm."""
    fc_bias: bool = False
    """Whether the input projection has a bias."""
    norm_before_residual: bool = False
    """Whether an EAGLE-3 drafter's residual stream starts from the normed features instead of the features themselves."""
    window: int | None = None
    """Number of committed tokens that draft tokens attend to, the last ones, up to one page more. So it makes no difference how
    much longer an answer is than those that the drafter was trained on. None: all of them."""

    @classmethod
    def for_policy(cls, policy: ModelConfig, form: Form = "eagle", feature_layers: tuple[int, ...] = ()) -> EagleConfig:
        """Returns the config of a drafter for a policy. feature_layers: Layers that an EAGLE-3 drafter reads; empty chooses an
        early, a middle and a late one."""
        layer = replace(policy, architecture="llama", num_layers=1, qkv_bias=False, o_bias=False, mlp_bias=False,
                        qk_norm=False, layers=(), embed_scale=1.0, norm_offset=0.0, logit_cap=0.0)
        if form == "eagle":
            return cls(form, layer, (-1,))
        count = policy.num_layers
        default = (2, count // 2, count - 3) if count >= 6 else (0, count // 2, count - 1)
        return cls(form, layer, tuple(feature_layers) or default)


class Eagle(nn.Module):
    """The drafter's network: an input projection, one decoder layer, and for EAGLE-3 its norms."""

    def __init__(self, config: EagleConfig, draft_ids: Tensor | None = None, own_head: bool = False) -> None:
        """draft_ids: [DV] ids of the tokens of a reduced vocabulary; None means the policy's. own_head: Whether it has a head of
        its own instead of the policy's."""
        super().__init__()
        model = config.model
        hidden, three = model.hidden_size, config.form == "eagle3"
        self.config = config
        self.fc = Linear(len(config.feature_layers) * hidden if three else 2 * hidden, hidden, bias=config.fc_bias)
        self.attention = Attention(model, 0, input_size=2 * hidden if three else hidden)
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        self.mlp = MLP(model)
        self.input_norm = nn.Parameter(torch.ones(hidden)) if three else None
        self.hidden_norm = nn.Parameter(torch.ones(hidden)) if three else None
        self.norm = nn.Parameter(torch.ones(hidden)) if three else None
        self.draft_ids: Tensor | None
        self.register_buffer("draft_ids", draft_ids)
        self.head = Linear(hidden, self.draft_vocab_size, bias=False) if own_head else None
        self._gathered: Tensor | None = None
        self.policy_fingerprint: PolicyFingerprint | None = None  # the policy it was trained for, if known

    @classmethod
    def random(cls, config: EagleConfig, seed: int = 0, std: float = 0.02, dtype: torch.dtype = torch.float32,
               device: torch.device | str = "cpu", draft_ids: Tensor | None = None) -> Eagle:
        """Returns a drafter with random matrices and unit norms."""
        module = cls(config, draft_ids).to(device, dtype)
        generator = torch.Generator(device=device).manual_seed(seed)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, std, generator=generator)
        return module.requires_grad_(False)

    @property
    def draft_vocab_size(self) -> int:
        """Number of tokens that it can predict."""
        return self.config.model.vocab_size if self.draft_ids is None else len(self.draft_ids)

    def encode(self, features: Tensor, ops: Ops) -> Tensor:
        """Policy features [R, F] -> input state of the layer [R, H], in place of which later steps use the layer's own output."""
        return features if self.config.form == "eagle" else self.fc(features, ops)

    def forward(self, embedded: Tensor, state: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Embedding of the next token [R, H] and state (encoded features or the layer's own output) [R, H] -> output [R, H]. With
        `rows` [T] it is the output [T, H] of these rows alone, and `attend` returns only theirs; the others serve as keys."""
        ops = attend.ops
        x, residual = self._layer_input(embedded, state, ops)
        residual = residual if rows is None else residual.index_select(0, rows)
        x, residual = ops.add_rms_norm(self.attention(x, attend), residual, self.mlp_norm, self.config.model.rms_eps)
        return self.mlp(x, attend) + residual

    def write_keys(self, embedded: Tensor, state: Tensor, attend: PagedAttend) -> None:
        """Writes the keys and values of these rows, see `forward`, into the cache. With one layer they depend on no other row and
        on no attention."""
        x, _ = self._layer_input(embedded, state, attend.ops)
        attend.write_keys(self.attention, self.attention.qkv(x, attend.ops))

    def _layer_input(self, embedded: Tensor, state: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """Input of the attention's projections and residual stream of each row."""
        if self.config.form == "eagle":
            x = self.fc(torch.cat([embedded, state], dim=-1), ops)
            return x, x
        assert self.input_norm is not None and self.hidden_norm is not None
        eps = self.config.model.rms_eps
        normed = ops.rms_norm(state, self.hidden_norm, eps)
        x = torch.cat([ops.rms_norm(embedded, self.input_norm, eps), normed], dim=-1)
        return x, normed if self.config.norm_before_residual else state

    def logits(self, out: Tensor, policy: Decoder, ops: Ops) -> Tensor:
        """Output of the layer [R, H] -> logits [R, V], or [R, DV] over a reduced vocabulary."""
        if self.norm is not None:
            out = ops.rms_norm(out, self.norm, self.config.model.rms_eps)
        if self.head is not None:
            return self.head(out, ops)
        if self.draft_ids is None:
            return policy.logits(out, ops)
        if self._gathered is None:
            self.gather_head(policy)
        assert self._gathered is not None
        return ops.linear(out, self._gathered)

    def policy_changed(self) -> None:
        """Must be called after the policy's weights changed: a reduced vocabulary gathers its rows of the head again."""
        self._gathered = None

    def gather_head(self, policy: Decoder) -> None:
        """Gathers a reduced vocabulary's rows of the head now and in place, because captured CUDA graphs keep their address."""
        if self.draft_ids is None or self.head is not None:
            return
        rows = policy.head.weight[self.draft_ids]
        if self._gathered is None or self._gathered.device != rows.device or self._gathered.dtype != rows.dtype:
            self._gathered = rows.contiguous()
        else:
            with torch.inference_mode(self._gathered.is_inference()):
                self._gathered.copy_(rows)


def feature_columns(captured: tuple[int, ...], layers: tuple[int, ...], hidden_size: int) -> list[slice]:
    """Returns the columns of captured features that hold the hidden states of `layers`. captured: The captured layers in the
    order of their columns."""
    missing = [layer for layer in layers if layer not in captured]
    if missing:
        raise ValueError(f"features: layer {missing[0]} was not captured, only {captured}; training a drafter needs the layers "
                         "that it reads and the final hidden state (-1)")
    starts = [captured.index(layer) * hidden_size for layer in layers]
    return [slice(start, start + hidden_size) for start in starts]
