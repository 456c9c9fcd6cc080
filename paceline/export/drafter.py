"""Learned drafters as checkpoints that vLLM, SGLang and speculators load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.drafters.checkpoint import drafter_config, drafter_tensors
from paceline.drafters.eagle import Eagle
from paceline.export.loaders import DrafterLoader, check_tensors
from paceline.files import atomic_write, save_tensors
from paceline.models.architectures import hf_name_of
from paceline.models.decoder import Decoder
from paceline.optim import require_finite

_SPECULATIVE_TOKENS = 5
"""Number of draft tokens per step that a speculators checkpoint recommends."""


def export_drafter(drafter: Eagle, policy: Decoder, loader: DrafterLoader, folder: Path | str, policy_name: str = "",
                   any_weights: bool = False) -> None:
    """Write a drafter as the checkpoint that `loader` reads.

    Raises ValueError, and writes nothing, if the loader cannot express this drafter, or the drafter was trained for other weights
    than the policy's (`any_weights` allows that). `policy_name`: how the checkpoint names its policy, a folder or a hub id.
    """
    folder = Path(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(f"{folder}: exists and is not an empty folder")
    known = drafter.policy_fingerprint
    problem = None if known is None or any_weights else known.mismatch(policy)
    if problem is not None:
        raise ValueError(f"{problem.split(':')[0]}; train it for this policy, or export it as it is (--force)")
    require_finite(drafter.named_parameters(), "drafter")
    drafter = _with_distinct_layers(drafter)
    _require_expressible(drafter, loader)
    tensors, config = _portable_tensors(drafter, policy), drafter_config(drafter)
    tensors, config = _FORMATS[loader](tensors, config, policy, policy_name)
    check_tensors(loader, config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    atomic_write(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _with_distinct_layers(drafter: Eagle) -> Eagle:
    """Return an equivalent drafter whose feature layers are distinct and in ascending order, as other engines capture them.
    Columns of `fc` that belong to the same layer are added."""
    config, layers = drafter.config, drafter.config.feature_layers
    distinct = tuple(sorted(set(layers)))
    if layers == distinct:
        return drafter
    parts = drafter.fc.weight.detach().chunk(len(layers), dim=1)
    columns = [torch.stack([part for part, layer in zip(parts, layers, strict=True) if layer == wanted]).sum(0)
               for wanted in distinct]
    ids = drafter.draft_ids
    module = Eagle(replace(config, feature_layers=distinct), ids, drafter.head is not None).to(drafter.fc.weight)
    module.load_state_dict({**drafter.state_dict(), "fc.weight": torch.cat(columns, dim=1)})
    module.policy_fingerprint = drafter.policy_fingerprint
    return module


def _require_expressible(drafter: Eagle, loader: DrafterLoader) -> None:
    """Raise ValueError if the loader's model lacks something that this drafter has."""
    config, model, three = drafter.config, drafter.config.model, drafter.config.form == "eagle3"
    fc_bias = drafter.fc.bias is not None and bool(drafter.fc.bias.any())
    on_sglang = loader == "sglang"
    problems = {
        "an EAGLE drafter (it reads EAGLE-3 only)": loader == "speculators" and not three,
        "a bias of fc": fc_bias and not (on_sglang and not three),
        "biases in the layer": three and on_sglang and (model.qkv_bias or model.o_bias or model.mlp_bias),
        "query and key norms": model.qk_norm and (not three or on_sglang or model.qkv_bias or model.o_bias or model.mlp_bias),
        "norm_before_residual": config.norm_before_residual and on_sglang,
        "a number of feature layers other than three": three and on_sglang and len(config.feature_layers) != 3,
        "the final hidden state as a feature of EAGLE-3": three and -1 in config.feature_layers,
    }
    for what, is_problem in problems.items():
        if is_problem:
            raise ValueError(f"{loader} cannot load this drafter: {what} is not supported there")


def _portable_tensors(drafter: Eagle, policy: Decoder) -> dict[str, Tensor]:
    """The drafter's tensors without a bias of fc that is zero, and with zeros for those of the attention's biases that it lacks:
    loaders have one switch for all four. EAGLE drafters of other engines have the policy's whole vocabulary."""
    tensors, model = drafter_tensors(drafter, policy), drafter.config.model
    if drafter.config.form == "eagle":
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    if "fc.bias" in tensors and not bool(tensors["fc.bias"].any()):
        del tensors["fc.bias"]
    if model.qkv_bias or model.o_bias:
        for name in [name for name in tensors if ".self_attn." in name and name.endswith("_proj.weight")]:
            tensors.setdefault(name.replace(".weight", ".bias"), tensors[name].new_zeros(len(tensors[name])))
    return tensors


def _vllm(tensors: dict[str, Tensor], config: dict[str, Any], policy: Decoder,
          policy_name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return tensors, config


def _sglang(tensors: dict[str, Tensor], config: dict[str, Any], policy: Decoder,
            policy_name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """SGLang names the layer of an EAGLE-3 drafter `midlayer`, and its EAGLE drafters have a bias of fc."""
    if "draft_vocab_size" in config:
        vocabulary = config["vocab_size"]
        full = {"d2t": torch.zeros(vocabulary, dtype=torch.int64), "t2d": torch.ones(vocabulary, dtype=torch.bool)}
        return {**full, **{name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}}, config
    fc = tensors["fc.weight"]
    return {"fc.bias": fc.new_zeros(len(fc)), **tensors}, {**config, "architectures": ["LlamaForCausalLMEagle"]}


def _speculators(tensors: dict[str, Tensor], config: dict[str, Any], policy: Decoder,
                 policy_name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """speculators keeps the settings of the layer apart from those of the drafter."""
    own = ("draft_vocab_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids")
    layer = {key: value for key, value in config.items()
             if key not in (*own, "architectures", "eagle_config", "torch_dtype") and not key.startswith("paceline_")}
    num_features = len(config["eagle_aux_hidden_state_layer_ids"])
    if num_features != 3:
        layer["num_aux_hidden_states"] = num_features  # for vLLM, which otherwise expects three in this format
    architecture = hf_name_of(policy.config)
    method = {"proposal_type": "greedy", "speculative_tokens": _SPECULATIVE_TOKENS, "verifier_accept_k": 1,
              "accept_tolerance": 0.0}
    return tensors, {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
        "torch_dtype": config["torch_dtype"], "tie_word_embeddings": False, **{key: config[key] for key in own},
        "target_hidden_size": None, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [method], "default_proposal_method": "greedy",
                               "verifier": {"name_or_path": policy_name or None, "architectures": [architecture]}},
        "transformer_layer_config": layer,
        **{key: value for key, value in config.items() if key.startswith("paceline_")}}


_FORMATS = {"vllm": _vllm, "sglang": _sglang, "speculators": _speculators}
