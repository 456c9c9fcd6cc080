"""Upscaled twins: a policy embedded in a larger shape, which computes the same function at the larger shape's bytes and FLOPs.

A drafter's accept length depends on the policy being a real one, and its speedup on the policy's size. Where only a small real
policy is at hand, its twin offers both: the distribution of the small policy at the cost of the large one. Qwen2.5-1.5B, for
example, fits into the shape of Qwen2.5-7B.

Construction: the additional channels of the residual stream are always zero. Weights that write them (embedding, o, down, the
drafter's fc) have zero rows there. Weights that read them may have any value and get random ones, because products with many
zeros draw less power than real ones. Additional heads and MLP channels compute values that nothing reads (zero columns in o
and down), and additional layers add nothing. RMSNorm divides by the root of a mean over more channels, so its weight is
multiplied by sqrt(small / large) and its epsilon by small / large, which is exact up to the rounding of the weight. Where six
query heads per key head become seven, each query head keeps its key head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.lib.models import fill_random
from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.models.config import ModelConfig
from paceline.models.decoder import MLP, Attention, Decoder
from paceline.models.weights import empty_model


@dataclass(frozen=True, slots=True)
class Fit:
    """Indices of the rows and columns of the small shape's weights inside the large shape's weights."""

    small: ModelConfig
    large: ModelConfig

    @property
    def norm_scale(self) -> float:
        return math.sqrt(self.small.hidden_size / self.large.hidden_size)

    def hidden(self, blocks: int = 1) -> Tensor:
        """Indices of the hidden channels, for `blocks` hidden states side by side."""
        return _blocks(self.small.hidden_size, self.large.hidden_size, blocks)

    def intermediate(self, blocks: int = 1) -> Tensor:
        return _blocks(self.small.intermediate_size, self.large.intermediate_size, blocks)

    def query(self) -> Tensor:
        """Indices of the query channels; each query head stays in the group of its key head."""
        small, large = (shape.num_heads // shape.num_kv_heads for shape in (self.small, self.large))
        heads = torch.arange(self.small.num_kv_heads)[:, None] * large + torch.arange(small)  # [Hkv, G]
        return (heads.flatten()[:, None] * self.small.head_dim + torch.arange(self.small.head_dim)).flatten()

    def qkv(self) -> Tensor:
        dim, key = self.small.head_dim, torch.arange(self.small.num_kv_heads * self.small.head_dim)
        behind = self.large.num_heads * dim
        return torch.cat([self.query(), behind + key, behind + self.large.num_kv_heads * dim + key])


def upscale(model: Decoder, shape: ModelConfig) -> Decoder:
    """The twin of `model` with the sizes of `shape` (hidden, intermediate, layers, heads, tied embeddings). Everything else,
    dtype and device included, is that of `model`."""
    fit = Fit(model.config, twin_config(model.config, shape))
    twin = empty_model(fit.large, model.norm.dtype, model.norm.device)
    fill_random(twin)
    hidden = fit.hidden()
    with torch.no_grad():
        twin.embed.weight.zero_()
        _place(twin.embed.weight, model.embed.weight, None, hidden)
        if not fit.large.tie_embeddings:
            _place(twin.head.weight, model.head.weight, None, hidden)
        _place_norm(twin.norm, model.norm, fit)
        for index, layer in enumerate(twin.layers):
            layer.attention.eps = model.config.rms_eps  # the norms of single heads keep their width
            _zero(layer.attention.o)
            _zero(layer.mlp.down)
            if index < len(model.layers):
                small = model.layers[index]
                _place_norm(layer.attention_norm, small.attention_norm, fit)
                _place_norm(layer.mlp_norm, small.mlp_norm, fit)
                _place_attention(layer.attention, small.attention, fit, hidden)
                _place_mlp(layer.mlp, small.mlp, fit)
    return twin


def upscale_drafter(drafter: Eagle, twin: ModelConfig) -> Eagle:
    """The drafter of a policy as a drafter of the policy's twin, whose config is `twin`: the same draft tokens at the larger
    cost. The twin's features are the policy's followed by zeros, so only the sizes and the norms change."""
    config = EagleConfig.for_policy(twin, drafter.config.form, drafter.config.feature_layers)
    config = replace(config, window=drafter.config.window)
    fit, three = Fit(drafter.config.model, config.model), config.form == "eagle3"
    ids = drafter.draft_ids
    module = Eagle(config, None if ids is None else ids.clone(), drafter.head is not None)
    module = module.to(drafter.mlp_norm.device, drafter.mlp_norm.dtype).requires_grad_(False)
    fill_random(module)
    hidden = fit.hidden()
    with torch.no_grad():
        module.fc.weight[fit.small.hidden_size :] = 0
        _place(module.fc.weight, drafter.fc.weight, hidden, fit.hidden(len(config.feature_layers) if three else 2))
        for name, norm in drafter.named_parameters():
            if name.endswith("norm"):
                _place_norm(module.get_parameter(name), norm, fit)
        _zero(module.attention.o)
        _zero(module.mlp.down)
        _place_attention(module.attention, drafter.attention, fit, fit.hidden(2 if three else 1))
        _place_mlp(module.mlp, drafter.mlp, fit)
        if drafter.head is not None and module.head is not None:
            _place(module.head.weight, drafter.head.weight, None, hidden)
    return module


def twin_config(small: ModelConfig, shape: ModelConfig) -> ModelConfig:
    """Config of the twin of a `small` policy in the sizes of `shape`. A ValueError names the field that does not fit."""
    for name in ("hidden_size", "intermediate_size", "num_layers", "num_kv_heads"):
        if getattr(small, name) > getattr(shape, name):
            raise ValueError(f"{name}: {getattr(small, name)} does not fit into {getattr(shape, name)}")
    if small.num_heads // small.num_kv_heads > shape.num_heads // shape.num_kv_heads:
        raise ValueError(f"num_heads: {small.num_heads} / {small.num_kv_heads} heads per group do not fit into "
                         f"{shape.num_heads} / {shape.num_kv_heads}")
    if small.head_dim != shape.head_dim:
        raise ValueError(f"head_dim: {small.head_dim} is not {shape.head_dim}; heads cannot grow")
    if shape.tie_embeddings and not small.tie_embeddings:
        raise ValueError("tie_embeddings: two matrices do not fit into one")
    return replace(small, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size, num_layers=shape.num_layers,
                   num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, tie_embeddings=shape.tie_embeddings,
                   rms_eps=small.rms_eps * small.hidden_size / shape.hidden_size)


def _blocks(small: int, large: int, blocks: int) -> Tensor:
    return (torch.arange(blocks)[:, None] * large + torch.arange(small)).flatten()


def _zero(linear: nn.Linear) -> None:
    linear.weight.zero_()


def _place(target: Tensor, source: Tensor, rows: Tensor | None, columns: Tensor) -> None:
    rows = torch.arange(len(source)) if rows is None else rows
    target[rows[:, None].to(target.device), columns.to(target.device)] = source.to(target.dtype)


def _place_norm(target: Tensor, source: Tensor, fit: Fit) -> None:
    target[: len(source)] = (source.double() * fit.norm_scale).to(target.dtype)


def _place_bias(target: nn.Linear, source: nn.Linear, rows: Tensor) -> None:
    if source.bias is not None:
        target.bias[rows.to(target.bias.device)] = source.bias


def _place_attention(target: Attention, source: Attention, fit: Fit, columns: Tensor) -> None:
    _place(target.qkv.weight, source.qkv.weight, fit.qkv(), columns)
    _place_bias(target.qkv, source.qkv, fit.qkv())
    _place(target.o.weight, source.o.weight, fit.hidden(), fit.query())
    _place_bias(target.o, source.o, fit.hidden())
    if target.q_norm is not None and target.k_norm is not None and source.q_norm is not None and source.k_norm is not None:
        target.q_norm.copy_(source.q_norm)
        target.k_norm.copy_(source.k_norm)


def _place_mlp(target: MLP, source: MLP, fit: Fit) -> None:
    _place(target.gate_up.weight, source.gate_up.weight, fit.intermediate(2), fit.hidden())
    _place_bias(target.gate_up, source.gate_up, fit.intermediate(2))
    _place(target.down.weight, source.down.weight, fit.hidden(), fit.intermediate())
    _place_bias(target.down, source.down, fit.hidden())
