"""Paceline as the rollout engine of other trainers: `integrations.trl` for TRL, `integrations.verl` for verl. Neither package is
a dependency; each module needs the one that it is named after."""
