"""Trains a drafter for the bundled policy and exports it for vLLM.

    python examples/deploy/export_drafter.py exported/collatz
"""

from __future__ import annotations

import sys
from pathlib import Path

from paceline import Engine, SamplingParams
from paceline.bundled import resolve_model
from paceline.export import export_drafter
from paceline.spot import FeatureBuffer, SpotConfig, SpotTrainer, capture_layers, fresh_eagle


def main(out: str | Path, answers: int = 64, seconds: float = 30.0, form: str = "eagle3", **engine_options: object) -> Path:
    if Path(out).is_dir() and any(Path(out).iterdir()):
        raise SystemExit(f"{out}: exists and is not an empty folder")  # before the training, not after it
    folder = resolve_model("default")
    policy = Engine.load(folder, drafter="none", strategy="off").model
    layers = capture_layers(fresh_eagle(policy, form).config)  # hidden states that the drafter is trained on
    engine = Engine.load(folder, drafter="none", strategy="off", capture=layers, **engine_options)
    groups = engine.generate([f"{number}:" for number in range(27, 27 + answers)], SamplingParams(max_new_tokens=128))
    records = [rollout.features for group in groups for rollout in group.rollouts]
    buffer = FeatureBuffer(1 << 30)
    for record in records:
        buffer.add(record, 0)
    trainer = SpotTrainer(fresh_eagle(policy, form, records), policy, buffer, SpotConfig(form=form))
    trainer.run(seconds)
    export_drafter(trainer.drafter(), policy, "vllm", out, str(folder))
    print(f"vllm serve {folder} --speculative-config "
          f"'{{\"method\": \"{form}\", \"model\": \"{out}\", \"num_speculative_tokens\": 5}}'")
    return Path(out)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "exported/collatz")
