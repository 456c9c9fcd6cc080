"""Exported drafters: what each loader looks for, what Paceline reads back, and what is refused."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from e2e.toy import make_folder, settings
from e2e.toy import run as run_command
from safetensors.torch import load_file, save_file
from tiny import CONFIGS, VOCAB, greedy_chain

from paceline import Engine, SamplingParams
from paceline.cli import main
from paceline.config import LearnerConfig, OptimizerConfig
from paceline.drafters.checkpoint import load_eagle, save_eagle
from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.drafters.fingerprint import fingerprint_of
from paceline.export import export_adapter, export_drafter, export_policy, find_source
from paceline.export.loaders import LOADERS, check_tensors
from paceline.models.decoder import Decoder
from paceline.models.save import save_model
from paceline.models.weights import open_checkpoint
from paceline.rl import Learner, make_algorithm
from paceline.rl.checkpoint import Checkpoints, RunState, policy_folder, read_adapters, save_learner

TOKENS = [5, 6, 7, 8, 9, 10, 11]
DEEP = {kind: replace(config, num_layers=7, layers=config.layers * 3) for kind, config in CONFIGS.items()}
"""Policies with enough layers for three different ones that a drafter reads."""


@cache
def model(kind: str, seed: int = 0) -> Decoder:
    return Decoder.random(DEEP[kind], seed, std=0.3, dtype=torch.float64)


@cache
def eagle(kind: str, form: str, draft_vocab: int = 0) -> Eagle:
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:draft_vocab] if draft_vocab else None
    return Eagle.random(EagleConfig.for_policy(DEEP[kind], form), 1, 0.2, torch.float64, draft_ids=ids)


def shapes(folder):
    return {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}


def config(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("draft_vocab", [0, 20])
@pytest.mark.parametrize(("form", "loader"), [("eagle", "vllm"), ("eagle", "sglang"), *(("eagle3", name) for name in LOADERS)])
def test_an_exported_drafter_is_complete_and_drafts_the_same(kind, draft_vocab, form, loader, tmp_path):
    policy, drafter = model(kind), eagle(kind, form, draft_vocab=draft_vocab)
    export_drafter(drafter, policy, loader, tmp_path / "out", "name/of-policy")
    check_tensors(loader, config(tmp_path / "out"), shapes(tmp_path / "out"))
    back = load_eagle(tmp_path / "out", policy)
    assert back.config == drafter.config if loader != "sglang" or form == "eagle3" else back.config.fc_bias
    if form == "eagle3" or not draft_vocab:
        assert greedy_chain(policy, back, TOKENS, 4) == greedy_chain(policy, drafter, TOKENS, 4)
    assert ("lm_head.weight" in shapes(tmp_path / "out")) == (form == "eagle3"), "vLLM refuses an EAGLE drafter with a head"


def test_configs_say_what_each_loader_reads(tmp_path):
    for loader in LOADERS:
        export_drafter(eagle("llama", "eagle3", draft_vocab=20), model("llama"), loader, tmp_path / loader, "my/policy")
    vllm, sglang, speculators = (config(tmp_path / name) for name in ("vllm", "sglang", "speculators"))
    assert vllm["architectures"] == sglang["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (vllm["draft_vocab_size"], vllm["vocab_size"]) == (20, VOCAB)
    assert vllm["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert sglang["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3], "SGLang adds one"
    assert vllm["rope_parameters"] == vllm["rope_scaling"] and vllm["rope_scaling"]["rope_type"] == "llama3"
    assert "midlayer.self_attn.q_proj.weight" in shapes(tmp_path / "sglang")
    assert speculators["speculators_config"]["verifier"] == {"name_or_path": "my/policy", "architectures": ["LlamaForCausalLM"]}
    assert speculators["transformer_layer_config"]["rope_parameters"]["rope_type"] == "llama3"
    assert "model_type" not in speculators, "vLLM recognises the format by its absence"
    tensors = load_file(tmp_path / "vllm" / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(20)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids.sort().values)
    assert torch.equal(tensors["lm_head.weight"], model("llama").head.weight[ids])


def test_layers_are_read_once_and_in_order(tmp_path):
    """vLLM captures a layer once however often it is named, and from the first to the last."""
    config_ = EagleConfig.for_policy(DEEP["llama"], "eagle3", (4, 1, 4))
    drafter = Eagle.random(config_, 1, 0.2, torch.float64)
    for loader in ("vllm", "speculators"):
        export_drafter(drafter, model("llama"), loader, tmp_path / loader)
        back = load_eagle(tmp_path / loader, model("llama"))
        assert back.config.feature_layers == (1, 4) and config(tmp_path / loader)["eagle_aux_hidden_state_layer_ids"] == [1, 4]
        assert greedy_chain(model("llama"), back, TOKENS, 4) == greedy_chain(model("llama"), drafter, TOKENS, 4)
    with pytest.raises(ValueError, match="other than three"):
        export_drafter(drafter, model("llama"), "sglang", tmp_path / "sglang")


@pytest.mark.parametrize("loader", LOADERS)
def test_every_missing_or_misshapen_tensor_is_noticed(loader, tmp_path):
    export_drafter(eagle("qwen3", "eagle3", draft_vocab=20), model("qwen3"), loader, tmp_path / "out")
    raw, found = config(tmp_path / "out"), shapes(tmp_path / "out")
    for name, shape in found.items():
        with pytest.raises(ValueError, match=f"{loader}: tensor {name} is missing"):
            check_tensors(loader, raw, {other: s for other, s in found.items() if other != name})
        with pytest.raises(ValueError, match="the loader looks for"):
            check_tensors(loader, raw, found | {name: (*shape, 1)})
    with pytest.raises(ValueError, match=r"does not read fc\.more"):
        check_tensors(loader, raw, found | {"fc.more": (1,)})


def biased(kind: str, form: str, **changes) -> Eagle:
    """A drafter with biases, and what else the loaders' models may or may not have."""
    base = EagleConfig.for_policy(DEEP[kind], form)
    layer = {name: changes.pop(name) for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm") if name in changes}
    drafter = Eagle.random(replace(base, model=replace(base.model, **layer), **changes), 1, 0.2, torch.float64)
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.3, generator=torch.Generator().manual_seed(0))
    return drafter


def test_half_of_the_attentions_biases_is_filled_up(tmp_path):
    drafter = biased("qwen2", "eagle3", qkv_bias=True, mlp_bias=True, norm_before_residual=True)
    export_drafter(drafter, model("qwen2"), "vllm", tmp_path / "out")
    assert not load_file(tmp_path / "out" / "model.safetensors")["layers.0.self_attn.o_proj.bias"].any()
    back = load_eagle(tmp_path / "out", model("qwen2"))
    assert greedy_chain(model("qwen2"), back, TOKENS, 4) == greedy_chain(model("qwen2"), drafter, TOKENS, 4)
    export_drafter(biased("qwen2", "eagle", fc_bias=True), model("qwen2"), "sglang", tmp_path / "sglang")
    assert load_file(tmp_path / "sglang" / "model.safetensors")["fc.bias"].any()


@pytest.mark.parametrize(("loader", "form", "changes", "message"), [
    ("speculators", "eagle", {}, "EAGLE-3 only"), ("vllm", "eagle", {"fc_bias": True}, "a bias of fc"),
    ("sglang", "eagle3", {"qkv_bias": True}, "biases in the layer"),
    ("sglang", "eagle3", {"qk_norm": True}, "query and key norms"),
    ("sglang", "eagle3", {"norm_before_residual": True}, "norm_before_residual"),
    ("vllm", "eagle", {"qk_norm": True}, "query and key norms")])
def test_what_a_loader_cannot_express_is_refused(loader, form, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        export_drafter(biased("llama", form, **changes), model("llama"), loader, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def exported(capsys, *args: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(["export", *map(str, args)])
    captured = capsys.readouterr()
    return stop.value.code, captured.out + captured.err


def test_the_command_refuses_with_one_line(tmp_path, capsys):
    policy, drafter = model("llama"), deepcopy(eagle("llama", "eagle3", draft_vocab=20))
    drafter.policy_fingerprint = fingerprint_of(policy)
    save_eagle(drafter, tmp_path / "drafter", policy)
    for name, one in (("policy", policy), ("other", model("llama", 7)), ("shape", model("qwen3"))):
        save_model(one, None, tmp_path / name)
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    without_norm = {name: tensor for name, tensor in tensors.items() if name != "norm.weight"}
    cases = [(["--model", tmp_path / "other"], tensors, "trained for other weights"),
             (["--model", tmp_path / "shape"], tensors, "trained for another policy"),
             ([], tensors, "--model: name the policy"),
             (["--model", tmp_path / "policy"], without_norm, "norm.weight is missing"),
             (["--model", tmp_path / "policy"], tensors | {"d2t": torch.full((20,), VOCAB)}, "outside the policy's vocabulary")]
    for args, content, message in cases:
        save_file(content, tmp_path / "drafter" / "model.safetensors")
        code, text = exported(capsys, tmp_path / "drafter", "--to", "vllm", "--out", tmp_path / "out", *args)
        lines = [line for line in text.strip().splitlines() if "loading" not in line]
        assert code == 2 and message in text and len(lines) == 1, text
        assert not (tmp_path / "out").exists()
    save_file(tensors, tmp_path / "drafter" / "model.safetensors")
    common = tmp_path / "drafter", "--out", tmp_path / "out", "--model"
    assert exported(capsys, *common, tmp_path / "policy", "--to", "tgi")[0] == 2
    assert exported(capsys, *common, tmp_path / "other", "--to", "vllm", "--force")[0] == 0
    code, text = exported(capsys, *common, tmp_path / "policy", "--to", "vllm")
    assert code == 2 and "not an empty folder" in text


def test_a_run_is_exported_from_its_checkpoint(tmp_path, capsys):
    """The drafter was trained for the policy before the last update, which is how it should be."""
    learner = make_learner(deepcopy(model("llama")))
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", 2)
    drafter = deepcopy(eagle("llama", "eagle3"))
    drafter.policy_fingerprint = fingerprint_of(model("llama", 3))

    def write(folder):
        save_eagle(drafter, folder / "drafter", learner.policy.model)
        return save_learner(learner, folder, None)

    for step in (2, 4):
        path = checkpoints.save(RunState(step, 0), write)
    assert find_source(tmp_path / "run").checkpoint == path == find_source(path).checkpoint
    assert find_source(tmp_path / "run", 2).checkpoint != path
    assert exported(capsys, tmp_path / "run", "--to", "sglang", "--out", tmp_path / "out")[0] == 0
    assert load_eagle(tmp_path / "out", learner.policy.model).config == drafter.config
    code, text = exported(capsys, tmp_path / "run", "--to", "sglang", "--out", tmp_path / "none", "--step", 3)
    assert code == 2 and "only of 2, 4" in text
    with pytest.warns(UserWarning, match="trained for other weights"):
        engine = Engine.load(policy_folder(path), drafter=path / "drafter", strategy="eagle:d3w2v6")
    assert engine.generate([TOKENS], SamplingParams(max_new_tokens=10))[0].rollouts[0].finish_reason == "length"
    assert engine.stats().drafted > 0


def test_a_lora_run_is_exported_as_adapters_or_as_a_policy(tmp_path, capsys):
    make_folder(tmp_path)
    assert run_command(settings(tmp_path, "run", **{"learner.lora_rank": 2, "steps": 1})) == 0
    to_hf = tmp_path / "run", "--to", "hf", "--out"
    code, text = exported(capsys, *to_hf, tmp_path / "adapter")
    assert code == 0 and "LoRA adapters" in text
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 2
    assert exported(capsys, *to_hf, tmp_path / "policy", "--merge-lora", "--dtype", "float32")[0] == 0
    assert Engine.load(tmp_path / "policy").generate(["abc"], SamplingParams(max_new_tokens=4))[0].rollouts[0].text
    code, text = exported(capsys, tmp_path / "run", "--to", "vllm", "--out", tmp_path / "drafter")
    assert code == 2 and "no learned drafter" in text


def make_learner(policy, **config) -> Learner:
    return Learner(policy, make_algorithm("grpo", 16), LearnerConfig(**config), OptimizerConfig(lr=1e-3), 10, 1.0, torch.float64)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_lora_adapters_are_exported_for_peft_or_merged(kind, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    save_model(model(kind), None, tmp_path / "base")
    settings = {"lora_rank": 3, "lora_alpha": 12, "lora_targets": ("qkv", "gate_up", "down")}
    learner = make_learner(deepcopy(model(kind)), **settings)
    with torch.no_grad():
        for name, parameter in learner.policy.named_parameters():
            if ".lora_B" in name:
                parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(len(name)))
    path = Checkpoints(tmp_path / "checkpoints", 1).save(RunState(1, 0), partial(save_learner, learner, tokenizer=None))
    export_adapter(read_adapters(path), DEEP[kind], LearnerConfig(**settings), str(tmp_path / "base"), tmp_path / "adapter")
    export_policy(policy_folder(path), tmp_path / "merged")
    tokens = torch.tensor([TOKENS])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    plain = base(tokens).logits
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)(tokens).logits
    torch.testing.assert_close(adapted, merged)
    assert (plain - merged).abs().max() > 0.1
    export_policy(policy_folder(path), tmp_path / "narrow", "bfloat16")
    assert open_checkpoint(tmp_path / "narrow").own_dtype(torch.device("cpu")) == torch.bfloat16
    with pytest.raises(ValueError, match="no LoRA adapters"):
        export_adapter({}, DEEP[kind], LearnerConfig(**settings), "base", tmp_path / "none")
