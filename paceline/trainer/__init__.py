"""Training as a library: `Trainer(config).run()`. The command line, cluster workers and plug-ins all call this."""

from paceline.config import TrainConfig
from paceline.trainer.callbacks import ReportWriter, RolloutProgress, RunStatus, TrainerCallback, TrainResult
from paceline.trainer.config_files import load_config, load_run_config, unused_folder
from paceline.trainer.trainer import Trainer

__all__ = ["ReportWriter", "RolloutProgress", "RunStatus", "TrainConfig", "TrainResult", "Trainer", "TrainerCallback",
           "load_config", "load_run_config", "unused_folder"]
