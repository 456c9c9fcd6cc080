"""vLLM loads exported drafters and accepts what Paceline expects it to. vLLM's Python is named by PACELINE_VLLM_PYTHON."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from paceline import Engine, SamplingParams
from paceline.bundled import resolve_model
from paceline.drafters.eagle import Eagle
from paceline.export import export_drafter
from paceline.models.config import ModelConfig, RopeConfig
from paceline.models.decoder import Decoder
from paceline.models.save import save_model
from paceline.models.weights import load_model
from paceline.spot import FeatureBuffer, SpotConfig, SpotTrainer, fresh_eagle
from paceline.spot.coverage import coverage
from paceline.types import FeatureRecord

PYTHON = os.environ.get("PACELINE_VLLM_PYTHON")
pytestmark = [pytest.mark.integration, pytest.mark.skipif(PYTHON is None, reason="PACELINE_VLLM_PYTHON is not set")]
DEPTH, NEW_TOKENS, MAX_TRAIN_S = 4, 96, 120.0
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "2",
               "VLLM_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
RANDOM = {
    "llama": ModelConfig("llama", 97, 64, 96, 6, 2, 1, 32, max_context=512,
                         rope=RopeConfig(kind="llama3", factor=4.0, original_context=128)),
    "qwen2": ModelConfig("qwen2", 97, 64, 96, 6, 2, 2, 32, max_context=512, qkv_bias=True, tie_embeddings=True),
}


def policy_and_prompts(kind: str, folder: Path) -> tuple[Path, list[list[int]]]:
    """The bundled policy (Qwen3) with numbers to start from, or a random one. A random policy's answers cannot be predicted, but
    a drafter can learn a few of them by heart."""
    rng = random.Random(0)
    if kind == "qwen3":
        return Path(resolve_model("default")), [[*map(int, str(rng.randrange(20, 900))), 11] for _ in range(60)]
    policy = Decoder.random(RANDOM[kind], 0, std=0.25)
    save_model(policy, None, folder / "policy")
    return folder / "policy", [[rng.randrange(97) for _ in range(6)] for _ in range(4)]


def greedy(policy: Path, prompts: list[list[int]], drafter: Eagle | None, capture: tuple[int, ...]) -> tuple[list, Engine]:
    strategy = "off" if drafter is None else f"eagle:d{DEPTH}w1v{DEPTH}"
    engine = Engine.load(policy, dtype="float32", drafter=drafter, strategy=strategy, capture=capture, profile=False)
    groups = engine.generate(prompts, SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True))
    return [group.rollouts[0] for group in groups], engine


def trained_drafter(policy: Decoder, form: str, records: list[FeatureRecord], measured: list[FeatureRecord],
                    draft_vocab: int) -> tuple[Eagle, float]:
    """A drafter that is trained until it has learned something, and its accept length on the measured answers."""
    buffer = FeatureBuffer(1 << 28)
    for record in records:
        buffer.add(record, 0)
    config = SpotConfig(form=form, unroll=4, step_tokens=256)
    trainer = SpotTrainer(fresh_eagle(policy, form, records, draft_vocab), policy, buffer, config)
    accept_length, end = 0.0, time.monotonic() + MAX_TRAIN_S
    while accept_length < 2 and time.monotonic() < end:
        trainer.run(10.0)
        accept_length = coverage(trainer.drafter(), policy, measured, 0.0, DEPTH, (1,)).accept_length[1][-1]
    return trainer.drafter(), accept_length


@pytest.mark.parametrize(("kind", "form", "draft_vocab", "loader"), [
    ("qwen3", "eagle", 0, "vllm"), ("qwen3", "eagle3", 12, "vllm"), ("llama", "eagle", 0, "vllm"), ("llama", "eagle3", 0, "vllm"),
    ("qwen2", "eagle", 0, "vllm"), ("qwen2", "eagle3", 64, "speculators")])
def test_vllm_accepts_what_paceline_measures(kind, form, draft_vocab, loader, tmp_path):
    folder, prompts = policy_and_prompts(kind, tmp_path)
    policy, _ = load_model(folder, dtype="float32")
    layers = (2, policy.config.num_layers // 2, policy.config.num_layers - 3, -1)
    rollouts, _ = greedy(folder, prompts, None, layers)
    records = [rollout.features for rollout in rollouts]
    measured, trained_on = records[:12], records[12:] or records
    drafter, expected = trained_drafter(policy, form, trained_on, measured, draft_vocab)
    assert expected > 1.5, "a drafter that knows nothing shows nothing"
    export_drafter(drafter, policy, loader, tmp_path / "out", str(folder))
    drafted, engine = greedy(folder, prompts[:12], drafter, ())
    assert [rollout.token_ids for rollout in drafted] == [rollout.token_ids for rollout in rollouts[:12]]

    (tmp_path / "prompts.json").write_text(json.dumps(prompts[:12]))
    script = Path(__file__).with_name("vllm_greedy.py")
    command = [PYTHON, script, folder, tmp_path / "out", form, DEPTH, tmp_path / "prompts.json", NEW_TOKENS]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=540, check=False,
                          env={**os.environ, **ENVIRONMENT})
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(lines[0].removeprefix("RESULT "))
    same = sum(mine.token_ids == theirs for mine, theirs in zip(drafted, found["tokens"], strict=True))
    print(f"{kind} {form} {loader}: expected {expected:.3f}, engine {engine.stats().tokens_per_verification:.3f}, "
          f"vLLM {found['accept_length']:.3f}, {same} of {len(drafted)} answers identical")
    assert found["accept_length"] == pytest.approx(expected, rel=0.1)
    assert found["accept_length"] == pytest.approx(engine.stats().tokens_per_verification, rel=0.1)
    assert same >= len(drafted) - 1, "float32 flips a near-tie once in a while, no more"
