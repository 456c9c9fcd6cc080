"""Weights for a server that are parts of a run's checkpoints: they are compared with the checkpoint's manifest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from rl_clients import generate, ok, refused, rollout, state, write_weights
from safetensors.torch import save_file

from paceline.manifest import MANIFEST_FILE, write_manifest

NAME = "model.layers.1.self_attn.v_proj"
LOADS = {"policy": [("/update_weights", {"weight_dir": "step-000007/policy"}),
                    ("/update_weights_from_disk", {"model_path": "step-000007/policy"}),
                    ("/areal_update_weights", {"model_path": "step-000007/policy"})],
         "adapter": [("/v1/load_lora_adapter", {"lora_name": "tiny@7", "lora_path": "step-000007/adapter"})]}
FILES = {"policy": "policy/model.safetensors", "adapter": "adapter/adapter_model.safetensors"}


@pytest.fixture
def checkpoint(folder):
    """A checkpoint of step 7 with the weights of seed 1, and with an adapter."""
    found = folder / "step-000007"
    write_weights(found / "policy", 1)
    (found / "adapter").mkdir()
    rows, columns = state(0)[f"{NAME}.weight"].shape
    factors = {"lora_A": torch.ones(2, columns), "lora_B": torch.zeros(rows, 2)}
    save_file({f"base_model.model.{NAME}.{factor}.weight": tensor for factor, tensor in factors.items()},
              found / FILES["adapter"])
    (found / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    (found / "state.json").write_text('{"step": 7, "cursor": 7, "has_manifest": true}')
    write_manifest(found, 7, {})
    yield found
    shutil.rmtree(found)


def flip(path: Path) -> None:
    """One bit of the last tensor: the file is as whole as before."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def added(file: Path) -> None:
    (file.parent / "generation_config.json").write_text("{}")


def without_manifest(file: Path) -> None:
    (file.parent.parent / MANIFEST_FILE).unlink()


@pytest.mark.parametrize(("damage", "said"), [
    (flip, "{file}: damaged"), (added, "generation_config.json: not a file of this checkpoint"),
    (without_manifest, "manifest.json: damaged")], ids=["flipped", "added", "without a manifest"])
@pytest.mark.parametrize("part", LOADS)
def test_damaged_parts_of_a_checkpoint_are_refused_and_the_old_weights_stay(http, engines, checkpoint, part, damage, said):
    file = checkpoint / FILES[part]
    damage(file)
    version = ok(http.get("/weight_info"))["weight_version"]
    for path, body in LOADS[part]:
        message = refused(http.post(path, json=body))
        assert said.format(file=file) in message and "\n" not in message
    assert generate(http)["token_ids"] == rollout(engines[0]).token_ids
    assert ok(http.get("/weight_info"))["weight_version"] == version


def test_whole_parts_of_a_checkpoint_are_taken(http, engines, checkpoint):
    for path, body in LOADS["policy"]:
        ok(http.post("/update_weights", json={"weight_dir": "step-2"}))
        ok(http.post(path, json=body))
        assert generate(http)["token_ids"] == rollout(engines[1]).token_ids
    path, body = LOADS["adapter"][0]
    ok(http.post(path, json=body))
    assert ok(http.get("/v1/models"))["data"][0]["id"] == "tiny@7"
    ok(http.post("/v1/unload_lora_adapter", json={"lora_name": "tiny@7"}))
