"""Checkpoints of learned drafters, in the layout that vLLM, SGLang and SpecForge read: `config.json` and `model.safetensors`.

Drafters of EAGLE, SpecForge and speculators are read as well. The embedding is always the policy's own and is never stored; an
EAGLE-3 drafter is stored with a head, because other engines look for one there. `paceline_policy` in `config.json` holds the
fingerprint of the policy that the drafter was trained for, and `paceline_shared_head` says that the head is that policy's; other
readers ignore both."""

from __future__ import annotations

import json
import logging
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.bundled import resolve_drafter
from paceline.drafters.eagle import MIN_WINDOW, Eagle, EagleConfig, Form
from paceline.drafters.fingerprint import PolicyFingerprint, fingerprint_of, shape_of
from paceline.files import DamagedFile, atomic_write, damaged, load_tensors, read_json, save_tensors
from paceline.manifest import check_part
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.huggingface import download_from_hub, download_hub_config
from paceline.models.save import hf_rope
from paceline.names import suggest
from paceline.optim import require_finite

logger = logging.getLogger(__name__)

_ATTENTION, _MLP = "layers.0.self_attn", "layers.0.mlp"
_NAMES = {
    "fc.weight": ["fc.weight"], "fc.bias": ["fc.bias"], "norm": ["norm.weight"], "head.weight": ["lm_head.weight"],
    "input_norm": ["layers.0.input_layernorm.weight"], "hidden_norm": ["layers.0.hidden_norm.weight"],
    "mlp_norm": ["layers.0.post_attention_layernorm.weight"],
    "attention.q_norm": [f"{_ATTENTION}.q_norm.weight"], "attention.k_norm": [f"{_ATTENTION}.k_norm.weight"],
    **{f"attention.qkv.{kind}": [f"{_ATTENTION}.{x}_proj.{kind}" for x in "qkv"] for kind in ("weight", "bias")},
    **{f"attention.o.{kind}": [f"{_ATTENTION}.o_proj.{kind}"] for kind in ("weight", "bias")},
    **{f"mlp.gate_up.{kind}": [f"{_MLP}.{x}_proj.{kind}" for x in ("gate", "up")] for kind in ("weight", "bias")},
    **{f"mlp.down.{kind}": [f"{_MLP}.down_proj.{kind}"] for kind in ("weight", "bias")}}
"""Names of the checkpoint's tensors that make up each parameter of the drafter, one above the other."""
_FINGERPRINT_KEY, _SHARED_HEAD_KEY, _WINDOW_KEY = "paceline_policy", "paceline_shared_head", "paceline_window"
_HUB_PATTERNS = ("config.json", "model.safetensors", "pytorch_model.bin")
_UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output")
"""Variants of EAGLE-3 that add or move norms."""


def load_eagle(folder: str | Path, policy: Decoder) -> Eagle:
    """Loads a drafter for this policy, in its dtype and on its device, from a folder or a repository of the hub.

    Raises ValueError if the checkpoint does not fit the policy's shape. A drafter that was trained for other weights of the same
    shape is accepted; its `policy_fingerprint` tells for which. Tensors that are not used are named in a warning of the log.
    """
    folder = _find(folder)
    raw, tensors = _read(folder)
    fingerprint, shape = PolicyFingerprint.from_json(raw.get(_FINGERPRINT_KEY)), shape_of(policy.config)
    if fingerprint is not None and fingerprint.shape != shape:
        raise ValueError(f"{folder}: this drafter was trained for another policy ({fingerprint.shape}) than this one ({shape})")
    try:
        config = _parse_config(raw, tensors, policy.config)
        draft_ids = _draft_ids(tensors, policy.config.vocab_size)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    module = Eagle(config, draft_ids, _has_own_head(raw, config, tensors, draft_ids, policy))
    module = module.to(policy.norm.device, policy.norm.dtype).requires_grad_(False)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(_assemble(name, parameter, tensors, folder))
    _say_ignored(module, tensors, policy, folder)
    module.policy_fingerprint = fingerprint
    return module


def read_fingerprint(folder: str | Path) -> PolicyFingerprint | None:
    """Returns which policy a saved drafter was trained for; None if that, or the drafter, is not there."""
    file = Path(folder).expanduser() / "config.json"
    return PolicyFingerprint.from_json(read_json(file).get(_FINGERPRINT_KEY)) if file.is_file() else None


def read_eagle_config(folder: str | Path, policy: ModelConfig) -> EagleConfig:
    """Returns the architecture of a drafter for a policy of this shape. ValueError if they do not fit."""
    folder = _find(folder)
    raw, tensors = _read(folder)
    try:
        return _parse_config(raw, tensors, policy)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def save_eagle(module: Eagle, folder: str | Path, policy: Decoder | None = None, is_descendant: bool = False) -> None:
    """Saves a drafter, with its `policy_fingerprint` if it has one. Each file is replaced atomically. NonFiniteError, and nothing
    is written, if a weight is not finite. `policy`: the policy whose head an EAGLE-3 drafter shares; without it the checkpoint
    has no head, and only Paceline can use it. `is_descendant`: the policy is a later version of the one that the drafter was
    trained for, of the same run, so the two belong together although their weights differ."""
    require_finite(module.named_parameters(), "drafter")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / "model.safetensors", drafter_tensors(module, policy))
    raw = drafter_config(module) | ({_SHARED_HEAD_KEY: True} if module.head is None else {})
    if module.policy_fingerprint is not None and policy is not None and is_descendant:
        raw[_FINGERPRINT_KEY] = replace(module.policy_fingerprint, descendant=fingerprint_of(policy).weights).as_json()
    atomic_write(folder / "config.json", json.dumps(raw, indent=2))


def drafter_tensors(module: Eagle, policy: Decoder | None) -> dict[str, Tensor]:
    """Returns the tensors of a drafter's checkpoint, on the host. `policy`: see `save_eagle`."""
    tensors: dict[str, Tensor] = {}
    model = module.config.model
    kv_rows = model.num_kv_heads * model.head_dim
    for name, parameter in module.named_parameters():
        value, names = parameter.detach().cpu(), _NAMES[name]
        sizes = ([len(value)] if len(names) == 1 else [model.num_heads * model.head_dim, kv_rows, kv_rows] if len(names) == 3
                 else [model.intermediate_size] * 2)
        tensors |= dict(zip(names, (part.contiguous() for part in value.split(sizes)), strict=True))
    if module.head is None and module.config.form == "eagle3" and policy is not None:
        head = policy.head.weight if module.draft_ids is None else policy.head.weight[module.draft_ids]
        tensors["lm_head.weight"] = head.detach().to("cpu", module.fc.weight.dtype, copy=True).contiguous()
    if module.draft_ids is not None:
        ids = module.draft_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(model.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def drafter_config(module: Eagle) -> dict[str, Any]:
    """Returns the content of a drafter's `config.json`."""
    config, model, three = module.config, module.config.model, module.config.form == "eagle3"
    rope = hf_rope(model.rope)
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if three else "EagleLlamaForCausalLM"], "model_type": "llama",
        "hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim,
        "vocab_size": model.vocab_size, "rms_norm_eps": model.rms_eps, "rope_theta": model.rope.theta, "rope_parameters": rope,
        "rope_scaling": None if model.rope.kind == "default" else rope, "attention_bias": model.qkv_bias or model.o_bias,
        "mlp_bias": model.mlp_bias, "max_position_embeddings": model.max_context, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": str(module.fc.weight.dtype).removeprefix("torch.")}
    if three:
        layers = list(config.feature_layers)
        raw["draft_vocab_size"] = module.draft_vocab_size
        raw["norm_before_residual"] = config.norm_before_residual
        raw["eagle_aux_hidden_state_layer_ids"] = layers  # layer i means the input of layer i
        raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]}  # here its output
        if model.qk_norm:
            raw |= {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
    if config.window is not None:
        raw[_WINDOW_KEY] = config.window
    if module.policy_fingerprint is not None:
        raw[_FINGERPRINT_KEY] = module.policy_fingerprint.as_json()
    return raw


def check_drafter_folder(folder: str | Path, names: tuple[str, ...] = ("suffix", "none", "default")) -> None:
    """Raises a ValueError unless the folder, or the repository of the hub, holds the files of a drafter. Of a repository only
    `config.json` is downloaded. `names`: what a user may give instead of a folder."""
    if _is_hub_id(folder):
        return _check_hub_config(str(folder))
    folder = resolve_drafter(folder)
    if not folder.is_dir():
        near = suggest(str(folder), names)
        raise ValueError(f"{folder}: not one of {', '.join(names)}, and no folder of a learned drafter{near}")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: not a drafter folder, config.json is missing")
    if not (folder / "model.safetensors").is_file() and not (folder / "pytorch_model.bin").is_file():
        raise ValueError(f"{folder}: not a drafter folder, model.safetensors is missing")


def _is_hub_id(drafter: str | Path) -> bool:
    """Whether this names a repository of the hub: no folder or file, but an owner and a name."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(drafter)) is not None and not Path(drafter).exists()


def _find(drafter: str | Path) -> Path:
    """The folder of a learned drafter that a user named. A repository of the hub is downloaded, or found in the cache."""
    return download_from_hub(str(drafter), _HUB_PATTERNS) if _is_hub_id(drafter) else resolve_drafter(drafter)


def _check_hub_config(name: str) -> None:
    raw = _with_own_settings(read_json(download_hub_config(name)))
    if raw.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"{name}: this hub repository has a model of {raw['num_hidden_layers']} layers, which is not a drafter")


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads a drafter folder. Tensors get the names that Paceline writes."""
    check_drafter_folder(folder)
    check_part(folder)
    weights, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    raw = _with_own_settings(read_json(folder / "config.json"))
    tensors = load_tensors(weights) if weights.is_file() else _load_pickled(pickled)
    return raw, {name.removeprefix("model.").replace("midlayer.", "layers.0."): t for name, t in tensors.items()}


def _with_own_settings(raw: dict[str, Any]) -> dict[str, Any]:
    """A drafter's configuration, with the settings that speculators keeps in a table of their own moved to the top."""
    return {**raw, **raw.get("transformer_layer_config", {})}


def _load_pickled(file: Path) -> dict[str, Tensor]:
    """Reads a checkpoint that `torch.save` wrote, without running code from it."""
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise DamagedFile(damaged(file, error)) from None
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise DamagedFile(damaged(file, "not a table of tensors"))
    return found


def _parse_config(raw: dict[str, Any], tensors: dict[str, Tensor], policy: ModelConfig) -> EagleConfig:
    """The architecture of the drafter, whose biases and query norms are those that the checkpoint has tensors of."""
    form: Form = "eagle3" if "layers.0.hidden_norm.weight" in tensors else "eagle"
    if raw.get("speculators_model_type", form) != form:
        raise ValueError(f"speculators_model_type: {raw['speculators_model_type']} is not supported, only eagle3")
    unsupported = [key for key in _UNSUPPORTED if raw.get(key)]
    if unsupported:
        raise ValueError(f"{unsupported[0]}: this variant of EAGLE-3 is not supported")
    known = {"hidden_size": policy.hidden_size, "vocab_size": policy.vocab_size, "target_hidden_size": policy.hidden_size}
    for key, value in known.items():
        if raw.get(key, value) not in (value, None):
            raise ValueError(f"{key}: this drafter was trained for another policy with {raw[key]}, this one has {value}")
    layer = ModelConfig.from_hf({**known, **raw, "architectures": ["LlamaForCausalLM"]})
    layer = replace(layer, num_layers=1, qkv_bias=layer.qkv_bias or f"{_ATTENTION}.q_proj.bias" in tensors,
                    o_bias=f"{_ATTENTION}.o_proj.bias" in tensors, mlp_bias=f"{_MLP}.down_proj.bias" in tensors,
                    qk_norm=f"{_ATTENTION}.q_norm.weight" in tensors, max_context=policy.max_context,
                    tie_embeddings=policy.tie_embeddings, eos_token_ids=policy.eos_token_ids)
    if hf_rope(layer.rope) == hf_rope(policy.rope) or (_FINGERPRINT_KEY in raw and "rope_parameters" not in raw):
        layer = replace(layer, rope=policy.rope)  # what Paceline itself has trained always has the policy's
    config = EagleConfig.for_policy(policy, form, _feature_layers(raw))
    beyond = [i for i in config.feature_layers if not -1 <= i < policy.num_layers]
    if beyond:
        raise ValueError(f"this drafter reads layer {beyond[0]}, this policy has {policy.num_layers}")
    window = raw.get(_WINDOW_KEY)
    if window is not None and (not isinstance(window, int) or window < MIN_WINDOW):
        raise ValueError(f"{_WINDOW_KEY}: must be an integer >= {MIN_WINDOW}, not {window}")
    return replace(config, model=layer, fc_bias="fc.bias" in tensors, window=window,
                   norm_before_residual=form == "eagle3" and bool(raw.get("norm_before_residual")))


def _feature_layers(raw: dict[str, Any]) -> tuple[int, ...]:
    """Layers that an EAGLE-3 drafter reads, by their inputs; empty if the checkpoint does not say. In `eagle_config` a layer
    stands for its output."""
    found = raw.get("eagle_aux_hidden_state_layer_ids")
    if found:
        return tuple(found)
    return tuple(layer + 1 for layer in (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or ())


def _draft_ids(tensors: dict[str, Tensor], vocab_size: int) -> Tensor | None:
    """Ids [DV] of the tokens of a reduced vocabulary; None if there is none, or the map is the identity."""
    if "d2t" not in tensors:
        return None
    ids = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(f"d2t points outside the policy's vocabulary of {vocab_size}")
    return None if ids.equal(torch.arange(vocab_size)) else ids


def _has_own_head(raw: dict[str, Any], config: EagleConfig, tensors: dict[str, Tensor], draft_ids: Tensor | None,
                  policy: Decoder) -> bool:
    """Whether the drafter has a head that is not its policy's."""
    head = tensors.get("lm_head.weight")
    if head is None or config.form == "eagle" or raw.get(_SHARED_HEAD_KEY):
        return False
    rows = policy.head.weight if draft_ids is None else policy.head.weight[draft_ids.to(policy.head.weight.device)]
    return not torch.equal(rows, head.to(rows))


def _assemble(name: str, parameter: Tensor, tensors: dict[str, Tensor], folder: Path) -> Tensor:
    parts = _NAMES[name]
    missing = [part for part in parts if part not in tensors]
    if missing:
        raise ValueError(f"{folder}: tensor {missing[0]} is missing")
    try:
        value = torch.cat([tensors[part] for part in parts])
    except RuntimeError:
        raise ValueError(f"{folder}: {', '.join(parts)} have shapes that do not belong together") from None
    if value.shape != parameter.shape:
        raise ValueError(f"{folder}: {parts[0]} has shape {list(value.shape)}, this policy needs {list(parameter.shape)}")
    return value


def _say_ignored(module: Eagle, tensors: dict[str, Tensor], policy: Decoder, folder: Path) -> None:
    """Warn about tensors that are not used although they hold something of their own. ValueError for those that nobody knows."""
    used = {part for name, _ in module.named_parameters() for part in _NAMES[name]}
    ignored = []
    for name in sorted(tensors.keys() - used - {"d2t", "t2d"}):
        if name in ("embed_tokens.weight", "lm_head.weight"):
            own = policy.embed.weight if name == "embed_tokens.weight" else policy.head.weight
            same = own.shape == tensors[name].shape and torch.equal(own, tensors[name].to(own))
            if not same and not (name == "lm_head.weight" and module.config.form == "eagle3"):
                ignored.append(f"{name} (it differs from the policy's, which is used instead)")
        elif name.startswith("verifier_") or name.endswith("rotary_emb.inv_freq"):
            ignored.append(name)
        elif name == "layers.0.input_layernorm.weight":
            ignored.append(f"{name} (an EAGLE drafter's first layer has no input norm)")
        else:
            raise ValueError(f"{folder}: tensor {name} is not part of a one-layer {module.config.form} drafter")
    if ignored:
        logger.warning("%s: ignored: %s", folder, "; ".join(ignored))
