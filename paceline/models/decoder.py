"""The decoder for all supported models, which differ by the flags of `ModelConfig` and one `LayerSpec` per layer. It works on a
flat list of rows and leaves attention to an `Attend` object, so the same module serves generation (paged KV cache) and training
(packed sequences)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from paceline.kernels import (
    PLAIN_ATTENTION,
    AttentionForm,
    DecoderWeights,
    ExpertWeights,
    LayerWeights,
    Normed,
    Ops,
    RouterWeights,
)
from paceline.kernels.records import Activation
from paceline.models.attend import Angles, Attend, PagedAttend
from paceline.models.config import ExpertsSpec, LayerSpec, ModelConfig
from paceline.models.partition import Part
from paceline.models.rope import rope_table

InnerWeights = tuple[Tensor, Tensor | None, Tensor, Tensor | None, RouterWeights | None]
"""gate_up, its bias, down, its bias, and the router."""


class Hidden(NamedTuple):
    """Output of the decoder."""

    final: Tensor  # [R, hidden] hidden states after the final norm
    features: Tensor | None  # [R, hidden * captured layers] hidden states captured for the drafter


class Linear(nn.Linear):
    """An nn.Linear that multiplies with the kernel backend `ops`. A LoRA wrapper passes `ops` on."""

    def forward(self, x: Tensor, ops: Ops) -> Tensor:  # type: ignore[override]
        return ops.linear(x, self.weight, self.bias)

    def logits(self, hidden: Tensor, ops: Ops) -> Tensor | None:
        """Return the logits [R, V] of a step, if this layer is the head; see `Decoder.step_logits`."""
        found: Tensor = self(hidden, ops)
        return found

    def product_weights(self) -> list[Tensor]:
        """The weights of its matrix products."""
        return [self.weight]


class Attention(nn.Module):
    """The projections before and after attention. `input_size` differs from the hidden size only in drafters."""

    def __init__(self, config: ModelConfig, index: int, input_size: int | None = None) -> None:
        super().__init__()
        self.index, self.eps = index, config.rms_eps
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = Linear(input_size or config.hidden_size, rows, bias=config.qkv_bias)
        self.o = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.o_bias)
        self.q_norm = nn.Parameter(torch.ones(config.head_dim)) if config.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(config.head_dim)) if config.qk_norm else None
        spec = config.layer(index)
        self.scale = config.head_dim**-0.5 if spec.scale is None else spec.scale
        self.rope_index = config.ropes.index(spec.rope or config.rope)
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if spec.sinks else None
        self._window = spec.window if spec.window < config.max_context else 0
        self._soft_cap = spec.soft_cap

    @property
    def form(self) -> AttentionForm:
        """How it differs from plain causal attention."""
        if self.sinks is None and not self._window and not self._soft_cap:
            return PLAIN_ATTENTION
        return AttentionForm(self._window, self._soft_cap, self.sinks)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        return self.o(attend(self, self.qkv(x, attend.ops)), attend.ops)


class MLP(nn.Module):
    """The gated MLP, with gate and up projection fused into one matrix."""

    def __init__(self, config: ModelConfig, activation: Activation = "silu") -> None:
        super().__init__()
        self.activation: Activation = activation
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        ops = attend.ops
        return self.down(ops.gated(self.gate_up(x, ops), self.activation), ops)

    def inner_weights(self) -> InnerWeights:
        """The MLP's fields of `LayerWeights`."""
        return self.gate_up.weight, self.gate_up.bias, self.down.weight, self.down.bias, None

    @property
    def products(self) -> tuple[nn.Module, ...]:
        """The projections, which an adapter may wrap."""
        return self.gate_up, self.down


class Experts(nn.Module):
    """A mixture of experts: a router chooses some gated MLPs for every row, whose outputs are summed with its weights."""

    def __init__(self, config: ModelConfig, spec: ExpertsSpec, activation: Activation, index: int) -> None:
        super().__init__()
        self.spec, self.activation, self.index = spec, activation, index
        hidden, count, size = config.hidden_size, spec.count, spec.size
        self.router = Linear(hidden, count, bias=spec.bias)
        self.gate_up = nn.Parameter(torch.empty(count, 2 * size, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, size))
        self.gate_up_bias = nn.Parameter(torch.zeros(count, 2 * size)) if spec.bias else None
        self.down_bias = nn.Parameter(torch.zeros(count, hidden)) if spec.bias else None

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        ops, routing = attend.ops, attend.routing
        logits = self.router(x, ops)
        given = None if routing is None or routing.given is None else routing.given[self.index]
        shares, chosen = ops.route(logits, self.spec.active, self.spec.normalised, given)
        if routing is not None:
            x = routing.observe(self.index, x, logits, chosen)
        return ops.experts(x, self.weights(), shares, chosen)

    def weights(self) -> ExpertWeights:
        """The experts' weights in the form that `Ops.experts` takes."""
        return ExpertWeights(self.gate_up, self.gate_up_bias, self.down, self.down_bias, self.activation)

    def inner_weights(self) -> InnerWeights:
        """The MLP's fields of `LayerWeights`."""
        router = RouterWeights(self.router.weight, self.router.bias, self.spec.active, self.spec.normalised)
        return self.gate_up, self.gate_up_bias, self.down, self.down_bias, router

    def product_weights(self) -> list[Tensor]:
        """The weights of its matrix products, the router's apart."""
        return [self.gate_up, self.down]

    @property
    def products(self) -> tuple[nn.Module, ...]:
        """The projections that an adapter may wrap."""
        return (self.router,)


@runtime_checkable
class HasProducts(Protocol):
    """A module with matrix products of its own."""

    def product_weights(self) -> list[Tensor]:
        """The weights of its matrix products."""
        ...


def product_weights(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The weights of all matrix products in these modules, for `Ops.prepare`."""
    return [weight for module in modules for part in module.modules() if isinstance(part, HasProducts)
            for weight in part.product_weights()]


class Layer(nn.Module):
    """One decoder layer: attention and MLP or experts, each after an RMS norm, and before one if its record says so."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        spec = config.layer(index)
        self.eps = config.rms_eps
        self.attention_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.attention = Attention(config, index)
        self.mlp_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.mlp = (MLP(config, spec.activation) if spec.experts is None
                    else Experts(config, spec.experts, spec.activation, index))
        self.post_attention_norm = nn.Parameter(torch.ones(config.hidden_size)) if spec.post_norms else None
        self.post_mlp_norm = nn.Parameter(torch.ones(config.hidden_size)) if spec.post_norms else None

    def forward(self, x: Tensor, residual: Tensor | None, attend: Attend) -> tuple[Tensor, Tensor]:
        """Returns (output of the MLP, residual stream before it). Their sum is the input of the next layer; the addition is left
        to its first norm, which fuses both."""
        ops = attend.ops
        if residual is None:
            residual, x = x, ops.rms_norm(x, self.attention_norm, self.eps)
        else:
            x, residual = ops.add_rms_norm(x, residual, self.attention_norm, self.eps)
        x = self._post(self.attention(x, attend), self.post_attention_norm, ops)
        x, residual = ops.add_rms_norm(x, residual, self.mlp_norm, self.eps)
        return self._post(self.mlp(x, attend), self.post_mlp_norm, ops), residual

    def _post(self, x: Tensor, norm: nn.Parameter | None, ops: Ops) -> Tensor:
        return x if norm is None else ops.rms_norm(x, norm, self.eps)

    def fused(self, x: Normed, residual: Tensor, attend: PagedAttend) -> tuple[Tensor, Tensor]:
        """The layer from the output of its first norm up to the gated activation, with fused products. The down projection is
        left to `Decoder`, which fuses it with the next layer's norm."""
        ops, attention, mlp = attend.ops, self.attention, cast(MLP, self.mlp)
        heads = attend.from_normed(attention, x, attention.qkv.weight, attention.qkv.bias)
        x, residual = ops.linear_norm(heads, attention.o.weight, attention.o.bias, residual, self.mlp_norm, self.eps)
        return ops.gated_linear(x, mlp.gate_up.weight, mlp.gate_up.bias), residual

    @property
    def has_plain_products(self) -> bool:
        """Whether no projection is wrapped, as a LoRA adapter would."""
        return all(type(product) is Linear for product in (self.attention.qkv, self.attention.o, *self.mlp.products))

    @property
    def plain(self) -> bool:
        """Whether the fused products can be used: no projection is wrapped, there are no norms but the usual two, and the MLP is
        dense."""
        is_dense = isinstance(self.mlp, MLP) and self.mlp.activation == "silu" and self.post_mlp_norm is None
        return is_dense and self.attention.q_norm is None and self.has_plain_products


class Decoder(nn.Module):
    """A decoder-only language model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = self.local_config = config
        """The shape of the policy, and of its part that is here: all of it, unless `parallel` has split it."""
        self.parts: dict[str, list[Part]] | None = None
        """Where the parts of a split policy's parameters are, by name; None if the policy is whole. See `partition`."""
        # Not initialized: nobody reads those values, and to draw them on the meta device takes torch._dynamo, seconds to import.
        self.embed = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.hidden_size), freeze=False)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self._embed_scale: tuple[torch.dtype, float] | None = None  # in the embedding's data type
        self._weights: DecoderWeights | None = None  # for `Ops.decode`; built once, since weights are updated in place

    @classmethod
    def random(cls, config: ModelConfig, seed: int = 0, std: float = 0.02, dtype: torch.dtype = torch.float32,
               device: torch.device | str = "cpu") -> Decoder:
        """A decoder with random weights, for tests, benchmarks and training from scratch."""
        with torch.device(device):
            model = cls(config).to(dtype)
        generator = torch.Generator(device=device).manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 and not name.endswith("_bias"):
                    parameter.normal_(0.0, std, generator=generator)
                elif name.endswith((".bias", ".sinks")):
                    parameter.zero_()
        return model.requires_grad_(False)

    def forward(self, tokens: Tensor, attend: Attend, capture: tuple[int, ...] = ()) -> Hidden:
        """Hidden states of tokens [R]. `capture` lists the layers whose input is returned as features; -1 is the final hidden
        state."""
        if isinstance(attend, PagedAttend):
            whole = self._in_one_call(tokens, attend, capture)
            if whole is not None:
                return whole
        x = self.embedded(tokens)
        sizes = len(tokens), self.config.hidden_size, self.config.head_dim
        if isinstance(attend, PagedAttend) and attend.ops.should_fuse(*sizes) and self._plain():
            return self._fused(x, attend, capture)
        residual: Tensor | None = None
        kept: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in capture:
                kept[index] = x if residual is None else x + residual
            x, residual = layer(x, residual, attend)
        assert residual is not None, "a decoder has at least one layer"
        final, _ = attend.ops.add_rms_norm(x, residual, self.norm, self.config.rms_eps)
        kept[-1] = final
        return Hidden(final, torch.cat([kept[i] for i in capture], dim=-1) if capture else None)

    def embedded(self, tokens: Tensor) -> Tensor:
        """The input [R, H] of the first layer."""
        x: Tensor = self.embed(tokens)
        if self.config.embed_scale == 1:
            return x
        if self._embed_scale is None or self._embed_scale[0] != x.dtype:
            self._embed_scale = x.dtype, float(torch.tensor(self.config.embed_scale, dtype=x.dtype))
        return x * self._embed_scale[1]

    def one_call_weights(self) -> DecoderWeights | None:
        """The weights in the form that `Ops.decode` takes; None if a wrapped projection, or what a layer consists of, does not
        allow it."""
        if self._weights is None and self._fits_one_call() and all(layer.has_plain_products for layer in self.layers):
            self._weights = self._decoder_weights()
        return self._weights

    @property
    def has_plain_head(self) -> bool:
        """Whether logits are the product of the head's weight and hidden states, and nothing else."""
        return type(self.head) is Linear and not self.config.logit_cap

    def _in_one_call(self, tokens: Tensor, attend: PagedAttend, capture: tuple[int, ...]) -> Hidden | None:
        """Run all layers with one call of `Ops.decode`; None if the backend or a wrapped projection does not allow it."""
        weights = self.one_call_weights()
        if weights is None or attend.routing is not None:
            return None
        found = attend.ops.decode(weights, tokens, attend.positions, attend.cos, attend.sin, attend.write, attend.segments,
                                  attend.layers, capture)
        return None if found is None else Hidden(*found)

    def _fits_one_call(self) -> bool:
        """Whether `Ops.decode` knows everything that the layers consist of: all but experts is as in a Llama layer."""
        config = self.config
        return config.embed_scale == 1 and all(replace(config.layer(index), experts=None) == LayerSpec()
                                               for index in range(config.num_layers))

    def _decoder_weights(self) -> DecoderWeights:
        """The weights in the form that `Ops.decode` takes."""
        layers = []
        for layer in cast("list[Layer]", list(self.layers)):
            attention, mlp = layer.attention, layer.mlp
            layers.append(LayerWeights(
                layer.attention_norm, attention.qkv.weight, attention.qkv.bias, attention.q_norm, attention.k_norm,
                attention.o.weight, attention.o.bias, layer.mlp_norm, *mlp.inner_weights()))
        return DecoderWeights(self.embed.weight, tuple(layers), self.norm, self.local_config.num_heads, self.config.rms_eps)

    def _fused(self, residual: Tensor, attend: PagedAttend, capture: tuple[int, ...]) -> Hidden:
        """Run all layers with fused products, which pays for few rows; only the final norm is not fused. residual: the embedded
        tokens."""
        ops, eps = attend.ops, self.config.rms_eps
        layers = cast("list[Layer]", list(self.layers))
        kept: dict[int, Tensor] = {}
        x = Normed(ops.rms_norm(residual, layers[0].attention_norm, eps))
        for index, (layer, following) in enumerate(zip(layers, [*layers[1:], None], strict=True)):
            if index in capture:
                kept[index] = residual
            inner, residual = layer.fused(x, residual, attend)
            down = cast(MLP, layer.mlp).down
            if following is None:
                kept[-1], _ = ops.add_rms_norm(down(inner, ops), residual, self.norm, eps)
            else:
                x, residual = ops.linear_norm(inner, down.weight, down.bias, residual, following.attention_norm, eps)
        return Hidden(kept[-1], torch.cat([kept[i] for i in capture], dim=-1) if capture else None)

    def _plain(self) -> bool:
        return all(layer.plain for layer in self.layers)

    def logits(self, hidden: Tensor, ops: Ops, rows: Tensor | None = None) -> Tensor:
        """The logits [R, V] of hidden states [R, H]. `rows`: of these rows of the head only."""
        return self._capped(self.head(hidden, ops) if rows is None else ops.linear(hidden, rows))

    def step_logits(self, hidden: Tensor, ops: Ops) -> Tensor | None:
        """The logits [R, V] of a step, which all ranks compute together if the policy is split; None on other ranks than 0."""
        found = self.head.logits(hidden, ops)
        return None if found is None else self._capped(found)

    def _capped(self, found: Tensor) -> Tensor:
        cap = self.config.logit_cap
        return found if not cap else (cap * torch.tanh((found if found.dtype == torch.float64 else found.float()) / cap)).to(
            found.dtype)


class Rope(nn.Module):
    """The cos and sin tables of the rotary embeddings, in the precision that the kernels compute in; not part of checkpoints."""

    def __init__(self, config: ModelConfig, length: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        tables = [[table.to(device, wide) for table in rope_table(rope, config.head_dim, length)] for rope in config.ropes]
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", tables[0][0], persistent=False)
        self.register_buffer("sin", tables[0][1], persistent=False)
        self.others: tuple[Angles, ...] = tuple((cos, sin) for cos, sin in tables[1:])
        """The tables of layers that have another rotary embedding than the model's."""

    def forward(self, positions: Tensor) -> Angles:
        return self.cos[positions], self.sin[positions]

    def others_at(self, positions: Tensor) -> tuple[Angles, ...]:
        """cos and sin of the other rotary embeddings."""
        return tuple((cos[positions], sin[positions]) for cos, sin in self.others)
