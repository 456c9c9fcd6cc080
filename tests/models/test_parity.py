"""Our decoder against transformers': the same weights give the same logits, hidden states and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from paceline.kernels import PagedCache, Segments
from paceline.kernels.reference.ops import TorchOps
from paceline.models import weights
from paceline.models.attend import PackedAttend, PagedAttend
from paceline.models.decoder import Decoder, Hidden, Rope
from paceline.models.state_dict import load_state
from paceline.models.weights import empty_model, load_model

SMALL = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 5000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
YARN_MSCALE = YARN | {"mscale": 0.7, "mscale_all_dim": 0.5, "beta_fast": 16.0, "beta_slow": 2.0}


class Family(NamedTuple):
    model: type[PreTrainedModel]
    config: type
    options: dict


def llama(**options: object) -> Family:
    return Family(LlamaForCausalLM, LlamaConfig, options)


def qwen2(**options: object) -> Family:
    return Family(Qwen2ForCausalLM, Qwen2Config, options)


def qwen3(**options: object) -> Family:
    return Family(Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16} | options)


def qwen3_moe(**options: object) -> Family:
    sizes = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
             "experts_implementation": "eager"}
    return Family(Qwen3MoeForCausalLM, Qwen3MoeConfig, sizes | options)


def mixtral(**options: object) -> Family:
    return Family(MixtralForCausalLM, MixtralConfig, {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                                                     "experts_implementation": "eager"} | options)


def gpt_oss(**options: object) -> Family:
    sizes = {"head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 11, "rope_parameters": YARN,
             "attn_implementation": "eager", "experts_implementation": "eager"}
    return Family(GptOssForCausalLM, GptOssConfig, sizes | options)


def gemma2(**options: object) -> Family:
    sizes = {"head_dim": 8, "sliding_window": 11, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 3.0,
             "final_logit_softcapping": 5.0, "attn_implementation": "eager"}
    return Family(Gemma2ForCausalLM, Gemma2Config, sizes | options)


def gemma3(**options: object) -> Family:
    sizes = {"head_dim": 8, "sliding_window": 11, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
             "query_pre_attn_scalar": 12, "attn_implementation": "eager",
             "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}}
    return Family(Gemma3ForCausalLM, Gemma3TextConfig, sizes | options)


FAMILIES = {
    "llama": llama(), "llama-tied": llama(tie_word_embeddings=True), "llama-head-dim": llama(head_dim=12),
    "llama-bias": llama(attention_bias=True, mlp_bias=True),
    "llama-linear": llama(rope_parameters=LINEAR), "llama-llama3": llama(rope_parameters=LLAMA3),
    "qwen2": qwen2(), "qwen2-tied": qwen2(tie_word_embeddings=True), "qwen2-yarn": qwen2(rope_parameters=YARN),
    "qwen3": qwen3(), "qwen3-tied": qwen3(head_dim=8, tie_word_embeddings=True),
    "qwen3-bias": qwen3(attention_bias=True), "qwen3-yarn": qwen3(rope_parameters=YARN_MSCALE),
    "mistral-window": Family(MistralForCausalLM, MistralConfig, {"head_dim": 8, "sliding_window": 9}),
    "qwen2-window": qwen2(use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3-moe": qwen3_moe(norm_topk_prob=True), "qwen3-moe-mixed": qwen3_moe(mlp_only_layers=[1], num_experts_per_tok=2),
    "mixtral": mixtral(), "mixtral-window": mixtral(sliding_window=13, num_experts_per_tok=1),
    "gpt-oss": gpt_oss(), "gemma3": gemma3(), "gemma3-cap": gemma3(final_logit_softcapping=5.0), "gemma2": gemma2(),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def make_theirs(family: Family, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Random in every parameter: fresh models have zero biases and unit norms, which would hide a mix-up."""
    torch.manual_seed(0)
    model = family.model(family.config(**SMALL, **family.options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype)


def pair(family: Family, folder: Path, shard: str = "1GB") -> tuple[PreTrainedModel, Decoder]:
    theirs = make_theirs(family)
    theirs.save_pretrained(folder, max_shard_size=shard)
    ours, tokenizer = load_model(folder, "cpu", "auto")
    assert tokenizer is None
    return theirs, ours


def sequence(length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, SMALL["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed))


def packed(model: Decoder, sequences: list[Tensor], capture: tuple[int, ...] = ()) -> Hidden:
    positions = torch.cat([torch.arange(len(tokens)) for tokens in sequences])
    dtype = model.embed.weight.dtype
    rope = Rope(model.config, model.config.max_context, dtype, "cpu")
    attend = PackedAttend(TorchOps(), *rope(positions), tuple(len(tokens) for tokens in sequences), rope.others_at(positions))
    return model(torch.cat(sequences), attend, capture)


def paged(model: Decoder, tokens: Tensor, chunks: tuple[int, ...], page_size: int = 4) -> Tensor:
    """Logits of one request fed chunk by chunk through the cache, its pages in scrambled order."""
    config, length = model.config, len(tokens)
    num_pages = -(-length // page_size)
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(5))
    shape = (num_pages * page_size, config.num_kv_heads, config.head_dim)
    rope, out, start = Rope(config, config.max_context, torch.float32, "cpu"), [], 0
    layers = [PagedCache(torch.zeros(shape), torch.zeros(shape), pages.int()[None], page_size)
              for _ in range(config.num_layers)]
    for chunk in chunks:
        position = torch.arange(start, start + chunk)
        segments = Segments(
            row=torch.tensor([0], dtype=torch.int32), length=torch.tensor([chunk], dtype=torch.int32),
            slot=torch.tensor([0], dtype=torch.int32), context=torch.tensor([start], dtype=torch.int32),
            causal=torch.tensor([True]), mask=torch.zeros(chunk, 2, dtype=torch.int64),
        )
        write = pages[position // page_size] * page_size + position % page_size
        attend = PagedAttend(TorchOps(), layers, *rope(position), write, segments, others=rope.others_at(position))
        out.append(model.logits(model(tokens[start : start + chunk], attend).final, attend.ops))
        start += chunk
    assert start == length
    return torch.cat(out)


@torch.no_grad()
def test_logits_equal_transformers_packed_and_paged(family: Family, tmp_path: Path) -> None:
    theirs, ours = pair(family, tmp_path)
    tokens = sequence(100)
    expected = theirs(tokens[None]).logits[0]
    assert expected.std() > 0.3  # otherwise agreement would say nothing
    logits = ours.logits(packed(ours, [tokens]).final, TorchOps())
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(paged(ours, tokens, (100,)), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(paged(ours, tokens, (37, 62, 1)), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3"])
def test_sharded_folder_equals_transformers(name: str, tmp_path: Path) -> None:
    theirs, ours = pair(FAMILIES[name], tmp_path, shard="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    tokens = sequence(20)
    logits = ours.logits(packed(ours, [tokens]).final, TorchOps())
    torch.testing.assert_close(logits, theirs(tokens[None]).logits[0], atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_packed_sequences_equal_separate_ones(name: str, tmp_path: Path) -> None:
    _, ours = pair(FAMILIES[name], tmp_path)
    ours.double()
    sequences = [sequence(n, seed=n) for n in (7, 1, 30, 12)]
    together = packed(ours, sequences).final.split([len(tokens) for tokens in sequences])
    for tokens, part in zip(sequences, together, strict=True):
        torch.testing.assert_close(part, packed(ours, [tokens]).final, atol=1e-12, rtol=0)


@torch.no_grad()
def test_captured_states_equal_transformers(family: Family, tmp_path: Path) -> None:
    theirs, ours = pair(family, tmp_path)
    tokens = sequence(24)
    expected = theirs(tokens[None], output_hidden_states=True).hidden_states
    hidden = packed(ours, [tokens], capture=(0, 2, 1, -1))
    features = hidden.features.split(ours.config.hidden_size, dim=-1)
    for ours_state, index in zip(features, (0, 2, 1, -1), strict=True):
        torch.testing.assert_close(ours_state, expected[index][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hidden.final, expected[-1][0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-moe-mixed", "mixtral", "gpt-oss", "gemma3-cap", "gemma2", "mistral-window"])
def test_all_gradients_equal_transformers_in_float64(name: str, tmp_path: Path) -> None:
    """Norms and the softmax of routers are in float32 in transformers, whatever the model's data type; the rest is in float64."""
    theirs, ours = pair(FAMILIES[name], tmp_path)
    theirs.double()
    ours.double().requires_grad_(True)
    tokens = sequence(24)
    theirs(tokens[None]).logits[0].logsumexp(dim=-1).sum().backward()
    ours.logits(packed(ours, [tokens]).final, TorchOps()).logsumexp(dim=-1).sum().backward()
    wanted = empty_model(ours.config, torch.float64, "cpu")
    found = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert all(grad is not None for grad in found.values())
    offset = torch.full((1,), ours.config.norm_offset)  # which loading adds, to gradients as well
    load_state(wanted, found)
    for (name, ours_parameter), (_, grad) in zip(ours.named_parameters(), wanted.named_parameters(), strict=True):
        shift = offset if "norm" in name else 0
        torch.testing.assert_close(ours_parameter.grad, grad - shift, atol=1e-5, rtol=1e-4,
                                   msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", ["llama-bias", "qwen2-tied", "qwen3"])
def test_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs, ours = pair(FAMILIES[name], tmp_path)
    theirs.double()
    ours.double().requires_grad_(True)
    tokens = sequence(16)
    torch.logsumexp(theirs(tokens[None]).logits[0], dim=-1).sum().backward()
    torch.logsumexp(ours.logits(packed(ours, [tokens]).final, TorchOps()), dim=-1).sum().backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())
    block, layer = theirs.model.layers[1], ours.layers[1]
    qkv = torch.cat([getattr(block.self_attn, f"{x}_proj").weight.grad for x in "qkv"])
    gate_up = torch.cat([block.mlp.gate_proj.weight.grad, block.mlp.up_proj.weight.grad])
    torch.testing.assert_close(layer.attention.qkv.weight.grad, qkv, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(layer.mlp.gate_up.weight.grad, gate_up, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(ours.embed.weight.grad, theirs.model.embed_tokens.weight.grad, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_bfloat16_folder_stays_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is so small that nothing is won by it on a CPU."""
    make_theirs(FAMILIES["qwen3"], torch.bfloat16).save_pretrained(tmp_path)
    small, _ = load_model(tmp_path)
    assert {parameter.dtype for parameter in small.parameters()} == {torch.float32}
    monkeypatch.setattr(weights, "_CACHED_BYTES", 0)
    ours, _ = load_model(tmp_path)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    wide, _ = load_model(tmp_path, "cpu", "fp64")
    tokens = sequence(20)
    narrow_final, wide_final = packed(ours, [tokens]).final, packed(wide, [tokens]).final
    assert (narrow_final.double() - wide_final).abs().mean() < 0.05 * wide_final.abs().mean()
