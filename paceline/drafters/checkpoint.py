"""Checkpoints of learned drafters, in the layout that vLLM, SGLang and SpecForge read: `config.json` and `model.safetensors`.

The policy's embedding is never stored, and a head only if the drafter has one of its own. `paceline_policy` in `config.json`
holds the fingerprint of the policy that the drafter was trained for; other readers ignore it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.drafters.eagle import Eagle, EagleConfig, Form
from paceline.drafters.fingerprint import PolicyFingerprint, shape_of
from paceline.files import atomic_write, load_tensors, read_json, save_tensors
from paceline.models.decoder import Decoder
from paceline.names import suggest
from paceline.optim import require_finite

_PLAIN = {"fc.weight": "fc.weight", "attention.o.weight": "layers.0.self_attn.o_proj.weight",
          "mlp.down.weight": "layers.0.mlp.down_proj.weight", "mlp_norm": "layers.0.post_attention_layernorm.weight",
          "input_norm": "layers.0.input_layernorm.weight", "hidden_norm": "layers.0.hidden_norm.weight",
          "norm": "norm.weight", "head.weight": "lm_head.weight"}
_FUSED = {"attention.qkv.weight": [f"layers.0.self_attn.{x}_proj.weight" for x in "qkv"],
          "mlp.gate_up.weight": ["layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"]}
_FINGERPRINT_KEY = "paceline_policy"
_IGNORED = {"embed_tokens.weight", "t2d", "fc.bias", "d2t"}


def load_eagle(folder: str | Path, policy: Decoder) -> Eagle:
    """Loads a drafter for this policy, in its dtype and on its device.

    Raises ValueError if the checkpoint does not fit the policy's shape. A drafter that was trained for other weights of the same
    shape is accepted; its `policy_fingerprint` tells for which.
    """
    folder = Path(folder).expanduser()
    config, tensors = _read(folder)
    fingerprint, shape = PolicyFingerprint.from_json(config.get(_FINGERPRINT_KEY)), shape_of(policy.config)
    if fingerprint is not None and fingerprint.shape != shape:
        raise ValueError(f"{folder}: this drafter was trained for another policy ({fingerprint.shape}) than this one ({shape})")
    form: Form = "eagle3" if "layers.0.hidden_norm.weight" in tensors else "eagle"
    aux = tuple(config.get("eagle_aux_hidden_state_layer_ids") or ())
    beyond = [layer for layer in aux if not -1 <= layer < policy.config.num_layers]
    if beyond:
        raise ValueError(f"{folder}: this drafter reads layer {beyond[0]}, this policy has {policy.config.num_layers}")
    draft_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"])) if "d2t" in tensors else None
    if draft_ids is not None and not 0 <= int(draft_ids.min()) <= int(draft_ids.max()) < policy.config.vocab_size:
        raise ValueError(f"{folder}: d2t points outside the policy's vocabulary of {policy.config.vocab_size}")
    own_head = form == "eagle3" and "lm_head.weight" in tensors
    module = Eagle(EagleConfig.for_policy(policy.config, form, aux), draft_ids, own_head)
    module = module.to(policy.norm.device, policy.norm.dtype).requires_grad_(False)
    wanted = dict(module.named_parameters())
    known = {_PLAIN[name] for name in wanted if name in _PLAIN} | {part for parts in _FUSED.values() for part in parts}
    unknown = sorted(tensors.keys() - known - _IGNORED - {"lm_head.weight"})
    if unknown:
        raise ValueError(f"{folder}: tensor {unknown[0]} is not part of a one-layer {form} drafter")
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(_assemble(name, parameter, tensors, folder))
    module.policy_fingerprint = fingerprint
    return module


def save_eagle(module: Eagle, folder: str | Path) -> None:
    """Saves a drafter, with its `policy_fingerprint` if it has one. Each file is replaced atomically. NonFiniteError, and nothing
    is written, if a weight is not finite."""
    require_finite(module.named_parameters(), "drafter")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    model = module.config.model
    for name, parameter in module.named_parameters():
        value = parameter.detach().cpu()
        if name in _FUSED:
            head = model.head_dim
            sizes = ([model.num_heads * head, model.num_kv_heads * head, model.num_kv_heads * head] if "qkv" in name
                     else [model.intermediate_size] * 2)
            tensors |= dict(zip(_FUSED[name], (part.contiguous() for part in value.split(sizes)), strict=True))
        else:
            tensors[_PLAIN[name]] = value.contiguous()
    if module.draft_ids is not None:
        ids = module.draft_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(model.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    save_tensors(folder / "model.safetensors", tensors)
    atomic_write(folder / "config.json", json.dumps(_config(module), indent=2))


def check_drafter_folder(folder: str | Path) -> None:
    """Raises a ValueError unless the folder holds the files of a drafter."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        near = suggest(str(folder), ("suffix", "none"))
        raise ValueError(f"{folder}: neither suffix nor none, and no such folder of a learned drafter{near}")
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder}: not a drafter folder, {name} is missing")


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    check_drafter_folder(folder)
    config, tensors = read_json(folder / "config.json"), load_tensors(folder / "model.safetensors")
    return config, {name.replace("midlayer.", "layers.0.").removeprefix("model."): t for name, t in tensors.items()}


def _assemble(name: str, parameter: Tensor, tensors: dict[str, Tensor], folder: Path) -> Tensor:
    parts = _FUSED.get(name, [_PLAIN.get(name, name)])
    missing = [part for part in parts if part not in tensors]
    if missing:
        raise ValueError(f"{folder}: tensor {missing[0]} is missing")
    value = torch.cat([tensors[part] for part in parts]) if len(parts) > 1 else tensors[parts[0]]
    if value.shape != parameter.shape:
        raise ValueError(f"{folder}: {parts[0]} has shape {list(value.shape)}, this policy needs {list(parameter.shape)}")
    return value


def _config(module: Eagle) -> dict[str, Any]:
    model, three = module.config.model, module.config.form == "eagle3"
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if three else "EagleLlamaForCausalLM"], "model_type": "llama",
        "hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim,
        "vocab_size": model.vocab_size, "rms_norm_eps": model.rms_eps, "rope_theta": model.rope.theta,
        "max_position_embeddings": model.max_context, "hidden_act": "silu", "tie_word_embeddings": False}
    if three:
        layers = list(module.config.feature_layers)
        config["draft_vocab_size"] = model.vocab_size if module.draft_ids is None else len(module.draft_ids)
        config["eagle_aux_hidden_state_layer_ids"] = layers  # layer i means the input of layer i
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]}  # here its output
    if module.policy_fingerprint is not None:
        config[_FINGERPRINT_KEY] = module.policy_fingerprint.as_json()
    return config
