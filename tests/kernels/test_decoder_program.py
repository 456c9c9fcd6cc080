"""All layers in one compiled call: the same hidden states, cache and features as operation by operation."""

from __future__ import annotations

import pytest
import torch
from tiny import CONFIGS, model
from torch import Tensor

from paceline.kernels import PagedCache, Segments
from paceline.kernels.cpu.ops import CpuOps
from paceline.kernels.reference.ops import TorchOps
from paceline.models.attend import PagedAttend
from paceline.models.decoder import Decoder, Rope, product_weights

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-11, torch.bfloat16: 0.3}
CONTEXT, PAGE, SLOTS = 5, 4, 3
CAPTURE = (0, 1, -1)


class OneByOne(CpuOps):
    """The same kernels without programs."""

    def decode(self, *arguments: object) -> None:
        return None


def segments(causal: bool) -> tuple[Segments, Tensor, Tensor]:
    """Three segments of 4, 1 and 3 rows behind a context; (segments, positions, cache index)."""
    rows, lengths = [0, 4, 5], [4, 1, 3]
    mask = torch.zeros(8, 2, dtype=torch.int64)
    for first, length in zip(rows, lengths, strict=True):
        for i in range(length):  # a tree: the root and every second row before it
            mask[first + i, 0] = sum(1 << j for j in range(i + 1) if j in (0, i) or (i - j) % 2 == 0)
    half = [torch.tensor(values, dtype=torch.int32) for values in (rows, lengths, [0, 1, 2], [CONTEXT] * 3)]
    positions = torch.cat([CONTEXT + torch.arange(length) for length in lengths])
    slot = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    return Segments(*half, torch.full((3,), causal), mask), positions, slot * 16 + positions


def caches(config: object, dtype: torch.dtype) -> list[PagedCache]:
    made = []
    table = torch.arange(SLOTS * 4, dtype=torch.int32).view(SLOTS, 4)
    for layer in range(config.num_layers):  # type: ignore[attr-defined]
        draw = torch.Generator().manual_seed(layer)
        k, v = (torch.randn(SLOTS * 16, config.num_kv_heads, config.head_dim, generator=draw).to(dtype)  # type: ignore[attr-defined]
                for _ in range(2))
        made.append(PagedCache(k, v, table, PAGE))
    return made


def forward(decoder: Decoder, ops: object, tokens: Tensor, causal: bool, keep: slice = slice(None)) -> list[Tensor]:
    rope, dtype = Rope(decoder.config, 64, decoder.norm.dtype, "cpu"), decoder.norm.dtype
    parts, positions, write = segments(causal)
    layers = caches(decoder.config, dtype)
    attend = PagedAttend(ops, layers, rope.cos, rope.sin, write, parts, None, positions)  # type: ignore[arg-type]
    hidden = decoder(tokens, attend, CAPTURE)
    assert hidden.features is not None
    return [hidden.final[keep], hidden.features[keep], *(layer.k for layer in layers), *(layer.v for layer in layers)]


def prepared(ops: CpuOps, decoder: Decoder) -> CpuOps:
    ops.prepare(product_weights([decoder]))
    return ops


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("threads", [1, 2])
def test_a_program_computes_what_its_operations_do(kind, dtype, causal, threads, monkeypatch):
    monkeypatch.setattr("paceline.kernels.cpu.ops.PARALLEL_STEP", 0)
    torch.set_num_threads(threads)
    decoder, tokens = model(kind, dtype=dtype), torch.arange(8) * 7
    ops = prepared(CpuOps(), decoder)
    whole = forward(decoder, ops, tokens, causal)
    assert ops._decoders, "it was run operation by operation"
    for other in (prepared(OneByOne(), decoder), TorchOps()):
        for got, expected in zip(whole, forward(decoder, other, tokens, causal), strict=True):
            assert (got.double() - expected.double()).abs().max() <= TOLERANCE[dtype]
    again = forward(decoder, ops, tokens, causal)  # with the room of the first run
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_a_program_notices_new_weights_and_more_rows():
    decoder, tokens = model("qwen3", dtype=torch.float32), torch.arange(8)
    changed = Decoder(decoder.config).requires_grad_(False)
    changed.load_state_dict(decoder.state_dict())
    ops = prepared(CpuOps(), changed)
    before = forward(changed, ops, tokens, True)[0]
    with torch.no_grad():
        changed.layers[0].mlp.down.weight.mul_(2)
    after = forward(changed, ops, tokens, True)[0]  # stale panels are not used
    assert (after - forward(changed, TorchOps(), tokens, True)[0]).abs().max() < 1e-4 and not torch.equal(before, after)
    prepared(ops, changed)
    assert (forward(changed, ops, tokens, True)[0] - after).abs().max() < 1e-4


def test_a_wrapped_product_is_run_operation_by_operation():
    decoder = Decoder.random(CONFIGS["llama"], 3)
    decoder.layers[0].mlp.down = torch.nn.Sequential(decoder.layers[0].mlp.down)
    assert not decoder.layers[0].has_plain_products
    assert decoder._in_one_call(torch.arange(8), None, ()) is None  # type: ignore[arg-type]
