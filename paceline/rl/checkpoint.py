"""Checkpoints of a run: weights, optimizer state, number of steps done and number of prompts used. Together with the
configuration they determine every later step. A checkpoint is never seen half-written, and only the most recent few are
kept."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.files import DamagedFile, atomic_write, damaged, flush_to_disk, load_tensors, read_json, save_tensors
from paceline.manifest import HAS_MANIFEST, STATE_FILE, FileDigest, check_checkpoint, digest_files, write_manifest
from paceline.models.decoder import Decoder
from paceline.models.save import save_model
from paceline.models.state_dict import load_state
from paceline.models.weights import empty_model
from paceline.optim import fits_8bit, from_8bit, is_8bit_state, plain_state, restored_state, to_8bit
from paceline.rl.adapters import adapter_matrices, decoder_of, unadapted_parameters, write_adapter
from paceline.rl.learner import Learner
from paceline.rl.ranks import full, local, put_together, sharded_like, trained

_POLICY, _ADAPTER, _DRAFTER = "policy", "adapter", "drafter"
_TENSORS = "trainer.safetensors"


@dataclass(frozen=True, slots=True)
class RunState:
    """Progress of a run."""

    step: int = 0
    """Number of steps done."""
    cursor: int = 0
    """Number of prompts used: those whose groups were trained on, or left out."""
    unfinished: tuple[int, ...] = ()
    """Numbers of further prompts whose answers were begun (asynchronous training), in ascending order. The first prompt that was
    never begun has the number `cursor + len(unfinished)`."""


class Checkpoints:
    """Checkpoints in `folder/step-000010/` and so on: the policy as a Hugging Face folder, LoRA adapters in PEFT's format, a file
    with the trainer's state, what else the caller writes there, and a manifest of all of it."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self.confirmed = self.latest()
        """The most recent checkpoint that a step has been done from. It is never removed."""
        self.best_step: int | None = None
        """Step of the best evaluation. Its checkpoint is not removed as long as there is no better one."""

    def save(self, state: RunState, write: Callable[[Path], dict[str, FileDigest]]) -> Path:
        """Writes a checkpoint, removes old ones, and returns the new one's folder. `write` writes the learner, as `save_learner`
        does, and whatever else belongs to it, into a folder that is renamed into place afterwards, and returns the digests that
        it has of these files. If it raises, no checkpoint is written or removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        target, scratch = self.folder / f"step-{state.step:06d}", self.folder / ".new"
        shutil.rmtree(scratch, ignore_errors=True)  # left by a killed run
        try:
            digests = write(scratch)
            atomic_write(scratch / STATE_FILE, json.dumps({**asdict(state), HAS_MANIFEST: True}) + "\n")
            write_manifest(scratch, state.step, digests)
            shutil.rmtree(target, ignore_errors=True)
            os.rename(scratch, target)
        except BaseException as error:
            shutil.rmtree(scratch, ignore_errors=True)
            if isinstance(error, OSError):
                raise OSError(f"checkpoint {target.name}: {error.strerror or error}; {self._kept()}") from None
            raise
        self._remove_old()
        return target

    def confirm(self) -> None:
        """A step has been generated and trained from the weights of the latest checkpoint, so the ones before it may go."""
        self.confirmed = self.latest()
        self._remove_old()

    def set_aside(self, checkpoint: Path) -> Path:
        """Renames a damaged checkpoint, so that it is not taken for one any more, and returns its new path."""
        aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(checkpoint, aside)
        self.confirmed = self.latest()
        return aside

    def all(self) -> list[Path]:
        """Folders of all checkpoints, oldest first. They are complete: each was renamed into place after it was written."""
        found = self.folder.glob("step-*") if self.folder.is_dir() else []
        return sorted(path for path in found if re.fullmatch(r"step-\d+", path.name))

    def of_step(self, step: int) -> Path | None:
        """Folder of the checkpoint of this step; None if there is none."""
        return next((path for path in self.all() if int(path.name.removeprefix("step-")) == step), None)

    @property
    def best(self) -> Path | None:
        """Folder of the checkpoint with the best evaluation; None if there is none."""
        return None if self.best_step is None else self.of_step(self.best_step)

    def latest(self) -> Path | None:
        """Folder of the most recent checkpoint; None if there is none."""
        return self.all()[-1] if self.all() else None

    def latest_step(self) -> int:
        """Number of steps done when the most recent checkpoint was written; 0 if there is none."""
        latest = self.latest()
        return 0 if latest is None else int(latest.name.removeprefix("step-"))

    def _remove_old(self) -> None:
        kept = (self.confirmed, self.best)
        for old in self.all()[: -self.keep]:
            if old not in kept:
                shutil.rmtree(old, ignore_errors=True)

    def _kept(self) -> str:
        latest = self.latest()
        return f"the last good one is {latest}" if latest is not None else "there is none before it"


def read_state(checkpoint: Path) -> RunState:
    """Progress of the run when the checkpoint was written. DamagedFile if it does not say so."""
    found = read_json(checkpoint / STATE_FILE)
    unfinished, _ = found.pop("unfinished", []), found.pop(HAS_MANIFEST, None)
    if set(found) != {"step", "cursor"} or not isinstance(unfinished, list) or not all(
            type(value) is int and value >= 0 for value in (*found.values(), *unfinished)):
        raise DamagedFile(damaged(checkpoint / STATE_FILE, "not the numbers of steps and prompts"))
    return RunState(**found, unfinished=tuple(unfinished))


def policy_folder(checkpoint: Path) -> Path:
    """Hugging Face folder of a checkpoint's policy."""
    return checkpoint / _POLICY


def drafter_folder(checkpoint: Path) -> Path:
    """Folder of a checkpoint's learned drafter, which exists if the run has one."""
    return checkpoint / _DRAFTER


def read_adapters(checkpoint: Path) -> dict[str, Tensor]:
    """LoRA matrices of a checkpoint's policy by the decoder's names, like `layers.0.attention.qkv.lora_A`; empty if it has
    none. DamagedFile if the checkpoint is not as it was written."""
    check_checkpoint(checkpoint, [_TENSORS])
    return _adapters_in(load_tensors(checkpoint / _TENSORS))


def _adapters_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = "policy.model."
    return adapter_matrices((name.removeprefix(prefix), tensor) for name, tensor in tensors.items() if name.startswith(prefix))


def save_learner(learner: Learner, folder: Path, tokenizer: Any, base_model: str = "") -> dict[str, FileDigest]:
    """Writes the policy as a Hugging Face folder, and adapters, critic and optimizer state to a file; adapters also in PEFT's
    format. Returns the digests of all files. NonFiniteError, and nothing is written, if a weight is not finite. All ranks of a
    sharded learner must call this: the first one writes, and has the whole tensors in the host's memory meanwhile."""
    learner.require_finite()
    policy, tensors = plain_policy(learner), _trainer_tensors(learner)
    if learner.ranks.rank:
        return {}
    save_model(policy, tokenizer, folder / _POLICY)
    if learner.config.lora_rank:
        adapters = _adapters_in(tensors)
        write_adapter(adapters, policy.config, learner.config, base_model, folder / _ADAPTER)
    save_tensors(folder / _TENSORS, tensors)
    for file in [*(folder / _POLICY).iterdir(), *(folder / _ADAPTER).glob("*")]:
        flush_to_disk(file)
    return digest_files(folder)


def restore(learner: Learner, checkpoint: Path) -> None:
    """Restores what the policy's folder does not contain: adapters, critic and optimizer state. The learner must have been
    built from the checkpoint's policy or, with adapters, from the policy that the run started with. DamagedFile if the file is
    not a whole one, NonFiniteError if a weight is not finite."""
    tensors = load_tensors(checkpoint / _TENSORS)
    with torch.no_grad():
        for name, parameter in _extra_parameters(learner).items():
            if name not in tensors or tensors[name].shape != parameter.shape:
                raise ValueError(f"{checkpoint / _TENSORS}: {name} is missing or of another shape; was the run started with "
                                 "another algorithm or learner?")
            parameter.copy_(sharded_like(tensors[name], parameter))
    for number, optimizer in enumerate(learner.optimizers):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            match = re.fullmatch(rf"optimizer\.{number}\.(\d+)\.([\w.]+)", name)
            if match:
                index = int(match[1])
                moments.setdefault(index, {})[match[2]] = tensor
        kind = learner.optimizer_config.kind
        if moments and is_8bit_state(moments) != (kind == "adamw_8bit" and any(map(fits_8bit, parameters))):
            raise ValueError(f"optimizer.kind: {kind} cannot continue from {checkpoint}, which another kind has written")
        state = {index: {name: _sharded_moment(name, whole, parameters[index])
                         for name, whole in restored_state(one, parameters[index]).items()} for index, one in moments.items()}
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    learner.require_finite()


ShardState = dict[str, np.ndarray]
"""One rank's part of the trained weights and of the optimizer state, by name."""


def shard_state(learner: Learner) -> ShardState:
    """A copy of this rank's part of the training's state, in the host's memory."""
    parts = {name: local(tensor) for name, tensor in _trained_weights(learner).items()}
    for prefix, _, moments in _moments(learner):
        own = plain_state({name: local(moment) for name, moment in moments.items()})
        parts |= {prefix + name: tensor for name, tensor in own.items()}
    return {name: part.detach().cpu().numpy().copy() for name, part in parts.items()}


@torch.no_grad()
def load_shard(learner: Learner, state: ShardState) -> None:
    """Continue from what `shard_state` has returned on a rank of the same number."""
    parts = {name: torch.from_numpy(part.copy()) for name, part in state.items()}
    for name, weight in _trained_weights(learner).items():
        local(weight).copy_(parts[name])
    for number, optimizer in enumerate(learner.optimizers):
        found = {}
        for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            prefix = f"optimizer.{number}.{index}."
            own = {name.removeprefix(prefix): part for name, part in parts.items() if name.startswith(prefix)}
            found[index] = {name: part if name == "step" else put_together(part.to(parameter.device), parameter)
                            for name, part in restored_state(own, local(parameter)).items()}
        optimizer.load_state_dict({"state": found, "param_groups": optimizer.state_dict()["param_groups"]})


def _trained_weights(learner: Learner) -> dict[str, Tensor]:
    modules = {"policy": learner.policy, **({} if learner.critic is None else {"critic": learner.critic})}
    return {f"{which}.{name}": p for which, module in modules.items() for name, p in trained(module)}


def _moments(learner: Learner) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
    """Prefix of its names in files, parameter and optimizer state, for every parameter that has one."""
    for number, optimizer in enumerate(learner.optimizers):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, moments in optimizer.state_dict()["state"].items():
            yield f"optimizer.{number}.{index}.", parameters[index], moments


def _sharded_moment(name: str, whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a moment that every rank has as a whole. Its blocks of 8 bits begin anew with the part."""
    if not isinstance(parameter, DTensor) or whole.shape != parameter.shape:
        return whole
    plain = from_8bit(whole)
    sharded = sharded_like(plain, parameter)
    if plain is whole or not fits_8bit(local(sharded)):
        return sharded
    return put_together(to_8bit(name, local(sharded)), parameter)


def _whole_moment(name: str, moment: Tensor, parameter: Tensor, is_8bit: bool) -> Tensor:
    """The moment as one process has it. All ranks must call this."""
    if not isinstance(moment, DTensor):
        return moment
    whole = full(put_together(from_8bit(local(moment)), parameter))  # not all ranks need have theirs in 8 bits
    return to_8bit(name, whole) if is_8bit and fits_8bit(whole) else whole


def plain_policy(learner: Learner) -> Decoder:
    """The learner's policy as a plain decoder. It shares memory with the learner's, apart from matrices with adapters, which are
    merged into copies on the host. If the learner is sharded, it is a whole copy on the host on the first rank, and one without
    values on the others."""
    model = learner.policy.model
    if learner.ranks.is_sharded:
        plain = empty_model(model.config, model.norm.dtype, "meta" if learner.ranks.rank else "cpu")
        load_state(plain, learner.weights())
        return plain
    own = unadapted_parameters(model)
    return decoder_of(model.config, {name: own[name] if name in own else tensor.to("cpu", model.norm.dtype)
                                     for name, tensor in learner.weights()})


def _trainer_tensors(learner: Learner) -> dict[str, Tensor]:
    """Adapters, critic and optimizer state; nothing on ranks other than the first, which only take part in the exchange."""
    found: dict[str, Tensor] = {}

    def keep(name: str, whole: Tensor) -> None:
        if not learner.ranks.rank:
            found[name] = whole.contiguous().cpu() if learner.ranks.is_sharded else whole.contiguous()

    for name, tensor in _extra_parameters(learner).items():
        keep(name, full(tensor.detach()))
    is_8bit = learner.optimizer_config.kind == "adamw_8bit"
    for prefix, parameter, moments in _moments(learner):
        for name, moment in moments.items():
            for part, tensor in plain_state({name: _whole_moment(name, moment.detach(), parameter, is_8bit)}).items():
                keep(prefix + part, tensor)
    return found


def _extra_parameters(learner: Learner) -> dict[str, Tensor]:
    """Trained tensors that the policy's folder does not contain."""
    extra: dict[str, Tensor] = {f"policy.{name}": p for name, p in learner.policy.named_parameters() if ".lora_" in name}
    if learner.critic is not None:
        extra |= {f"critic.{name}": p for name, p in learner.critic.named_parameters()}
    return extra
