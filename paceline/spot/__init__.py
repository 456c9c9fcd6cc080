"""Drafter training: what it learns from, the losses, the trainer that yields, its checkpoints, and how good the drafter is."""

from paceline.spot.buffer import FeatureBuffer
from paceline.spot.checkpoint import SpotCheckpoints, load_snapshot, restore, snapshot
from paceline.spot.config import SpotConfig
from paceline.spot.fresh import capture_layers, fresh_eagle
from paceline.spot.trainer import SpotReport, SpotTrainer

__all__ = ["FeatureBuffer", "SpotCheckpoints", "SpotConfig", "SpotReport", "SpotTrainer", "capture_layers", "fresh_eagle",
           "load_snapshot", "restore", "snapshot"]
