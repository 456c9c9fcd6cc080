"""Uploading a run's policy and its drafter to the Hugging Face hub, each with a model card that holds the run's figures."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.manifest import check_checkpoint
from paceline.report import Run
from paceline.report.formatting import format_time, format_value
from paceline.rl.checkpoint import Checkpoints, drafter_folder, policy_folder
from paceline.trainer.callbacks import Listeners

CARD_FILE = "README.md"


def push_to_hub(folder: Path | str, repo: str, *, step: int | None = None, private: bool = True) -> list[str]:
    """Uploads the policy of a run's checkpoint to the repository `repo`, and its learned drafter, if it has one, to
    `repo`-drafter. Returns the addresses. `step`: the checkpoint's; None is the latest. ValueError if the hub refuses it, or
    the checkpoint is not as it was written."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    run, checkpoint = Run.read(folder), _checkpoint(Path(folder), step)
    check_checkpoint(checkpoint, [policy_folder(checkpoint).name, drafter_folder(checkpoint).name])
    parts = {repo: (policy_folder(checkpoint), policy_card(run, repo))}
    if drafter_folder(checkpoint).is_dir():
        parts[f"{repo}-drafter"] = drafter_folder(checkpoint), drafter_card(run, repo)
    api, addresses = HfApi(), []
    try:
        for name, (source, card) in parts.items():
            address = api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=source, ignore_patterns=[CARD_FILE],
                              commit_message=f"Step {_step_of(checkpoint)} of {run.name}")
            api.upload_file(path_or_fileobj=card.encode(), path_in_repo=CARD_FILE, repo_id=name, commit_message="Model card")
            addresses.append(str(address))
    except (HfHubHTTPError, HFValidationError, ConnectionError) as error:
        raise ValueError(f"{repo}: the hub refuses it ({' '.join(str(error).split())[:200]})") from None
    return addresses


def upload_run(folder: Path, repo: str, listeners: Listeners) -> None:
    """Uploads what a run has trained, and tells its listeners whether that was possible."""
    try:
        listeners.note("uploaded to " + " and ".join(push_to_hub(folder, repo)))
    except ValueError as error:
        listeners.warn(f"push_to_hub: {error}; paceline push {folder} --repo {repo} tries again")


def check_push_to_hub(repo: str) -> None:
    """Raises a ValueError if a run could not upload its results: the name is not one of a repository, or nobody is logged in."""
    from huggingface_hub import get_token

    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo):
        raise ValueError(f"{repo}: must be the name of a hub repository, such as user/name")
    if get_token() is None:
        raise ValueError("you are not logged in to the Hugging Face hub; hf auth login, or set HF_TOKEN")


def policy_card(run: Run, repo: str) -> str:
    """The model card of a run's policy."""
    model = str(run.config.get("model", ""))
    base = f"base_model: {model}\n" if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model) and not Path(model).exists() else ""
    started = f"`{model}`" if model != "default" else "the small policy that is bundled with Paceline"
    return (f"---\nlibrary_name: transformers\n{base}tags:\n- reinforcement-learning\n- paceline\n"
            f"- {run.config.get('algorithm', 'grpo')}\n---\n\n# {repo.rpartition('/')[2]}\n\n"
            f"Trained with Paceline by {run.title}, from {started}. {run.figures.headline()}\n\n{_figures_table(run)}\n")


def drafter_card(run: Run, repo: str) -> str:
    """The model card of a run's learned drafter, whose policy is in `repo`."""
    return ("---\ntags:\n- speculative-decoding\n- eagle\n- paceline\n"
            f"base_model: {repo}\n---\n\n# {repo.rpartition('/')[2]}-drafter\n\n"
            f"Draft model for speculative decoding of [{repo}](https://huggingface.co/{repo}), trained in the same run. Tokens "
            f"do not depend on it.\n\n{_figures_table(run)}\n")


def _figures_table(run: Run) -> str:
    figures = run.figures
    rows = {"steps": f"{figures.steps:,}", "mean reward": None if figures.reward is None else figures.reward.arrow,
            "mean reward on held-out problems": None if figures.held_out is None else figures.held_out.reward.arrow,
            "rollout speedup with speculation": figures.speedup_text if figures.rollout_speedup is not None else None,
            "identical rollouts with and without speculation":
                f"{figures.compared - figures.differing:,} of {figures.compared:,}" if figures.compared else None,
            "accept length": None if figures.accept_length is None else format_value(figures.accept_length),
            "accept length of the learned drafter":
                None if figures.drafter_accept_length is None else format_value(figures.drafter_accept_length),
            "time": format_time(figures.seconds)}
    return "| measured in the run | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items()
                                                                  if value is not None)


def _checkpoint(folder: Path, step: int | None) -> Path:
    found = {_step_of(each): each for each in Checkpoints(folder / "checkpoints", 1).all()}
    if not found:
        raise ValueError(f"{folder}: the run has no checkpoint yet")
    if step is not None and step not in found:
        raise ValueError(f"--step: there is no checkpoint of step {step}, only of {', '.join(map(str, found))}")
    return found[max(found) if step is None else step]


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
