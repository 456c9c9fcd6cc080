"""Export: a learned drafter for vLLM, SGLang or speculators, and a run's policy as a Hugging Face folder."""

from paceline.export.drafter import export_drafter
from paceline.export.loaders import DrafterLoader
from paceline.export.policy import export_adapter, export_policy
from paceline.export.sources import ExportSource, find_source

__all__ = ["DrafterLoader", "ExportSource", "export_adapter", "export_drafter", "export_policy", "find_source"]
