"""Answers of a given form: a regular expression for the bundled policy, with speculative decoding, and the same without it.

    pip install llguidance
    python examples/deploy/structured_answers.py
"""

from __future__ import annotations

from paceline import Engine, SamplingParams
from paceline.bundled import resolve_model

SHORT = r"( [1-9][0-9]*){1,4} 1"
"""At most five numbers, the last of which is 1: a form that the policy's own answers need not have."""


def main(max_tokens: int = 40, **engine_options: object) -> list[str]:
    params = SamplingParams(max_new_tokens=max_tokens, seed=7, structured_outputs={"regex": SHORT})
    answers = {}
    for drafter, strategy in (("suffix", "suffix:d4w2v8"), ("none", "off")):
        engine = Engine.load(resolve_model("default"), drafter=drafter, strategy=strategy, **engine_options)
        groups = engine.generate(["27:", "8:", "97:"], params)
        answers[strategy] = [group.rollouts[0].text for group in groups]
        for group in groups:
            print(f"{strategy:14} {engine.tokenizer.decode(group.rollouts[0].prompt_ids)}{group.rollouts[0].text}")
    assert answers["off"] == answers["suffix:d4w2v8"], "tokens do not depend on drafts"
    return answers["off"]


if __name__ == "__main__":
    main()
