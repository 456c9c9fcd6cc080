"""Loading and saving: every source gives the same model, and whatever is wrong with one is said in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models.small_models import CONFIGS, SIZES, assert_same, logits_of, make, refused, some_tokens, their_logits
from safetensors.torch import load_file, save_file
from tiny import WINDOWED
from tiny import model as tiny_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from paceline.models.config import ExpertsSpec, ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.save import save_model
from paceline.models.state_dict import export_state, load_state
from paceline.models.state_layout import hf_layout
from paceline.models.weights import empty_model, load_model

# --- names


@pytest.mark.parametrize("name", CONFIGS)
def test_layout_covers_every_row_of_every_parameter_once(name: str) -> None:
    covered: dict[str, list[int]] = {}
    for slot in hf_layout(CONFIGS[name]).values():
        covered.setdefault(slot.param_name, []).extend(range(slot.start, slot.start + slot.length))
    rows = {key: list(range(parameter.shape[0])) for key, parameter in Decoder(CONFIGS[name]).named_parameters()}
    assert covered == rows


@pytest.mark.parametrize("name", CONFIGS)
def test_export_and_load_round_trip(name: str) -> None:
    model, state = make(name), export_state(make(name))
    forms = {
        "mapping": state, "stream": iter(state.items()), "own names": dict(model.named_parameters()),
        "bare": {key.removeprefix("model."): tensor for key, tensor in state.items()},
        "wrapped": {f"module._orig_mod.{key}": tensor for key, tensor in state.items()},
        "own names wrapped": {f"model.{key}": tensor for key, tensor in model.state_dict().items()},
        "float64": {key: tensor.double() for key, tensor in state.items()},
        "with extras": state | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)},
    }
    for form in forms.values():
        empty = Decoder.random(CONFIGS[name], seed=9)
        load_state(empty, form)
        assert_same(empty, model)


@pytest.mark.parametrize("kind", ["qwen3_moe", *WINDOWED])
def test_experts_and_windows_travel_here_and_to_transformers(kind: str, tmp_path: Path) -> None:
    """Saved and loaded, under the names of a folder and those that transformers has in memory."""
    model, tokens = tiny_model(kind, dtype=torch.float32), some_tokens()
    save_model(model, None, tmp_path / "out", max_shard_bytes=20_000)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    torch.testing.assert_close(logits_of(model, tokens), their_logits(theirs, tokens), atol=2e-4, rtol=2e-4)
    saved, _ = load_model(tmp_path / "out")
    assert saved.config.layers == model.config.layers and saved.config.ropes[1:] == model.config.ropes[1:]
    live = Decoder.random(model.config, seed=9)
    load_state(live, theirs.named_parameters())
    own = Decoder.random(model.config, seed=9)
    load_state(own, model.named_parameters())
    for found in (saved, live, own):
        for ours, wanted in zip(found.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=0)  # norms are stored minus one
    with pytest.raises(ValueError, match="missing"):
        load_state(own, dict(list(export_state(model).items())[:-1]))


def test_an_architecture_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"FalconForCausalLM is not supported; known: LlamaForCausalLM, .*Qwen3MoeForCausalLM, "
                                         r"MixtralForCausalLM, GptOssForCausalLM, Gemma2ForCausalLM, Gemma3ForCausalLM"):
        ModelConfig.from_hf({"architectures": ["FalconForCausalLM"]})


def test_layers_are_read_from_either_spelling() -> None:
    """Windows by `layer_types` or by older keys; experts by either name of their number."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    qwen2 = sizes | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 9}
    windows = [ModelConfig.from_hf(qwen2 | more).layers for more in (
        {"max_window_layers": 3}, {"max_window_layers": 0, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]})]
    assert windows[0] == windows[1] and [spec.window for spec in windows[0]] == [0, 0, 0, 9]
    assert ModelConfig.from_hf(qwen2 | {"use_sliding_window": False}).layers == ()
    moe = sizes | {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 16, "num_experts_per_tok": 2}
    found = [ModelConfig.from_hf(moe | more).layers for more in ({"num_experts": 6}, {"num_local_experts": 6})]
    assert found[0] == found[1] and found[0][0].experts == ExpertsSpec(6, 2, 16, normalised=False)
    alternating = ModelConfig.from_hf(moe | {"num_experts": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [spec.experts is not None for spec in alternating.layers] == [False, True, False, False]
    for wrong, message in (({"layer_types": ["chunked_attention"] * 4}, "layer_types"), ({"num_experts": 1}, "2 are active of 1"),
                           ({"num_experts": 6, "hidden_act": "relu"}, "hidden_act: relu")):
        with pytest.raises(ValueError, match=message):
            ModelConfig.from_hf(moe | {"use_sliding_window": True} | {"num_experts": 6} | wrong)


def test_export_gives_views() -> None:
    model = make("qwen2")
    export_state(model)["model.layers.1.self_attn.k_proj.weight"].fill_(7.0)
    assert (model.layers[1].attention.qkv.weight[32:48] == 7.0).all()
    assert not (model.layers[1].attention.qkv.weight[:32] == 7.0).any()


def test_tied_head_in_a_checkpoint_is_ignored() -> None:
    model, state = make("llama-tied"), export_state(make("llama-tied"))
    load_state(model, state | {"lm_head.weight": torch.zeros(61, 32)})
    assert_same(model, make("llama-tied"))


def test_wrong_tensors_are_named_and_nothing_is_copied() -> None:
    model, state = make("qwen3"), {key: torch.zeros_like(value) for key, value in export_state(make("qwen3")).items()}
    cases = {
        r"weights: 1 tensor\(s\) of the wrong shape: model.norm.weight is \[3\], expected \[32\]":
            state | {"model.norm.weight": torch.zeros(3)},
        r"1 unknown tensor\(s\): model.extra.weight \[2, 3\]": state | {"model.extra.weight": torch.zeros(2, 3)},
        r"1 tensor\(s\) missing: lm_head.weight \[61, 32\]":
            {key: value for key, value in state.items() if key != "lm_head.weight"},
        r"23 tensor\(s\) missing: model.embed_tokens.weight .* \.\.\.": {"norm": torch.zeros(32), "lm_head.weight":
            torch.zeros(61, 32)},
        r"1 tensor\(s\) given twice: norm": state | {"norm": torch.zeros(32)},
    }
    for message, tensors in cases.items():
        with pytest.raises(ValueError, match=message):
            load_state(model, tensors)
        assert_same(model, make("qwen3"))
    with pytest.raises(ValueError, match="expected"):
        load_state(model, iter([("norm", torch.zeros(3))]))
    with pytest.raises(ValueError, match="missing"):
        load_state(model, iter([("norm", torch.ones(32))]))


def test_not_strict_takes_a_part_but_no_wrong_shape() -> None:
    model = make("llama")
    load_state(model, {"model.norm.weight": torch.full((32,), 4.0), "other": torch.zeros(1)}, strict=False)
    assert (model.norm == 4.0).all()
    with pytest.raises(ValueError, match="wrong shape"):
        load_state(model, {"model.norm.weight": torch.zeros(5)}, strict=False)


# --- saving


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_folder_loads_here_and_in_transformers(name: str, tmp_path: Path) -> None:
    model, tokens = make(name), some_tokens()
    save_model(model, None, tmp_path / "out")
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert theirs.dtype == torch.float32
    torch.testing.assert_close(logits_of(model, tokens), their_logits(theirs, tokens), atol=1e-4, rtol=1e-4)
    again, tokenizer = load_model(tmp_path / "out")
    assert tokenizer is None and again.config.eos_token_ids == model.config.eos_token_ids
    assert again.config.max_context == model.config.max_context
    assert_same(again, model)
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_saved_sharded_in_bfloat16(tmp_path: Path) -> None:
    model = make("llama").bfloat16()
    save_model(model, None, tmp_path / "out", max_shard_bytes=8000)
    shards = sorted((tmp_path / "out").glob("model-*-of-*.safetensors"))
    assert len(shards) > 2 and all(shard.stat().st_size < 9500 for shard in shards)
    assert_same(load_model(tmp_path / "out")[0], model)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert theirs.dtype == torch.bfloat16
    tokens = some_tokens()
    wide, _ = load_model(tmp_path / "out", dtype="float32")
    torch.testing.assert_close(logits_of(wide, tokens), their_logits(theirs.float(), tokens), atol=1e-4, rtol=1e-4)


def test_saving_replaces_only_when_asked_and_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out"
    save_model(make("llama"), None, folder)
    with pytest.raises(ValueError, match="out: exists and is not an empty folder"):
        save_model(make("qwen3"), None, folder)
    save_model(make("qwen3"), None, folder, overwrite=True)
    assert load_model(folder)[0].config.architecture == "qwen3"

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("paceline.models.save.save_tensors", fail)
    with pytest.raises(OSError, match="disk full"):
        save_model(make("llama"), None, folder, overwrite=True)
    assert list(tmp_path.iterdir()) == [folder]
    assert load_model(folder)[0].config.architecture == "qwen3"


def test_what_hugging_face_cannot_say_is_refused(tmp_path: Path) -> None:
    odd = Decoder.random(ModelConfig("llama", **SIZES, qkv_bias=True))
    with pytest.raises(ValueError, match="qkv_bias: LlamaForCausalLM cannot say True"):
        save_model(odd, None, tmp_path / "out")


def test_tokenizer_travels_with_the_folder(tmp_path: Path) -> None:
    save_model(make("llama"), tiny_tokenizer(), tmp_path / "out")
    _, tokenizer = load_model(tmp_path / "out")
    assert tokenizer is not None
    assert tokenizer("b a c").input_ids == [1, 0, 2]
    assert tokenizer.decode([2, 0]) == "c a"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    raw = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "<unk>": 3}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")


# --- folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(make("llama"), None, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_model(make("llama"), None, tmp_path / "model", max_shard_bytes=8000)
    return tmp_path / "model"


def edit_json(file: Path, **changes: object) -> None:
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def test_eos_ids_come_from_both_files(folder: Path) -> None:
    edit_json(folder / "config.json", eos_token_id=3)
    edit_json(folder / "generation_config.json", eos_token_id=[9, 3, 4])
    assert load_model(folder)[0].config.eos_token_ids == (3, 9, 4)


def test_old_rope_spelling_is_the_same_model(tmp_path: Path) -> None:
    model, folder, tokens = make("llama3"), tmp_path / "model", some_tokens()
    save_model(model, None, folder)
    scaling = json.loads((folder / "config.json").read_text())["rope_parameters"]
    old = {key: value for key, value in scaling.items() if key != "rope_theta"}
    edit_json(folder / "config.json", rope_parameters=..., rope_scaling=old, rope_theta=5000.0)
    torch.testing.assert_close(logits_of(load_model(folder)[0], tokens), logits_of(model, tokens))


@pytest.mark.parametrize("dtype", ["float32", "fp32", "float64", "bf16", "bfloat16", "float16", "fp16", torch.float64])
def test_dtypes(folder: Path, dtype: str | torch.dtype) -> None:
    model, _ = load_model(folder, "cpu", dtype)
    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    assert str(model.embed.weight.dtype).endswith(short.get(str(dtype), str(dtype).removeprefix("torch.")))
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_wrong_arguments(folder: Path) -> None:
    refused(folder, "dtype: int8 is not supported; known: auto, float32", dtype="int8")
    refused(folder, "dtype: torch.int8 is not supported", dtype=torch.int8)
    refused(folder, "max_context: 257 is not within 1 .. 256", max_context=257)
    assert load_model(folder, max_context=32)[0].config.max_context == 32


def test_lower_max_context_is_not_saved_as_the_models(folder: Path, tmp_path: Path) -> None:
    model, _ = load_model(folder, max_context=32)
    save_model(model, None, tmp_path / "again")
    assert load_model(tmp_path / "again")[0].config.max_context == 256


def test_tied_parameters_stay_one_tensor() -> None:
    model = empty_model(CONFIGS["llama-tied"], torch.float32, "cpu")
    assert model.head.weight is model.embed.weight


BROKEN_FOLDERS: dict[str, Callable[[Path], object]] = {
    r"config.json: no such file": lambda f: (f / "config.json").unlink(),
    r"config.json: not JSON": lambda f: (f / "config.json").write_text("{"),
    r"config.json: not a JSON object": lambda f: (f / "config.json").write_text("[]"),
    r"config.json: architectures: GPT2LMHeadModel is not supported; known: LlamaForCausalLM":
        lambda f: edit_json(f / "config.json", architectures=["GPT2LMHeadModel"]),
    r"model/config.json: key 'hidden_size' is missing": lambda f: edit_json(f / "config.json", hidden_size=...),
    r"config.json: quantization_config": lambda f: edit_json(f / "config.json", quantization_config={"bits": 4}),
    r"neither model.safetensors nor model.safetensors.index.json is there":
        lambda f: (f / "model.safetensors").unlink(),
    r"model.safetensors: truncated": lambda f: cut(f / "model.safetensors", 0.7),
    r"model.safetensors: truncated, or": lambda f: cut(f / "model.safetensors", 0.01),
    r"model.safetensors: truncated, or not": lambda f: (f / "model.safetensors").write_bytes(b"not a tensor file" * 9),
    r"1 tensor\(s\) missing: model.norm.weight \[32\]": lambda f: without(f / "model.safetensors", "model.norm.weight"),
    r"2 tensor\(s\) of the wrong shape: .*embed_tokens.weight is \[61, 32\], expected \[60, 32\]":
        lambda f: edit_json(f / "config.json", vocab_size=60),
    r"9 unknown tensor\(s\): model.layers.1": lambda f: edit_json(f / "config.json", num_hidden_layers=1),
}


def cut(file: Path, share: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])


def without(file: Path, name: str) -> None:
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)


@pytest.mark.parametrize("message", BROKEN_FOLDERS)
def test_broken_folder(folder: Path, message: str) -> None:
    BROKEN_FOLDERS[message](folder)
    refused(folder, message)


def test_broken_shards(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    good, shard = index.read_text(), sorted(sharded.glob("model-*.safetensors"))[1]
    raw = json.loads(good)
    raw["weight_map"]["model.ghost.weight"] = shard.name
    index.write_text(json.dumps(raw))
    refused(sharded, f"{shard.name}: truncated, or not what its index says .*model.ghost.weight")
    index.write_text("{}")
    refused(sharded, "weight_map is missing")
    index.write_text(good)
    shard.unlink()
    refused(sharded, f"{shard.name}: this shard is named in model.safetensors.index.json and missing")


def test_sources_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(tmp_path / "nothing", "nothing: no such folder or file, and not a hub id")
    refused(tmp_path / "nothing.gguf", "nothing.gguf: no such file")
    refused("nobody/no-such-model", "nobody/no-such-model: no such folder here, not in the hub's cache, and the hub is "
            "not reached")
    refused("../nobody/x", "not a hub id")
    (tmp_path / "file.bin").write_bytes(b"")
    refused(tmp_path / "file.bin", "file.bin: neither a model folder nor a .gguf file")


def test_hub_id_from_the_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "cache" / "models--someone--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    shutil.copytree(folder, repository / "snapshots" / ("a" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert_same(load_model("someone/tiny")[0], make("llama"))
