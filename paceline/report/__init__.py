"""What a run says about itself: metrics to JSONL, TensorBoard and W&B; a view in the terminal; an HTML report. No torch."""

from paceline.report.events import EventLog, read_metrics
from paceline.report.figures import length_figures
from paceline.report.html import write_report
from paceline.report.view import TrainView

__all__ = ["EventLog", "TrainView", "length_figures", "read_metrics", "write_report"]
