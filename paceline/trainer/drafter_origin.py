"""Whether a run's drafter was trained for an earlier version of the run's own policy. Such a drafter belongs to the checkpoints
of the run, although the policy has been updated since."""

from __future__ import annotations

from pathlib import Path

from paceline.drafters.checkpoint import read_fingerprint
from paceline.drafters.eagle import Eagle
from paceline.drafters.fingerprint import fingerprint_of
from paceline.models.decoder import Decoder
from paceline.rl.checkpoint import drafter_folder


class DrafterOrigin:
    """Knows the one drafter of a run that may have been trained for somebody else's policy: the one that the run began with.
    Whatever is trained later is trained for the run's own."""

    def __init__(self, given: Eagle, policy: Decoder, checkpoint: Path | None) -> None:
        """`given`: the drafter that the run begins or goes on with; `policy`: the run's policy at that time; `checkpoint`: the
        one that the run goes on from."""
        known, here = given.policy_fingerprint, fingerprint_of(policy).weights
        saved = None if checkpoint is None else read_fingerprint(drafter_folder(checkpoint))
        own = {here} if saved is None or saved.descendant != here else {here, saved.weights}
        self._foreign = None if known is None or known.weights in own else known.weights

    def is_own(self, drafter: Eagle) -> bool:
        """Whether this drafter was trained for an earlier version of the run's policy, or for the present one."""
        known = drafter.policy_fingerprint
        return known is not None and known.weights != self._foreign
