"""Paceline as a rollout engine of verl: `actor_rollout_ref.rollout.name=paceline`.

Importing this package registers the engine under that name. verl imports it by itself where Paceline is installed (entry point
group `verl.plugins`); otherwise set `VERL_USE_EXTERNAL_MODULES=paceline.integrations.verl`. Settings of the engine stand in
`actor_rollout_ref.rollout.engine_kwargs.paceline` (`settings.ServerSettings`)."""

from __future__ import annotations

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

NAME = "paceline"


def _load_replica() -> type[RolloutReplica]:
    from paceline.integrations.verl.replica import PacelineReplica  # imports torch and the engine only where it is used

    return PacelineReplica


RolloutReplicaRegistry.register(NAME, _load_replica)
_ROLLOUT_REGISTRY[NAME, "async"] = "paceline.integrations.verl.adapter.ServerAdapter"
