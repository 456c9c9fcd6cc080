"""Configuration: frozen, validated, unknown keys are errors, every default written once."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineConfig(Config):
    """How much an engine may hold and how it steps. Nothing here changes a token."""

    max_batch: int | None = Field(None, ge=1)
    """Requests that run at once; None: 64 on a CPU, 256 on a GPU."""
    max_rows: int | None = Field(None, ge=1)
    """Rows of one step: roots, drafted nodes and prompt chunks together; None: 512 on a CPU, 8192 on a GPU."""
    page_size: int = Field(16, ge=1)
    """Tokens per cache page."""
    kv_tokens: int | None = Field(None, ge=1)
    """Tokens the cache holds; None: as many as fit `kv_memory_gb`."""
    kv_memory_gb: float | None = Field(None, gt=0)
    """None: 2 on a CPU, 85 % of what is free on a GPU."""
    max_context: int | None = Field(None, ge=2)
    """Longest prompt and answer together; None: the model's own."""
    row_sizes: tuple[int, ...] = ()
    """Row counts that decode rows are padded to (for captured graphs); empty: none."""
    capture: tuple[int, ...] = ()
    """Layers whose hidden states are kept with each rollout: i is the input of layer i, -1 the final norm's output."""
    on_update: Literal["continue", "recompute"] = "continue"
    """What requests in flight do after a weight update: go on with the keys and values they have, or prefill again."""
    kernels: Literal["auto", "torch"] = "auto"
    """The fastest kernels for the device, or the plain torch reference."""
    deterministic: bool = False
    """On a GPU, sums in an order that depends neither on the batch nor on the strategy, so tokens do not either."""
    cuda_graphs: bool = True
    """On a GPU, capture decoding steps and replay them."""
    pack_weights: bool = True
    """On a CPU, keep a second copy of the matrices in the layout its matrix library likes: faster, twice the memory."""
    tau: float = Field(0.35, ge=0, le=1)
    """How much the learned drafter's own spread is believed when it guesses with the shared noise; 0: plain top-k."""
    suffix_tau: float = Field(1.0, ge=0, le=1)
    """Likewise for the suffix drafter's counts."""
    suffix_tokens: int = Field(4_000_000, ge=1)
    """Tokens of history the suffix drafter remembers."""
