"""Drafter training: the feature buffer, the losses, the pre-emptible trainer, its checkpoints, and the drafter's evaluation."""

from paceline.spot.buffer import FeatureBuffer
from paceline.spot.checkpoint import SpotCheckpoints, drafter_of, load_snapshot, restore, snapshot
from paceline.spot.config import SpotConfig
from paceline.spot.initialization import capture_layers, fresh_eagle
from paceline.spot.trainer import SpotReport, SpotTrainer

__all__ = ["FeatureBuffer", "SpotCheckpoints", "SpotConfig", "SpotReport", "SpotTrainer", "capture_layers", "drafter_of",
           "fresh_eagle", "load_snapshot", "restore", "snapshot"]
