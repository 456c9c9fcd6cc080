"""The rollout engine. Start reading at `Engine.step` in `engine.py`.

In the order of a step: `strategy_control` selects the strategy, `scheduler` plans the step, `drafting` proposes draft tokens,
`batch` lays out the rows, `runner` runs the policy and accepts draft tokens, `outputs` appends tokens to requests and makes
rollouts.
"""

from paceline.engine.engine import Engine

__all__ = ["Engine"]
