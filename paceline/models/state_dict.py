"""Copying weights into and out of a decoder under Hugging Face's tensor names.

`state_layout` says which slice of a parameter a tensor is; `huggingface` and `gguf` read files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.models.decoder import Decoder
from paceline.models.partition import Part
from paceline.models.state_layout import ParamSlice, hf_layout, state_layout

_PREFIXES = ("model.", "module.", "_orig_mod.")
_SHOWN = 4  # most names listed in an error message


class Region(NamedTuple):
    """The rows and columns of a checkpoint's tensor that a rank of a split policy needs."""

    rows: slice
    columns: slice | None = None
    """None: all of them."""

    def of(self, tensor: Any) -> Any:
        """This region of a tensor, or of a safetensors slice."""
        return tensor[self.rows] if self.columns is None else tensor[self.rows, self.columns]


class CutTensor(NamedTuple):
    """A region of a checkpoint's tensor."""

    tensor: Tensor
    region: Region
    shape: tuple[int, ...]
    """Shape of the checkpoint's tensor."""


def region_of(slot: ParamSlice, parts: Mapping[str, Sequence[Part]]) -> Region | None:
    """What a rank needs of a checkpoint's tensor, by the parts of the policy that it has; None: all of it, or it has to be
    converted first."""
    own = parts.get(slot.param_name)
    found = [] if own is None or slot.form != "plain" or slot.shape is not None else list(_overlaps(slot, own))
    if not found:
        return None
    rows = slice(min(lo for _, lo, _ in found) - slot.start, max(hi for _, _, hi in found) - slot.start)
    columns = [part.columns for part, _, _ in found if part.columns is not None]
    if len(columns) < len(found):
        return Region(rows)
    return Region(rows, slice(min(each.start for each in columns), max(each.stop for each in columns)))


def _overlaps(slot: ParamSlice, parts: Sequence[Part]) -> Iterator[tuple[Part, int, int]]:
    """The parts that rows of a slice belong to, with the first of these rows and the end."""
    end = slot.start + slot.length
    for part in parts[bisect_right(parts, slot.start, key=attrgetter("stop")) :]:
        if part.start >= end:
            return
        if part.length:
            yield part, max(part.start, slot.start), min(part.stop, end)


def _rows(param: Tensor) -> Tensor:
    """A view of a parameter whose first dimension slices count."""
    return param.flatten(0, 1) if param.dim() == 3 else param


def _row_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0] * shape[1], *shape[2:]) if len(shape) == 3 else shape


def _plain(slot: ParamSlice, tensor: Tensor, offset: float) -> Tensor:
    """A checkpoint's tensor with the values of its slice, in their order."""
    if slot.form in ("interleaved", "transposed"):
        tensor = tensor.mT if tensor.dim() == 3 else tensor
    if slot.form == "interleaved":
        tensor = torch.cat((tensor[:, ::2], tensor[:, 1::2]), dim=1)
    if slot.form == "shifted":
        wide = tensor.to(torch.float64)  # so that it is rounded once
        tensor = wide + offset
    return tensor


def _copy_slice(slot: ParamSlice, param: Tensor, tensor: Tensor, offset: float) -> None:
    """Copy a checkpoint's tensor into its slice of a parameter."""
    rows = _rows(param)[slot.start : slot.start + slot.length]
    rows.copy_(_plain(slot, tensor, offset).reshape(rows.shape))


def _copy_parts(slot: ParamSlice, parts: Sequence[Part], params: Mapping[str, Tensor], tensor: Tensor, region: Region | None,
                width: int | None, offset: float) -> None:
    """Copy a checkpoint's tensor, or a region of it, into the parts of a split parameter. `width`: number of columns of the whole
    parameter; None if it is a vector."""
    first = slot.start + (0 if region is None else region.rows.start)
    left = 0 if region is None or region.columns is None else region.columns.start
    values = _plain(slot, tensor, offset)
    if region is None and width is not None:
        values = values.reshape(-1, width)
    for part, lo, hi in _overlaps(slot, parts):
        rows = values[lo - first : hi - first]
        if part.columns is not None:
            rows = rows[:, part.columns.start - left : part.columns.stop - left]
        target = _rows(params[part.target])[part.target_start + lo - part.start : part.target_start + hi - part.start]
        (target if part.target_columns is None else target[:, part.target_columns]).copy_(rows)


def _read_slice(slot: ParamSlice, param: Tensor, offset: float) -> Tensor:
    """A checkpoint's tensor from its slice of a parameter: a view where the checkpoint has it as it is."""
    rows = _rows(param)[slot.start : slot.start + slot.length]
    if slot.form == "plain":
        return rows if slot.shape is None else rows.view(slot.shape)
    if slot.form == "shifted":
        return rows - offset
    if slot.form == "interleaved":
        assert slot.shape is not None
        halves = rows.view(slot.shape[0], 2, slot.shape[-1] // 2, *slot.shape[1:-1])  # [E, 2, I] or [E, 2, I, K]
        merged = halves.transpose(1, 2).flatten(1, 2)
        return (merged.mT if merged.dim() == 3 else merged).contiguous()
    assert slot.shape is not None
    return rows.view(slot.shape[0], slot.shape[2], slot.shape[1]).mT.contiguous()


def load_state(model: Decoder, named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor | CutTensor]],
               strict: bool = True, source: str = "weights") -> None:
    """Copy tensors into the model in place, as `StateLoader.load` does."""
    StateLoader(model, strict, source).load(named_tensors)


Forward = Callable[[str, Tensor, ParamSlice], None]
"""Passes a tensor on to other processes."""


class StateLoader:
    """Copies tensors into a decoder in place, converting device and dtype. Names may be Hugging Face's or those of the
    decoder."""

    def __init__(self, model: Decoder, strict: bool = True, source: str = "weights") -> None:
        """`strict` rejects missing and unknown tensors; tensors of the wrong shape are always rejected. Error messages begin
        with `source`."""
        self.model, self.strict, self.source = model, strict, source
        self.num_copied = 0
        """Number of tensors copied so far: if `load` raises and this is 0, the model is unchanged."""

    def load(self, named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor | CutTensor]],
             forward: Forward | None = None) -> None:
        """Copy all tensors. `forward` is called with each of them before it is copied, to pass it on. A mapping or a list
        is checked completely before anything is copied; any other iterable is checked tensor by tensor, so that only one of them
        is in memory at a time."""
        if isinstance(named_tensors, Mapping):
            named_tensors = list(named_tensors.items())
        if isinstance(named_tensors, Sequence):
            matcher = _TensorMatcher(self.model, self.strict, self.source)
            for name, tensor in named_tensors:
                matcher.place_tensor(name, tensor)
            matcher.raise_wrong()
            matcher.raise_missing()
        matcher = _TensorMatcher(self.model, self.strict, self.source)
        for name, tensor in named_tensors:
            slot = matcher.place_tensor(name, tensor)
            matcher.raise_wrong()
            if slot is not None:
                if forward is not None:
                    assert isinstance(tensor, Tensor)
                    forward(name, tensor, slot)
                self.num_copied += 1
                with torch.no_grad():
                    self._copy(matcher, slot, tensor)
        matcher.raise_missing()

    def _copy(self, matcher: _TensorMatcher, slot: ParamSlice, tensor: Tensor | CutTensor) -> None:
        parts, offset = (self.model.parts or {}).get(slot.param_name), self.model.config.norm_offset
        values, region = (tensor.tensor, tensor.region) if isinstance(tensor, CutTensor) else (tensor, None)
        if parts is None:
            _copy_slice(slot, matcher.params[slot.param_name], values, offset)
        else:
            shape = _row_shape(matcher.shapes[slot.param_name])
            _copy_parts(slot, parts, matcher.params, values, region, shape[1] if len(shape) > 1 else None, offset)


def check_shapes(model: Decoder, shapes: Mapping[str, Sequence[int]], strict: bool = True,
                 source: str = "weights") -> None:
    """Check names and shapes as `load_state` does, without tensors."""
    matcher = _TensorMatcher(model, strict, source)
    for name, shape in shapes.items():
        matcher.place(name, shape)
    matcher.raise_wrong()
    matcher.raise_missing()


def export_state(model: Decoder) -> dict[str, Tensor]:
    """The weights under Hugging Face's names, for saving and for weight synchronisation: views of the parameters where these are
    stored alike."""
    if model.parts is not None:
        raise ValueError("tensor_parallel: no process has the whole policy, so it cannot be exported from this engine")
    params = {name: param.detach() for name, param in model.named_parameters()}
    return {name: _read_slice(slot, params[slot.param_name], model.config.norm_offset)
            for name, slot in hf_layout(model.config).items()}


class _TensorMatcher:
    """Matches incoming tensors to the parameters of one model and collects what is missing or wrong."""

    def __init__(self, model: Decoder, strict: bool, source: str) -> None:
        self.params = dict(model.named_parameters())
        self.shapes = parameter_shapes(model)
        """Shapes of the whole policy's parameters."""
        self.strict, self.source = strict, source
        self._tied = model.config.tie_embeddings
        layout, live = state_layout(model.config)
        self._slots = {bare_name(name): slot for name, slot in (layout | live).items()}
        self._slots |= {name: ParamSlice(name, 0, _row_shape(shape)[0], shape=shape) for name, shape in self.shapes.items()}
        self._awaited: dict[str, dict[str, ParamSlice]] = {}  # parameter -> checkpoint name -> slice, until it is loaded
        for name, slot in layout.items():
            self._awaited.setdefault(slot.param_name, {})[name] = slot
        self._unknown: list[str] = []
        self._wrong: list[str] = []
        self._twice: list[str] = []
        self._unusable: list[str] = []

    def place_tensor(self, name: str, tensor: Tensor | CutTensor) -> ParamSlice | None:
        """`place`, for a tensor that must have values to copy."""
        if isinstance(tensor, CutTensor):
            return self.place(name, tensor.shape)
        if not isinstance(tensor, Tensor):
            self._unusable.append(f"{name} is of type {type(tensor).__name__}")
        elif tensor.is_meta or not tensor.is_floating_point():
            self._unusable.append(f"{name} is {tensor.dtype} on {tensor.device}")
        else:
            return self.place(name, tensor.shape)
        return None

    def place(self, name: str, shape: Sequence[int]) -> ParamSlice | None:
        """The parameter slice that the tensor is copied to, or None if it is not copied (ignored, unknown or wrong)."""
        bare = bare_name(name)
        if bare.endswith("rotary_emb.inv_freq") or (self._tied and bare in ("lm_head.weight", "head.weight")):
            return None
        slot = self._slots.get(bare)
        if slot is None:
            self._unknown.append(f"{name} {list(shape)}")
            return None
        expected = self._shape(slot)
        if tuple(shape) != expected:
            self._wrong.append(f"{name} is {list(shape)}, expected {list(expected)}")
            return None
        awaited = self._awaited[slot.param_name]
        covered = [key for key, part in awaited.items() if slot.start <= part.start < slot.start + slot.length]
        for key in covered:
            del awaited[key]
        if not covered:
            self._twice.append(name)
        return slot if covered else None

    def _shape(self, slot: ParamSlice) -> tuple[int, ...]:
        return slot.shape or (slot.length, *_row_shape(self.shapes[slot.param_name])[1:])

    def raise_wrong(self) -> None:
        if self._wrong:
            raise ValueError(f"{self.source}: {len(self._wrong)} tensor(s) of the wrong shape: {_some(self._wrong)}")
        if self._twice:
            raise ValueError(f"{self.source}: {len(self._twice)} tensor(s) given twice: {_some(self._twice)}")
        if self._unusable:
            raise ValueError(f"{self.source}: {len(self._unusable)} tensor(s) without floating-point values: "
                             f"{_some(self._unusable)}")
        if self._unknown and self.strict:
            raise ValueError(f"{self.source}: {len(self._unknown)} unknown tensor(s): {_some(self._unknown)}")

    def raise_missing(self) -> None:
        names = [f"{name} {list(self._shape(slot))}"
                 for awaited in self._awaited.values() for name, slot in awaited.items()]
        if names and self.strict:
            raise ValueError(f"{self.source}: {len(names)} tensor(s) missing: {_some(names)}")


def parameter_shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Shapes of the whole policy's parameters, by name."""
    if model.parts is not None:
        with torch.device("meta"):
            model = Decoder(model.config)
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def checkpoint_shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    """Shapes of the whole policy's weights under Hugging Face's names, without their prefixes."""
    if model.parts is not None:
        with torch.device("meta"):
            model = Decoder(model.config)
    return {bare_name(name): tuple(tensor.shape) for name, tensor in export_state(model).items()}


def bare_name(name: str) -> str:
    """The name without the prefixes that wrappers add."""
    while name.startswith(_PREFIXES):
        name = name.split(".", 1)[1]
    return name


def _some(lines: list[str]) -> str:
    return "; ".join(lines[:_SHOWN]) + (" ..." if len(lines) > _SHOWN else "")
