"""Checkpoints of the spot trainer: asynchronous, atomic, and limited to what training changes.

Saving copies the trainer's tensors into buffers that are reused, on the trainer's own device; the trainer waits for nothing else.
A thread then writes one safetensors file under a temporary name and renames it, so the newest file is complete whenever the
process is killed. The file has a hash of its content, which is compared when it is read: what has changed on disk is not trained
on. The embedding and the head belong to the policy and are not stored.
"""

from __future__ import annotations

import json
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.drafters.eagle import Eagle, EagleConfig
from paceline.drafters.fingerprint import PolicyFingerprint
from paceline.files import DamagedFile, damaged, save_tensors
from paceline.manifest import hash_buffers
from paceline.spot.scaling import Scales, to_plain_scale
from paceline.spot.trainer import BatchPlan, SpotTrainer, TrainingProgress

logger = logging.getLogger(__name__)

_FILE = "spot.safetensors"
_METADATA, _HASH = "spot", "blake2b"
"""Keys of the file's metadata."""
_RUN_STEP = "run_step"
"""Key of a snapshot's metadata with the training step of the run at which it was saved."""


class Snapshot(NamedTuple):
    """Complete state of a trainer, which continues from it exactly, given the same drafter form, policy and records."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]


def snapshot(trainer: SpotTrainer) -> Snapshot:
    """Returns the trainer's state. Tensors are the trainer's own, not copies; in the middle of an optimizer step they include the
    gradients."""
    tensors = {f"weight.{name}": p.detach() for name, p in trainer.parameters.items()}
    tensors |= {f"average.{name}": value for name, value in trainer.averaged.items()}
    for name, parameter in trainer.parameters.items():
        tensors |= {f"adam.{key}.{name}": value for key, value in trainer.optimizer.state.get(parameter, {}).items()}
        if parameter.grad is not None:
            tensors[f"gradient.{name}"] = parameter.grad
    tensors["scales.features"] = trainer.scales.features
    if trainer.module.draft_ids is not None:
        tensors["draft_ids"] = trainer.module.draft_ids
    metadata = {"progress": asdict(trainer.progress), "embedding": trainer.scales.embedding, "stream": trainer.scales.residual,
                "form": trainer.config.form, "buffer": trainer.buffer.id, "parts": _division(trainer),
                "policy": trainer.policy_fingerprint.as_json()}
    return Snapshot(tensors, metadata)


def load_snapshot(folder: Path | str, step: int | None = None) -> Snapshot | None:
    """Reads the checkpoint in a folder; None if there is none. Raises DamagedFile if the file is damaged or its content is not
    what was written, which killing the process that writes it does not cause.

    `step`: the training step that a run goes on from. A checkpoint of a later one is used, with a warning: tokens do not depend
    on the drafter, and one that has seen later weights fits earlier ones almost as well."""
    path = Path(folder) / _FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            text, expected = file.metadata()[_METADATA], file.metadata().get(_HASH)
            found = Snapshot({name: file.get_tensor(name) for name in file.keys()}, json.loads(text))  # noqa: SIM118 (no mapping)
        if expected is None:
            logger.warning("%s is of an earlier version and has no hash: whether it is as it was written is not known", path)
        elif expected != _hash_of(found.tensors, text):
            raise ValueError("its content is not what was written")
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedFile(f"{damaged(path, error)}; remove it to train the drafter from the start") from None
    saved = found.metadata.get(_RUN_STEP)
    if step is not None and saved is not None and saved > step:
        logger.warning("%s is of step %d, and the run goes on from step %d: the drafter has learned from later answers, which "
                       "changes no token", path, saved, step)
    return found


def drafter_of(found: Snapshot, config: EagleConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> Eagle:
    """Returns the drafter that the trainer of a snapshot has reached, as `SpotTrainer.drafter` does. Raises a ValueError if it is
    not one of this architecture."""
    tensors, metadata = found
    averaged = {name.removeprefix("average."): t.to(device) for name, t in tensors.items() if name.startswith("average.")}
    ids = tensors.get("draft_ids")
    module = Eagle(config, None if ids is None else ids.to(device), own_head="head.weight" in averaged).to(device)
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    if shapes != {name: tensor.shape for name, tensor in averaged.items()}:
        raise ValueError("checkpoint: its drafter has another architecture")
    scales = Scales(metadata["embedding"], metadata["stream"], tensors["scales.features"].to(device))
    drafter = to_plain_scale(module, averaged, scales, config, dtype)
    drafter.policy_fingerprint = PolicyFingerprint.from_json(metadata["policy"])
    return drafter


def restore(trainer: SpotTrainer, found: Snapshot) -> None:
    """Restores a trainer's state bit for bit. The trainer has the same form and shape; its policy may have newer weights. If its
    buffer is another one than the checkpoint's, an optimizer step that was not finished is drawn anew."""
    tensors, metadata = found
    fingerprint, own = PolicyFingerprint.from_json(metadata.get("policy")), trainer.policy_fingerprint
    if fingerprint is not None and fingerprint.shape != own.shape:
        raise ValueError(f"checkpoint: its drafter was trained for a policy of another shape ({fingerprint.shape}) than this one "
                         f"({own.shape})")
    if metadata["form"] != trainer.config.form:
        raise ValueError(f"form: the checkpoint was trained with {metadata['form']}, this trainer is configured for "
                         f"{trainer.config.form}")
    features = tensors["scales.features"].to(trainer.scales.features.device)
    trainer.set_scales(Scales(metadata["embedding"], metadata["stream"], features))
    if "draft_ids" in tensors:
        trainer.module.draft_ids = tensors["draft_ids"].to(trainer.policy.norm.device)
        trainer.policy_changed()
    with torch.no_grad():
        for name, parameter in trainer.parameters.items():
            if tensors[f"weight.{name}"].shape != parameter.shape:
                raise ValueError(f"checkpoint: {name} has shape {list(tensors[f'weight.{name}'].shape)}, this drafter "
                                 f"needs {list(parameter.shape)}")
            parameter.copy_(tensors[f"weight.{name}"])
            trainer.averaged[name].copy_(tensors[f"average.{name}"])
            gradient = tensors.get(f"gradient.{name}")
            parameter.grad = None if gradient is None else gradient.to(parameter)
    _restore_moments(trainer, tensors)
    progress = dict(metadata["progress"])
    plan = progress.pop("plan")
    if fingerprint is not None:
        trainer.set_policy_fingerprint(fingerprint)
    if metadata.get("buffer") == trainer.buffer.id and metadata.get("parts") == _division(trainer):
        micro_batches = tuple(tuple((key, part) for key, part in each) for each in plan["micro_batches"])
        trainer.progress = TrainingProgress(**progress, plan=BatchPlan(micro_batches, tuple(plan["shares"])))
    else:  # the plan names other records, or other parts of them: the optimizer step begins anew
        trainer.progress = TrainingProgress(**{**progress, "cursor": 0})
        trainer.optimizer.zero_grad(set_to_none=True)


def _division(trainer: SpotTrainer) -> list[int | None]:
    """Returns the settings that decide how records are divided into parts (`packing.stretches`)."""
    return [trainer.plain_config.window, trainer.config.max_length]


def _restore_moments(trainer: SpotTrainer, tensors: dict[str, Tensor]) -> None:
    names = {id(parameter): name for name, parameter in trainer.parameters.items()}
    current = trainer.optimizer.state_dict()
    order = [names[id(p)] for group in trainer.optimizer.param_groups for p in group["params"]]
    moments: dict[int, dict[str, Tensor]] = {}
    for index, name in enumerate(order):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"adam.{key}.{name}" in tensors:
                moments.setdefault(index, {})[key] = tensors[f"adam.{key}.{name}"]
    trainer.optimizer.load_state_dict({"state": moments, "param_groups": current["param_groups"]})


class SpotCheckpoints:
    """Writes checkpoints to a folder, which holds only the newest one. `save` must be called between micro-batches."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._staged: dict[str, Tensor] = {}  # buffers on the trainer's device
        self._host: dict[str, Tensor] = {}  # pinned buffers, if the trainer runs on a GPU
        self._writer = ThreadPoolExecutor(1, "spot-checkpoint")
        self._writing: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether the last checkpoint is still being written, so that `save` would have to wait."""
        return self._writing is not None and not self._writing.done()

    def save(self, found: Snapshot, step: int | None = None) -> float:
        """Saves a checkpoint in the background and returns the milliseconds that the caller waited. Raises the error of writing
        the previous checkpoint, if there was one. `step`: the training step of the run whose checkpoint it belongs to."""
        began = time.perf_counter()
        self.wait()
        tensors = self._stage(found.tensors)
        ready = None
        if any(t.is_cuda for t in tensors.values()):
            ready = torch.cuda.Event()
            ready.record()
        metadata = found.metadata if step is None else {**found.metadata, _RUN_STEP: step}
        self._writing = self._writer.submit(self._write, tensors, metadata, ready)
        return 1e3 * (time.perf_counter() - began)

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def close(self) -> None:
        """Waits for the last checkpoint and stops the writer thread."""
        self.wait()
        self._writer.shutdown()

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return _copied(tensors, self._staged, pin=False)

    def _write(self, tensors: dict[str, Tensor], metadata: dict[str, Any], ready: torch.cuda.Event | None) -> None:
        if ready is not None:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                tensors = _copied(tensors, self._host, pin=True)
            stream.synchronize()
        _write_file(self.folder / _FILE, tensors, metadata)


def _copied(tensors: dict[str, Tensor], into: dict[str, Tensor], pin: bool) -> dict[str, Tensor]:
    """Copies tensors into buffers that are allocated once and reused."""
    for name, tensor in tensors.items():
        if name not in into or into[name].shape != tensor.shape or into[name].dtype != tensor.dtype:
            into[name] = (torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) if pin else torch.empty_like(tensor))
    torch._foreach_copy_([into[name] for name in tensors], list(tensors.values()), non_blocking=True)
    return {name: into[name] for name in tensors}


def _write_file(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    tensors, text = {name: t.contiguous() for name, t in tensors.items()}, json.dumps(metadata)
    save_tensors(path, tensors, {_METADATA: text, _HASH: _hash_of(tensors, text)})


def _hash_of(tensors: dict[str, Tensor], metadata: str) -> str:
    """The hash of what a file holds: values, dtypes and shapes of its tensors, and its metadata."""
    buffers = {f"{name} {t.dtype} {list(t.shape)}": t.cpu().reshape(-1).view(torch.uint8).numpy().data
               for name, t in tensors.items()}
    return hash_buffers({**buffers, _METADATA: memoryview(metadata.encode())})
