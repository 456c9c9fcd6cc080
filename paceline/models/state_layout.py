"""Which slice of a decoder's parameter each tensor of a Hugging Face checkpoint is.

The decoder fuses q, k, v into `attention.qkv`, gate, up into `mlp.gate_up`, and the experts of a layer into one parameter, so a
checkpoint tensor is a slice of a parameter along dimension 0.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from paceline.models.architectures import architecture_of
from paceline.models.config import ExpertsSpec, ModelConfig

Form = Literal["plain", "shifted", "interleaved", "transposed"]
"""How a checkpoint's tensor becomes a slice of a parameter: as it is; plus the offset of norms; experts' transposed gate and up
columns that alternate (gpt-oss), or their biases; experts' transposed matrices."""


class ParamSlice(NamedTuple):
    """Rows start .. start + length of a parameter of the decoder. A parameter [E, N, K] of experts has E * N rows."""

    param_name: str
    start: int
    length: int
    form: Form = "plain"
    shape: tuple[int, ...] | None = None
    """Shape of the checkpoint's tensor; None: that of the slice."""


class StateLayout(NamedTuple):
    """The parameter slices of a decoder by checkpoint name."""

    saved: dict[str, ParamSlice]
    """Names in a folder."""
    live: dict[str, ParamSlice]
    """Further names that transformers 5 has in memory, where all experts of a layer are one tensor."""


def hf_layout(config: ModelConfig) -> dict[str, ParamSlice]:
    """The parameter slice of every tensor of a Hugging Face checkpoint. Without `lm_head` if the embeddings are tied."""
    return state_layout(config).saved


def state_layout(config: ModelConfig) -> StateLayout:
    """The parameter slice of every tensor that Hugging Face has a name for."""
    layout = _LayoutBuilder(config)
    layout.saved["model.embed_tokens.weight"] = ParamSlice("embed.weight", 0, config.vocab_size)
    for index in range(config.num_layers):
        layout.add_layer(index)
    layout.vector("norm", "model.norm.weight", config.hidden_size)
    if not config.tie_embeddings:
        layout.saved["lm_head.weight"] = ParamSlice("head.weight", 0, config.vocab_size)
    return StateLayout(layout.saved, layout.live)


class _LayoutBuilder:
    def __init__(self, config: ModelConfig) -> None:
        self.config, self.names = config, architecture_of(config).names
        self.saved: dict[str, ParamSlice] = {}
        self.live: dict[str, ParamSlice] = {}

    def vector(self, param: str, name: str, rows: int) -> None:
        self.saved[name] = ParamSlice(param, 0, rows, "shifted" if self.config.norm_offset else "plain")

    def linear(self, param: str, parts: dict[str, int], bias: bool) -> None:
        for kind in ("weight", "bias") if bias else ("weight",):
            start = 0
            for part, rows in parts.items():
                self.saved[f"{part}.{kind}"] = ParamSlice(f"{param}.{kind}", start, rows)
                start += rows

    def add_layer(self, index: int) -> None:
        config, names, spec = self.config, self.names, self.config.layer(index)
        theirs, ours, hidden = f"model.layers.{index}.", f"layers.{index}.", self.config.hidden_size
        attention = f"{theirs}self_attn."
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.vector(f"{ours}attention_norm", f"{theirs}input_layernorm.weight", hidden)
        self.linear(f"{ours}attention.qkv", {f"{attention}q_proj": q_rows, f"{attention}k_proj": kv_rows,
                                             f"{attention}v_proj": kv_rows}, config.qkv_bias)
        self.linear(f"{ours}attention.o", {f"{attention}o_proj": hidden}, config.o_bias)
        if config.qk_norm:
            self.vector(f"{ours}attention.q_norm", f"{attention}q_norm.weight", config.head_dim)
            self.vector(f"{ours}attention.k_norm", f"{attention}k_norm.weight", config.head_dim)
        if spec.sinks:
            self.saved[f"{attention}sinks"] = ParamSlice(f"{ours}attention.sinks", 0, config.num_heads)
        self.vector(f"{ours}mlp_norm", f"{theirs}{names.mlp_norm}.weight", hidden)
        if spec.post_norms:
            self.vector(f"{ours}post_attention_norm", f"{theirs}{names.post_attention_norm}.weight", hidden)
            self.vector(f"{ours}post_mlp_norm", f"{theirs}{names.post_mlp_norm}.weight", hidden)
        if spec.experts is not None:
            self._add_experts(spec.experts, f"{ours}mlp.", theirs)
            return
        inner = config.intermediate_size
        self.linear(f"{ours}mlp.gate_up", {f"{theirs}mlp.gate_proj": inner, f"{theirs}mlp.up_proj": inner}, config.mlp_bias)
        self.linear(f"{ours}mlp.down", {f"{theirs}mlp.down_proj": hidden}, config.mlp_bias)

    def _add_experts(self, spec: ExpertsSpec, ours: str, theirs: str) -> None:
        names, hidden, count, size = self.names, self.config.hidden_size, spec.count, spec.size
        self.linear(f"{ours}router", {f"{theirs}{names.experts}.{names.router}": count}, spec.bias)
        if names.experts != "mlp":
            self.live[f"{theirs}mlp.{names.router}.weight"] = ParamSlice(f"{ours}router.weight", 0, count)
        whole = f"{theirs}mlp.experts."
        if names.interleaved:
            self.saved |= {
                f"{whole}gate_up_proj": ParamSlice(f"{ours}gate_up", 0, 2 * count * size, "interleaved",
                                                   (count, hidden, 2 * size)),
                f"{whole}gate_up_proj_bias": ParamSlice(f"{ours}gate_up_bias", 0, count, "interleaved", (count, 2 * size)),
                f"{whole}down_proj": ParamSlice(f"{ours}down", 0, count * hidden, "transposed", (count, size, hidden)),
                f"{whole}down_proj_bias": ParamSlice(f"{ours}down_bias", 0, count),
            }
            return
        self.live[f"{whole}gate_up_proj"] = ParamSlice(f"{ours}gate_up", 0, count * 2 * size, shape=(count, 2 * size, hidden))
        self.live[f"{whole}down_proj"] = ParamSlice(f"{ours}down", 0, count * hidden, shape=(count, hidden, size))
        for number in range(count):
            gate, up, down = (f"{theirs}{names.experts}.experts.{number}.{part}.weight" for part in names.parts)
            self.saved[gate] = ParamSlice(f"{ours}gate_up", 2 * number * size, size)
            self.saved[up] = ParamSlice(f"{ours}gate_up", (2 * number + 1) * size, size)
            self.saved[down] = ParamSlice(f"{ours}down", number * hidden, hidden)
