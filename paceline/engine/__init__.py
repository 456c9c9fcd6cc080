"""The rollout engine. Start reading at `EngineCore.step` in `core.py`; `Engine` in `engine.py` is what programs use.

An engine has two halves. The planner (`planner`, no torch) owns requests, pages and strategies; it emits one `StepCommand` of
plain arrays per step, and appends what comes back to its requests. The executor (`executor`) owns model, caches, drafter, graphs
and the state of every slot on the device; it knows no request.

In the order of a step: `strategy_control` selects the strategy, `scheduler` plans the step, `drafting` proposes draft tokens,
`planner` makes the command; `rows` lays out its rows, `learned_drafting` drafts on the device, `runner` runs the policy and
accepts draft tokens; `outputs` appends tokens to requests and makes rollouts.
"""

from paceline.engine.engine import Engine

__all__ = ["Engine"]
