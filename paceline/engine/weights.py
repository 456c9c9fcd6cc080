"""Weights of policy and drafter: replaced in place, laid out for the kernels, and offloaded to the host while an engine
sleeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from paceline.drafters.eagle import Eagle
from paceline.engine.failures import describe_error
from paceline.kernels import Ops
from paceline.models.decoder import Decoder, product_weights
from paceline.models.state_dict import Forward, StateLoader


class PolicyWeights:
    """The policy's weights: replaced as a whole, or known to be incomplete."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._problem: str | None = None

    def replace(self, state: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], on_copied: Callable[[], None],
                forward: Forward | None = None) -> None:
        """Copy new weights in place, then call `on_copied`. `forward`: see `StateLoader.load`. If this raises before
        the first tensor was copied, nothing has changed; if it raises later, the weights cannot be used until another call
        succeeds."""
        loader = StateLoader(self._model)
        try:
            loader.load(state, forward)
            on_copied()
        except BaseException as error:
            if loader.num_copied:
                self._problem = (f"update_weights failed after {loader.num_copied} tensors ({describe_error(error)}); "
                                 "the weights are incomplete until another update_weights succeeds")
            raise
        self._problem = None

    def mark_incomplete(self, error: BaseException) -> None:
        """What has to follow new weights failed: they cannot be used until another `replace` succeeds."""
        self._problem = (f"update_weights failed after the copies ({describe_error(error)}); the weights are incomplete until "
                         "another update_weights succeeds")

    def discard(self, keep: Collection[str]) -> None:
        """Free the memory of all parameters but those named in `keep`. The weights cannot be used until `allocate` has been
        called and `replace` has succeeded."""
        self._problem = "the weights were discarded while the engine slept; update_weights has to bring new ones"
        for name, parameter in self._model.named_parameters():
            if name not in keep:
                parameter.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Allocate what `discard` freed. The values are undefined."""
        for parameter in self._model.parameters():
            if not parameter.untyped_storage().size():
                parameter.untyped_storage().resize_(parameter.nbytes)

    def require_complete(self) -> None:
        """Raise RuntimeError if the weights are incomplete."""
        if self._problem is not None:
            raise RuntimeError(self._problem)


def offload(modules: Iterable[nn.Module]) -> None:
    """Move parameters from the GPU to pinned host memory. They stay the same objects, and tied ones stay tied; new values may be
    loaded while they are on the host."""
    for parameter in _parameters(modules):
        if parameter.device.type == "cuda":
            parameter.data = torch.empty_like(parameter, device="cpu", pin_memory=True).copy_(parameter)


def restore(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move offloaded parameters back to the device."""
    for parameter in _parameters(modules):
        if parameter.device != device:
            parameter.data = parameter.data.to(device, non_blocking=True)


def prepare_linears(modules: Iterable[nn.Module], ops: Ops) -> None:
    """Tell the kernels that linear layers have new values, so that they can lay them out anew."""
    ops.prepare(product_weights(modules))


def copy_drafter(new: Eagle, into: Eagle) -> None:
    """Copy a learned drafter's weights, and the ids of a reduced vocabulary, in place into another one of the same form."""
    if new.config != into.config or new.draft_vocab_size != into.draft_vocab_size:
        raise ValueError("update_drafter: this drafter is of another form or for another policy")
    with torch.no_grad():
        for mine, theirs in zip((*into.parameters(), *into.buffers()), (*new.parameters(), *new.buffers()), strict=True):
            mine.copy_(theirs)


def drafter_mismatch(drafter: Eagle, drafter_version: int, policy: Decoder, version: int) -> str | None:
    """Return how the policy differs from the one that the drafter was trained for; None if it does not."""
    found = drafter.policy_fingerprint.mismatch(policy) if drafter.policy_fingerprint else None
    if found is None and drafter_version < version:
        return f"the drafter follows policy version {drafter_version}, the policy is at {version}"
    return found


def _parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return list({id(p): p for module in modules for p in module.parameters()}.values())

