"""Generation of whole answers on top of `Engine.add`, `Engine.step` and `Engine.abort`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paceline.engine.outputs import failed_rollout
from paceline.engine.pool import RequestPool
from paceline.engine.prompts import Prompt, check_arguments
from paceline.types import RolloutGroup, SamplingParams, StepResult, Strategy

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

_WARM_UP_PROMPTS = 128
"""Largest number of prompts of `generate_unrecorded` on a GPU: more than 64 use other kernels than fewer."""


def generate_groups(engine: Engine, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, n: int,
                    keys: Sequence[str] | None, on_step: Callable[[StepResult], None] | None) -> list[RolloutGroup]:
    """Generate n answers of every prompt; see `Engine.generate`."""
    each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
    for one in (None, *each):  # wrong arguments concern all prompts; a wrong prompt concerns itself alone
        check_arguments(one, n)
        if one is not None and one.pauses:
            raise ValueError("pauses: nobody would resume the requests; use Engine.add and Engine.resume")
    if len(each) != len(prompts) or (keys is not None and len(keys) != len(prompts)):
        raise ValueError(f"generate: {len(prompts)} prompts, but {len(each)} params and {len(keys or prompts)} keys")
    groups = []
    with RequestPool[RolloutGroup](engine) as requests:
        for index, prompt in enumerate(prompts):
            try:
                group = RolloutGroup(engine.encode(prompt))
                requests.add(group.prompt_ids, each[index], [group] * n, None if keys is None else keys[index])
            except ValueError as error:
                group = RolloutGroup([], [failed_rollout(sample, str(error)) for sample in range(n)])
            groups.append(group)
        for result, finished, _ in requests.steps():
            for group, rollout in finished:
                group.rollouts.append(rollout)
            if on_step is not None:
                on_step(result)
    for group in groups:
        group.rollouts.sort(key=lambda rollout: rollout.sample)
    return groups


def generate_unrecorded(engine: Engine, max_requests: int) -> None:
    """Generate a few tokens for short prompts, unless there are requests: no later step with prompts is the first one then
    (`Engine.warming_up`)."""
    if not engine.has_work:
        strategy = Strategy("eagle" if engine.dummy_steps.has_learned_drafter else "suffix", 1, 1, 1)
        num_requests = min(max_requests, _WARM_UP_PROMPTS if engine.device.type == "cuda" else 2)
        with engine.unrecorded(strategy if engine.drafting.available else Strategy.OFF):
            engine.generate([[0] * 4], SamplingParams(max_new_tokens=8), num_requests)
