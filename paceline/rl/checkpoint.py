"""Checkpoints of a run: weights, optimizer state, number of steps done and number of prompts used. Together with the
configuration they determine every later step. A checkpoint is never seen half-written, and only the most recent few are
kept."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.models.decoder import Decoder
from paceline.models.save import save_model
from paceline.models.state_dict import load_state
from paceline.models.weights import empty_model
from paceline.rl.learner import Learner

_POLICY, _TENSORS, _STATE = "policy", "trainer.safetensors", "state.json"


@dataclass(frozen=True, slots=True)
class RunState:
    """Progress of a run."""

    step: int = 0
    """Number of steps done."""
    cursor: int = 0
    """Number of prompts used."""


class Checkpoints:
    """Checkpoints in `folder/step-000010/` and so on: the policy as a Hugging Face folder, and a file with the trainer's
    state."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def save(self, learner: Learner, state: RunState, tokenizer: Any) -> Path:
        """Writes a checkpoint, removes old ones, and returns the new one's folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        target, scratch = self.folder / f"step-{state.step:06d}", self.folder / ".new"
        shutil.rmtree(scratch, ignore_errors=True)  # left by a killed run
        try:
            save_model(plain_policy(learner), tokenizer, scratch / _POLICY)
            save_file(_trainer_tensors(learner), scratch / _TENSORS)
            (scratch / _STATE).write_text(json.dumps(asdict(state)) + "\n", encoding="utf-8")
            shutil.rmtree(target, ignore_errors=True)
            os.rename(scratch, target)
        except OSError as error:
            shutil.rmtree(scratch, ignore_errors=True)
            raise OSError(f"checkpoint {target.name}: {error.strerror or error}; {self._kept()}") from None
        for old in self.all()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def all(self) -> list[Path]:
        """Folders of all checkpoints, oldest first. They are complete: each was renamed into place after it was written."""
        found = self.folder.glob("step-*") if self.folder.is_dir() else []
        return sorted(path for path in found if re.fullmatch(r"step-\d+", path.name))

    def latest(self) -> Path | None:
        """Folder of the most recent checkpoint; None if there is none."""
        return self.all()[-1] if self.all() else None

    def _kept(self) -> str:
        latest = self.latest()
        return f"the last good one is {latest}" if latest is not None else "there is none before it"


def read_state(checkpoint: Path) -> RunState:
    """Progress of the run when the checkpoint was written."""
    return RunState(**json.loads((checkpoint / _STATE).read_text(encoding="utf-8")))


def policy_folder(checkpoint: Path) -> Path:
    """Hugging Face folder of a checkpoint's policy."""
    return checkpoint / _POLICY


def restore(learner: Learner, checkpoint: Path) -> None:
    """Restores what the policy's folder does not contain: adapters, critic and optimizer state. The learner must have been
    built from the checkpoint's policy or, with adapters, from the policy that the run started with."""
    tensors = load_file(checkpoint / _TENSORS)
    extra = _extra_parameters(learner)
    with torch.no_grad():
        for name, parameter in extra.items():
            parameter.copy_(tensors[name])
    for number, optimizer in enumerate(learner.optimizers):
        current = optimizer.state_dict()
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            match = re.fullmatch(rf"optimizer\.{number}\.(\d+)\.(\w+)", name)
            if match:
                moments.setdefault(int(match[1]), {})[match[2]] = tensor
        optimizer.load_state_dict({"state": moments, "param_groups": current["param_groups"]})


def plain_policy(learner: Learner) -> Decoder:
    """The learner's policy as a plain decoder: a merged copy if it has adapters or checkpoint wrappers."""
    model = learner.policy.model
    if learner.config.lora_rank == 0 and not learner.config.gradient_checkpointing:
        return model
    plain = empty_model(model.config, model.norm.dtype, learner.device)
    load_state(plain, learner.weights())
    return plain


def _trainer_tensors(learner: Learner) -> dict[str, Tensor]:
    tensors = {name: parameter.detach().contiguous() for name, parameter in _extra_parameters(learner).items()}
    for number, optimizer in enumerate(learner.optimizers):
        for index, moments in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{index}.{key}": value.contiguous() for key, value in moments.items()}
    return tensors


def _extra_parameters(learner: Learner) -> dict[str, Tensor]:
    """Trained tensors that the policy's folder does not contain."""
    extra: dict[str, Tensor] = {f"policy.{name}": p for name, p in learner.policy.named_parameters() if ".lora_" in name}
    if learner.critic is not None:
        extra |= {f"critic.{name}": p for name, p in learner.critic.named_parameters()}
    return extra
