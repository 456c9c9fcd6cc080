"""The settings of a run that is resumed: those that decide what is learned must stay as they were, and changes of others are
recorded with the step that they begin at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.config import ConfigError, ConfigProblem, TrainConfig
from paceline.report.settings import HISTORY_FILE, SettingChange, Settings, read_history, setting_changes
from paceline.trainer.config_files import dump_config, load_run_config
from paceline.trainer.run_folder import CONFIG_FILE, RunFolder, holds_no_step

_FIXED = ("model", "task", "task_options", "algorithm", "algorithm_options", "seed", "dtype", "reward_model",
          "reward_model_weight", "reward.functions", "reward.task_weight", "optimizer.kind", "learner.lora_rank",
          "learner.lora_alpha", "learner.lora_targets")
_EVALUATION = ("evaluation.task", "evaluation.task_options", "evaluation.problems", "evaluation.samples",
               "evaluation.temperature", "evaluation.max_new_tokens", "evaluation.solved_at")


def check_resumable(config: TrainConfig) -> None:
    """Raises a ConfigError that names the settings in which `config` differs from the run in `config.out`, but must not: model,
    data, algorithm, reward, seed and data type, and the problems that are held out."""
    folder = Path(config.out)
    if holds_no_step(folder) or not (folder / CONFIG_FILE).is_file():
        return
    before = load_run_config(folder)
    old, new = _as_json(before), _as_json(config)
    problems = [ConfigProblem(key, f"the run in {folder} has {json.dumps(_value(old, key), ensure_ascii=False)}, and a resumed "
                              "run keeps it; start a new run for another")
                for key in _fixed_keys(before, config) if _value(old, key) != _value(new, key)]
    if problems:
        raise ConfigError(problems)


def write_settings(folder: RunFolder, config: TrainConfig, step: int) -> list[SettingChange]:
    """Writes the settings that hold from `step` on, and returns those that change there. What was recorded for that step and
    later ones is dropped, as those steps are done again."""
    history, file = read_history(folder.path), folder.path / CONFIG_FILE
    if not history and step > 1 and file.is_file():  # the run was begun by a version that kept no history
        history = [Settings(1, _as_json(load_run_config(folder.path)))]
    kept = [settings for settings in history if settings.step < step]
    now = Settings(step, _as_json(config))
    changes = setting_changes([*kept[-1:], now])
    if changes or not kept:
        kept.append(now)
    folder.write(HISTORY_FILE, "".join(json.dumps(settings._asdict()) + "\n" for settings in kept))
    folder.write(CONFIG_FILE, dump_config(config))
    return changes


def _fixed_keys(before: TrainConfig, after: TrainConfig) -> list[str]:
    """Evaluations stay comparable. The last problems of the run's own task are held out of training or not, but not at times."""
    keys = list(_FIXED)
    if before.evaluation.every and after.evaluation.every:
        keys += _EVALUATION
    elif not any(config.evaluation.every and _has_own_problems(config) for config in (before, after)):
        keys.append("evaluation.every")
    return keys


def _has_own_problems(config: TrainConfig) -> bool:
    return config.evaluation.task is not None or bool(config.evaluation.task_options)


def _as_json(config: TrainConfig) -> dict[str, Any]:
    """The settings as they are in `config.json`: lists and tuples are the same there."""
    return json.loads(dump_config(config))


def _value(settings: dict[str, Any], key: str) -> Any:
    table, _, name = key.rpartition(".")
    return (settings[table] if table else settings)[name]
