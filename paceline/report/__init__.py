"""Metrics of a training run: the log (JSONL, TensorBoard, W&B), the progress view in the terminal and the HTML report.

Nothing in this package imports torch; tensorboard is imported only when it is used.
"""

from paceline.report.figures import HeldOut, RunFigures
from paceline.report.html import write_comparison, write_report
from paceline.report.live import LivePage
from paceline.report.metrics import EventLog, length_metrics, read_evaluations, read_metrics, read_traces
from paceline.report.run import Run
from paceline.report.terminal import TrainView
from paceline.report.trace import RolloutTrace

__all__ = ["EventLog", "HeldOut", "LivePage", "RolloutTrace", "Run", "RunFigures", "TrainView", "length_metrics",
           "read_evaluations", "read_metrics", "read_traces", "write_comparison", "write_report"]
