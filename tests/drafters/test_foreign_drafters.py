"""Drafters made elsewhere: they compute what the layers of transformers compute, and what is ignored or refused is said."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import save_file
from tiny import CONFIGS, OPS, VOCAB, greedy_chain, model
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from paceline import Engine, SamplingParams
from paceline.drafters.checkpoint import load_eagle
from paceline.models.attend import PackedAttend
from paceline.models.decoder import Rope
from paceline.spot.scaling import measure_scales, to_plain_scale, to_training_scale

H = CONFIGS["qwen3"].hidden_size
LAYER = {"hidden_size": H, "vocab_size": VOCAB, "intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 2,
         "head_dim": 12, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "hidden_act": "silu",
         "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "tie_word_embeddings": False}
"""Other numbers of heads, another head size, MLP size, epsilon and rotary base than the policy's."""


def randomize(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return module.double().eval()


class TheirDrafter(torch.nn.Module):
    """A drafter as other projects build it: a layer of transformers whose input projections are wider (EAGLE-3)."""

    def __init__(self, three: bool, qwen3: bool = False, norm_before_residual: bool = False, fc_bias: bool = False, **flags):
        super().__init__()
        self.three, self.norm_before_residual = three, norm_before_residual
        config = (Qwen3Config if qwen3 else LlamaConfig)(**LAYER, **flags)
        config._attn_implementation = "eager"
        self.rotary = (Qwen3RotaryEmbedding if qwen3 else LlamaRotaryEmbedding)(config)
        self.layer = (Qwen3DecoderLayer if qwen3 else LlamaDecoderLayer)(config, 0)
        self.fc = torch.nn.Linear(3 * H if three else 2 * H, H, bias=fc_bias)
        if three:
            attention = self.layer.self_attn
            for name in ("q_proj", "k_proj", "v_proj"):
                old = getattr(attention, name)
                setattr(attention, name, torch.nn.Linear(2 * H, old.out_features, bias=old.bias is not None))
            self.hidden_norm, self.norm = LlamaRMSNorm(H, 1e-5), LlamaRMSNorm(H, 1e-5)
            self.head = torch.nn.Linear(H, 20, bias=False)
        else:
            self.layer.input_layernorm = torch.nn.Identity()
        randomize(self)

    def forward(self, embedded, features):
        length = len(embedded)
        mask = torch.full((1, 1, length, length), float("-inf"), dtype=torch.float64).triu(1)
        position = self.rotary(embedded, torch.arange(length)[None])
        if not self.three:
            x = self.fc(torch.cat([embedded, features], -1))[None]
            return self.layer(x, attention_mask=mask, position_embeddings=position)[0]
        state = self.fc(features)
        normed = self.hidden_norm(state)
        residual = normed if self.norm_before_residual else state
        x = torch.cat([self.layer.input_layernorm(embedded), normed], -1)[None]
        attended = self.layer.self_attn(x, attention_mask=mask, position_embeddings=position)[0][0]
        x = residual + attended
        return x + self.layer.mlp(self.layer.post_attention_layernorm(x))

    def tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        found = {f"{prefix}.{name}": tensor for name, tensor in self.layer.state_dict().items()}
        found |= {f"fc.{name}": tensor for name, tensor in self.fc.state_dict().items()}
        if self.three:
            found |= {f"{prefix}.hidden_norm.weight": self.hidden_norm.weight, "norm.weight": self.norm.weight,
                      "lm_head.weight": self.head.weight, "d2t": torch.arange(20) * 2, "t2d": torch.arange(VOCAB) % 3 == 0}
        return {name: tensor.detach().contiguous() for name, tensor in found.items()}


VARIANTS = {
    "EAGLE": (TheirDrafter(False, fc_bias=True), "layers.0", {"architectures": ["LlamaForCausalLM"], **LAYER}),
    "EAGLE with biases": (TheirDrafter(False, attention_bias=True, mlp_bias=True), "model.layers.0",
                          {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True, **LAYER}),
    "SpecForge": (TheirDrafter(True), "midlayer",
                  {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 20,
                   "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}, **LAYER}),
    "speculators": (TheirDrafter(True, qwen3=True, norm_before_residual=True), "layers.0",
                    {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": 20,
                     "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
                     "transformer_layer_config": {"model_type": "qwen3", **LAYER}}),
}


def write(folder, tensors, raw, pickled=False):
    (folder / "config.json").write_text(json.dumps(raw))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_drafter_made_elsewhere_computes_what_its_makers_layer_does(variant, tmp_path):
    theirs, prefix, raw = VARIANTS[variant]
    write(tmp_path, theirs.tensors(prefix), raw, pickled=variant.startswith("EAGLE"))
    policy = model("qwen3")
    ours = load_eagle(tmp_path, policy)
    assert ours.config.feature_layers == ((0, 1, 2) if theirs.three else (-1,))
    embedded, features = torch.randn(9, H, dtype=torch.float64), torch.randn(9, 3 * H if theirs.three else H, dtype=torch.float64)
    attend = PackedAttend(OPS, *Rope(ours.config.model, 64, torch.float64, "cpu")(torch.arange(9)), (9,))
    out = ours(embedded, ours.encode(features, OPS), attend)
    wanted = theirs(embedded, features)
    close = {"rtol": 1e-5, "atol": 1e-5}  # transformers computes norms and rotary embeddings in float32
    torch.testing.assert_close(out, wanted, **close)
    logits = ours.logits(out, policy, OPS)
    torch.testing.assert_close(logits, theirs.head(theirs.norm(wanted)) if theirs.three else policy.logits(wanted, OPS), **close)
    assert ours.draft_ids is None if not theirs.three else ours.draft_ids.tolist() == [3 * i for i in range(20)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_engine_drafts_with_it(variant, tmp_path):
    theirs, prefix, raw = VARIANTS[variant]
    write(tmp_path, theirs.tensors(prefix), raw)
    policy = model("qwen3")
    engine = Engine(policy, drafter=tmp_path, strategy="eagle:d3w1v3")
    made, real = [], engine.executor.learned._draft

    def spy(slots, strategy, max_missing):
        drafts = real(slots, strategy, max_missing)
        made.append((list(engine.scheduler.running[0].tokens), drafts.tokens[0].tolist()))
        return drafts

    engine.executor.learned._draft = spy
    params = SamplingParams(temperature=0, max_new_tokens=12)
    found = engine.generate([[5, 6, 7, 8]], params)[0].rollouts[0].token_ids
    assert found == Engine(policy, drafter=None, strategy="off").generate([[5, 6, 7, 8]], params)[0].rollouts[0].token_ids
    assert len(made) > 3
    for tokens, guesses in made:
        assert guesses == greedy_chain(policy, engine.eagle.module, tokens, 3)


def test_what_is_ignored_is_said(tmp_path, caplog):
    theirs, prefix, raw = VARIANTS["EAGLE"]
    policy = model("qwen3")
    extra = {"embed_tokens.weight": policy.embed.weight + 1, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    write(tmp_path, theirs.tensors(prefix) | extra, raw)
    with caplog.at_level(logging.WARNING):
        load_eagle(tmp_path, policy)
    assert "ignored" in caplog.text and "embed_tokens.weight (it differs" in caplog.text and "inv_freq" in caplog.text
    caplog.clear()
    write(tmp_path, theirs.tensors(prefix) | {"embed_tokens.weight": policy.embed.weight.clone()}, raw)
    with caplog.at_level(logging.WARNING):
        load_eagle(tmp_path, policy)
    assert not caplog.text, "a copy of the policy's embedding is the policy's embedding"


def test_what_does_not_fit_is_refused(tmp_path):
    theirs, prefix, raw = VARIANTS["speculators"]
    policy, tensors = model("qwen3"), theirs.tensors(prefix)
    layer = raw["transformer_layer_config"]
    cases = [({**raw, "norm_output": True}, tensors, "norm_output"), ({**raw, "fc_norm": True}, tensors, "fc_norm"),
             ({**raw, "speculators_model_type": "peagle"}, tensors, "peagle"),
             ({**raw, "target_hidden_size": 99}, tensors, "another policy"),
             ({**raw, "transformer_layer_config": {**layer, "vocab_size": 99}}, tensors, "another policy"),
             ({**raw, "eagle_aux_hidden_state_layer_ids": [0, 1, 7]}, tensors, "reads layer 7"),
             (raw, {**tensors, "layers.1.mlp.up_proj.weight": torch.zeros(1)}, "one-layer"),
             (raw, {**tensors, "d2t": torch.full((20,), -1)}, "outside the policy's vocabulary"),
             (raw, {k: v for k, v in tensors.items() if "k_norm" not in k}, "k_norm.weight is missing")]
    for config, content, message in cases:
        write(tmp_path, content, config)
        with pytest.raises(ValueError, match=message) as error:
            load_eagle(tmp_path, policy)
        assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match="damaged"):
        load_eagle(tmp_path, policy)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_it_can_be_trained_further(variant, tmp_path):
    """At the scale of training it computes the same, biases included, and the way there and back changes nothing."""
    theirs, prefix, raw = VARIANTS[variant]
    write(tmp_path, theirs.tensors(prefix), raw)
    policy = model("qwen3")
    plain = load_eagle(tmp_path, policy)
    scales = measure_scales(policy, plain.config, [])._replace(embedding=0.25, residual=1.0 if theirs.three else 8.0)
    scales = scales._replace(features=torch.full_like(scales.features, 8.0))
    trained = to_training_scale(plain, scales)
    embedded, features = torch.randn(9, H, dtype=torch.float64), torch.randn(9, len(scales.features), dtype=torch.float64)
    attend = PackedAttend(OPS, *Rope(plain.config.model, 64, torch.float64, "cpu")(torch.arange(9)), (9,))
    out = plain(embedded, plain.encode(features, OPS), attend)
    divided = embedded if theirs.three else embedded / scales.embedding
    scaled = trained(divided, trained.encode(features / scales.features, OPS), attend) * scales.residual
    torch.testing.assert_close(scaled, out)
    back = to_plain_scale(trained, dict(trained.named_parameters()), scales, plain.config, torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), plain.parameters(), strict=True))
