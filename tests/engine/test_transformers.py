"""The engine's text equals transformers': greedy tokens are the arg max of its logits, and sampled ones that of its logits with
the same noise. Tiny random models of every architecture, with and without speculation."""

from __future__ import annotations

import pytest
import torch

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.kernels import SamplingTensors, TorchOps
from paceline.models.weights import load_model

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
         "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": None,
         "eos_token_id": None, "pad_token_id": 0}
EXPERTS = {"experts_implementation": "eager"}
EAGER = {"attn_implementation": "eager"}  # where transformers leaves out sinks and caps otherwise
KINDS = {
    "Llama": {}, "Qwen2": {}, "Qwen3": {"head_dim": 16}, "Mistral": {"head_dim": 8, "sliding_window": 7},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, **EXPERTS},
    "Mixtral": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **EXPERTS},
    "GptOss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9, **EXPERTS, **EAGER},
    "Gemma2": {"head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 12, **EAGER},
    "Gemma3": {"head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 12, "sliding_window_pattern": 2, **EAGER},
}
PROMPTS = [[5, 6, 7, 8], [1] * 9, [90, 2, 33]]


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A random model, and the folder that transformers saves it to."""
    torch.manual_seed(0)
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config(**SIZES, **KINDS[kind])).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:  # fresh norms and biases would hide a mix-up
                parameter.add_(torch.randn_like(parameter) * 0.2)
    theirs.save_pretrained(folder)
    return theirs, folder


@pytest.mark.parametrize("strategy", ["off", "suffix:d6w2v12"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_equal_transformers(pair, strategy, temperature):
    theirs, folder = pair
    engine = Engine(load_model(folder, "cpu", "float64", quiet=True)[0], strategy=strategy,
                    config=EngineConfig(kv_tokens=400, page_size=4, max_batch=2))
    params = SamplingParams(temperature=temperature, max_new_tokens=28, raw_logprobs=True, seed=3)
    rollouts = [rollout for group in engine.generate(PROMPTS, params) for rollout in group.rollouts]
    for rollout in rollouts:
        ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
        with torch.no_grad():
            logits = theirs(ids).logits[0, len(rollout.prompt_ids) - 1 : -1]
        positions = torch.arange(len(rollout.prompt_ids), ids.shape[1])
        rows = torch.zeros(len(logits))
        noise = SamplingTensors(rows.long() + rollout.seed, positions, rows + temperature, rows.int(), rows + 1, rows)
        assert rollout.token_ids == TorchOps().sample(logits, noise)[0].tolist()
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        assert rollout.raw_logprobs == pytest.approx(chosen.tolist(), abs=1e-4)
    if strategy != "off" and temperature == 0:
        assert engine.stats().drafted > 0


def test_greedy_equals_generate(pair):
    theirs, folder = pair
    engine = Engine(load_model(folder, "cpu", "float64", quiet=True)[0])
    for prompt, group in zip(PROMPTS, engine.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=24)), strict=True):
        ids = torch.tensor([prompt])
        want = theirs.generate(ids, max_new_tokens=24, do_sample=False, attention_mask=torch.ones_like(ids))[0, len(prompt):]
        assert group.rollouts[0].token_ids == want.tolist()
