"""Generation of whole answers on top of `Engine.add`, `Engine.step` and `Engine.abort`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paceline.engine.outputs import failed_rollout
from paceline.engine.prompts import Prompt, check_arguments
from paceline.types import RolloutGroup, SamplingParams, StepResult

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


def generate_groups(engine: Engine, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, n: int,
                    keys: Sequence[str] | None, on_step: Callable[[StepResult], None] | None) -> list[RolloutGroup]:
    """Generate n answers of every prompt; see `Engine.generate`."""
    each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
    for one in (None, *each):  # wrong arguments concern all prompts; a wrong prompt concerns itself alone
        check_arguments(one, n)
    if len(each) != len(prompts) or (keys is not None and len(keys) != len(prompts)):
        raise ValueError(f"generate: {len(prompts)} prompts, but {len(each)} params and {len(keys or prompts)} keys")
    groups, owner = [], {}
    for index, prompt in enumerate(prompts):
        try:
            prompt_ids = engine.encode(prompt)
            ids = engine.add(prompt_ids, each[index], n, None if keys is None else keys[index])
        except ValueError as error:
            groups.append(RolloutGroup([], [failed_rollout(sample, str(error)) for sample in range(n)]))
            continue
        groups.append(RolloutGroup(prompt_ids))
        owner.update(dict.fromkeys(ids, groups[-1]))
    _run_until_done(engine, owner, on_step)
    for group in groups:
        group.rollouts.sort(key=lambda rollout: rollout.sample)
    return groups


def _run_until_done(engine: Engine, owner: dict[int, RolloutGroup], on_step: Callable[[StepResult], None] | None) -> None:
    """Run steps until every request in `owner` is finished, and add its rollout to its group. However this ends, unfinished
    requests are aborted, so that none leaks."""
    left = set(owner)
    try:
        while left:
            result = engine.step()
            for rollout in result.finished:
                if rollout.request_id in left:
                    left.remove(rollout.request_id)
                    owner[rollout.request_id].rollouts.append(rollout)
            if on_step is not None:
                on_step(result)
    finally:
        engine.abort(left)
