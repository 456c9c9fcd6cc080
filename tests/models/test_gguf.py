"""Loading GGUF files: the same model as from other sources, and whatever is wrong with a file is said in one line."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from models.small_models import CONFIGS, assert_same, logits_of, make, refused, some_tokens, their_logits
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.gguf import gguf_to_hf
from paceline.models.state_dict import export_state
from paceline.models.state_layout import hf_layout
from paceline.models.weights import load_model


def write_gguf(model: Decoder, file: Path, half: bool = False, changes: dict[str, object] | None = None,
               divisors: Tensor | None = None) -> None:
    """As llama.cpp's converter writes it: its names, and q and k interleaved for the llama architecture."""
    config, arch = model.config, model.config.architecture
    writer = gguf.GGUFWriter(file, (changes or {}).get("arch", arch))
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_freq_base(config.rope.theta)
    if config.rope.kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(config.rope.kind))
        writer.add_rope_scaling_factor(config.rope.factor)
        writer.add_rope_scaling_orig_ctx_len(config.rope.original_context)
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(5)
    theirs = {gguf_to_hf(name): name for name in gguf_names(config.num_layers)}
    for name, tensor in export_state(model).items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_heads if "q_proj" in name else config.num_kv_heads
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        kind = np.float16 if half and tensor.dim() == 2 else np.float32
        writer.add_tensor(theirs[name], np.ascontiguousarray(tensor.numpy().astype(kind)))
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_names(num_layers: int) -> list[str]:
    """llama.cpp's own list, not ours."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, num_layers)
    bases = {name for _, name in table.mapping.values()}
    return [f"{base}.{kind}" for base in bases for kind in ("weight", "bias")]


def test_gguf_names_are_llama_cpps() -> None:
    for arch in (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.QWEN2, gguf.MODEL_ARCH.QWEN3):
        table = gguf.get_tensor_name_map(arch, 2)
        for config in CONFIGS.values():
            for name in hf_layout(config):
                if "_norm" in name and "layernorm" not in name and arch is not gguf.MODEL_ARCH.QWEN3:
                    continue
                assert gguf_to_hf(table.get_name(name, (".weight", ".bias"))) == name
    assert gguf_to_hf("blk.0.ffn_gate_exps.weight") == "blk.0.ffn_gate_exps.weight"


@pytest.mark.parametrize("name", CONFIGS)
def test_gguf_of_every_family(name: str, tmp_path: Path) -> None:
    model = make(name)
    write_gguf(model, tmp_path / "model.gguf", divisors=llama3_divisors(model.config))
    ours, tokenizer = load_model(tmp_path / "model.gguf")
    assert tokenizer is None and ours.config.eos_token_ids == (3, 5)
    assert_same(ours, model)
    tokens = some_tokens()
    torch.testing.assert_close(logits_of(ours, tokens), logits_of(model, tokens), atol=1e-5, rtol=1e-5)


def llama3_divisors(config: ModelConfig) -> Tensor | None:
    """convert_hf_to_gguf.py's formula."""
    if config.rope.kind != "llama3":
        return None
    rope, out = config.rope, []
    for i in range(0, config.head_dim, 2):
        wavelength = 2 * np.pi * rope.theta ** (i / config.head_dim)
        smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor)
        out.append(1 / ((1 - min(max(smooth, 0), 1)) / rope.factor + min(max(smooth, 0), 1)))
    return torch.tensor(out)


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "qwen3-128"])  # transformers takes 128 for granted in qwen3
@pytest.mark.parametrize("half", [False, True])
def test_gguf_equals_transformers(name: str, half: bool, tmp_path: Path) -> None:
    write_gguf(make(name), tmp_path / "model.gguf", half)
    ours, _ = load_model(tmp_path / "model.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    tokens = some_tokens()
    torch.testing.assert_close(logits_of(ours, tokens), their_logits(theirs, tokens), atol=1e-4, rtol=1e-4)


def test_broken_gguf(tmp_path: Path) -> None:
    file, model = tmp_path / "model.gguf", make("llama")
    write_gguf(model, file)
    whole = file.read_bytes()
    for share in (0.0, 0.0001, 0.002, 0.01, 0.03, 0.5, 0.99):
        file.write_bytes(whole[: int(len(whole) * share)])
        refused(file, "model.gguf: truncated, or not a GGUF file")
    file.write_bytes(b"GGML" + whole[4:])
    refused(file, "model.gguf: truncated, or not a GGUF file")
    write_gguf(model, file, changes={"arch": "gemma3"})
    refused(file, "model.gguf: general.architecture: gemma3 is not supported; known: llama, qwen2, qwen3")
    write_gguf(make("llama"), file, divisors=torch.tensor([1.0, 2.0, 1.5, 9.0]))
    refused(file, "model.gguf: rope_freqs.weight does not follow the llama3 rule")
    write_gguf(make("llama"), file, divisors=torch.ones(3))
    refused(file, r"model.gguf: rope_freqs.weight is \[3\], expected \[4\]")
