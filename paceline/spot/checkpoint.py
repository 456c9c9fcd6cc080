"""The spot trainer's checkpoints: written behind its back, whole or not there, only what training changes.

A snapshot is a copy into buffers that are used again and again, on the trainer's own device: that is all the trainer waits for.
A thread then brings it to disk as one safetensors file beside the old one and renames it, so the last file is whole whenever
the process dies.
Embedding and head are the policy's and not in it.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.drafters.origin import Origin
from paceline.files import atomic_write
from paceline.spot.scales import Scales
from paceline.spot.trainer import Plan, Progress, SpotTrainer

_FILE = "spot.safetensors"


class Snapshot(NamedTuple):
    """All that a trainer needs to go on exactly as it was, given the drafter's form, the policy and the records."""

    tensors: dict[str, Tensor]
    known: dict[str, Any]


def snapshot(trainer: SpotTrainer) -> Snapshot:
    """Not copied: the trainer's own tensors. Gradients are among them in the middle of an optimizer step."""
    tensors = {f"weight.{name}": p.detach() for name, p in trainer.parameters.items()}
    tensors |= {f"average.{name}": value for name, value in trainer.averaged.items()}
    for name, parameter in trainer.parameters.items():
        tensors |= {f"adam.{key}.{name}": value for key, value in trainer.optimizer.state.get(parameter, {}).items()}
        if parameter.grad is not None:
            tensors[f"gradient.{name}"] = parameter.grad
    tensors["scales.features"] = trainer.scales.features
    if trainer.module.draft_ids is not None:
        tensors["draft_ids"] = trainer.module.draft_ids
    known = {"progress": asdict(trainer.progress), "embedding": trainer.scales.embedding, "stream": trainer.scales.stream,
             "form": trainer.config.form, "policy": trainer.origin.as_json()}
    return Snapshot(tensors, known)


def load_snapshot(folder: Path | str) -> Snapshot | None:
    """None: there is none yet. ValueError if the file is damaged, which a kill does not do."""
    path = Path(folder) / _FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            known = json.loads(file.metadata()["spot"])
            return Snapshot({name: file.get_tensor(name) for name in file.keys()}, known)  # noqa: SIM118 (no mapping)
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: damaged checkpoint ({error})") from None


def restore(trainer: SpotTrainer, found: Snapshot) -> None:
    """Bit for bit. The trainer was built with the same form and shape; its policy may have moved on."""
    tensors, known = found
    origin = Origin.from_json(known.get("policy"))
    if origin is not None and origin.shape != trainer.origin.shape:
        raise ValueError(f"checkpoint: of a drafter for another policy ({origin.shape}) than this one ({trainer.origin.shape})")
    if known["form"] != trainer.config.form:
        raise ValueError(f"form: the checkpoint is of {known['form']}, this trainer of {trainer.config.form}")
    trainer.rescale(Scales(known["embedding"], known["stream"], tensors["scales.features"].to(trainer.scales.features.device)))
    if "draft_ids" in tensors:
        trainer.module.draft_ids = tensors["draft_ids"].to(trainer.policy.norm.device)
        trainer.policy_changed()
    with torch.no_grad():
        for name, parameter in trainer.parameters.items():
            if tensors[f"weight.{name}"].shape != parameter.shape:
                raise ValueError(f"checkpoint: {name} has shape {list(tensors[f'weight.{name}'].shape)}, this drafter "
                                 f"{list(parameter.shape)}")
            parameter.copy_(tensors[f"weight.{name}"])
            trainer.averaged[name].copy_(tensors[f"average.{name}"])
            gradient = tensors.get(f"gradient.{name}")
            parameter.grad = None if gradient is None else gradient.to(parameter)
    _restore_moments(trainer, tensors)
    progress = dict(known["progress"])
    plan = progress.pop("plan")
    if origin is not None:
        trainer.trained_for(origin)
    trainer.progress = Progress(**progress, plan=Plan(tuple(map(tuple, plan["micro_batches"])), tuple(plan["shares"])))


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
    """One folder, one file, the newest. `save` from the training thread between micro-batches."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._staged: dict[str, Tensor] = {}  # on the trainer's device
        self._host: dict[str, Tensor] = {}  # pinned, when that is a GPU
        self._writer = ThreadPoolExecutor(1, "spot-checkpoint")
        self._writing: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """The last one is still being written: another now would wait for it."""
        return self._writing is not None and not self._writing.done()

    def save(self, found: Snapshot) -> float:
        """Milliseconds that the caller waited. An error in writing the one before comes out here."""
        began = time.perf_counter()
        self.wait()
        tensors = self._stage(found.tensors)
        ready = None
        if any(t.is_cuda for t in tensors.values()):
            ready = torch.cuda.Event()
            ready.record()
        self._writing = self._writer.submit(self._write, tensors, found.known, ready)
        return 1e3 * (time.perf_counter() - began)

    def save_blocking(self, found: Snapshot) -> float:
        """The plain way, to compare with."""
        began = time.perf_counter()
        _write_file(self.folder / _FILE, {name: t.cpu() for name, t in found.tensors.items()}, found.known)
        return 1e3 * (time.perf_counter() - began)

    def wait(self) -> None:
        """Returns when the last one is on disk."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def close(self) -> None:
        self.wait()
        self._writer.shutdown()

    def _stage(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return _copied(tensors, self._staged, pin=False)

    def _write(self, tensors: dict[str, Tensor], known: dict[str, Any], ready: torch.cuda.Event | None) -> None:
        if ready is not None:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                tensors = _copied(tensors, self._host, pin=True)
            stream.synchronize()
        _write_file(self.folder / _FILE, tensors, known)


def _copied(tensors: dict[str, Tensor], into: dict[str, Tensor], pin: bool) -> dict[str, Tensor]:
    """Into buffers that stay, made at the first time."""
    for name, tensor in tensors.items():
        if name not in into or into[name].shape != tensor.shape or into[name].dtype != tensor.dtype:
            into[name] = (torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) if pin else torch.empty_like(tensor))
    torch._foreach_copy_([into[name] for name in tensors], list(tensors.values()), non_blocking=True)
    return {name: into[name] for name in tensors}


def _write_file(path: Path, tensors: dict[str, Tensor], known: dict[str, Any]) -> None:
    whole = {name: t.contiguous() for name, t in tensors.items()}
    atomic_write(path, lambda temporary: save_file(whole, temporary, {"spot": json.dumps(known)}))
