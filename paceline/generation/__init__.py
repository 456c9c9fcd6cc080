"""Offline generation: prompts from JSON lines or a task, rollouts to a file that an interrupted run continues."""

from paceline.generation.generator import (
    FileGenerator,
    GenerationCallback,
    GenerationOptions,
    GenerationResult,
    sampling_settings,
)
from paceline.generation.jobs import Job, JobReader, open_prompts
from paceline.generation.output import RolloutFile
from paceline.generation.prompts import NamedPrompt, encode_prompt, plain_prompt, read_prompts

__all__ = ["FileGenerator", "GenerationCallback", "GenerationOptions", "GenerationResult", "Job",
           "JobReader", "NamedPrompt", "RolloutFile", "encode_prompt",
           "open_prompts", "plain_prompt", "read_prompts", "sampling_settings"]
