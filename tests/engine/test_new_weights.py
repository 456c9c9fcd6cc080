"""New weights while requests run, and what an engine keeps of the old ones."""

from __future__ import annotations

import pytest
import torch
from tiny import CONFIGS, model

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.models.decoder import Decoder
from paceline.models.state_dict import export_state


def perturbed(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            for name, tensor in export_state(model()).items()}


def fresh() -> Decoder:
    decoder = Decoder(CONFIGS["llama"]).to(torch.float64)
    decoder.load_state_dict(model().state_dict())
    return decoder.requires_grad_(False)


@pytest.mark.parametrize("on_update", ["continue", "recompute"])
def test_weight_update_between_steps(on_update):
    prompt, params = [1, 2, 3, 4, 5], SamplingParams(max_new_tokens=30, seed=4)
    engine = Engine(fresh(), strategy="suffix:d4w2v8", config=EngineConfig(max_batch=8, page_size=2, on_update=on_update))
    before = Engine(model(), strategy="off").generate([prompt], params)[0].rollouts[0]
    (request,) = engine.add(prompt, params)
    written: list[int] = []
    while len(written) < 10:
        written += engine.step().tokens.get(request, [])
    engine.update_weights(perturbed(3), version=7)
    finished = []
    while engine.has_work:
        finished += engine.step().finished
    (rollout,) = finished
    assert rollout.token_ids[: len(written)] == written == before.token_ids[: len(written)]
    assert rollout.versions == [0] * len(written) + [7] * (30 - len(written))
    # Recomputed, the rest is what the new weights make of the same beginning.
    updated = fresh()
    Engine(updated, strategy="off").update_weights(perturbed(3))
    other = Engine(updated, strategy="off")
    (again,) = other.add(prompt + written, SamplingParams(max_new_tokens=30 - len(written)), seeds=[rollout.seed])
    rest = []
    while other.has_work:
        rest += other.step().tokens.get(again, [])
    assert (rollout.token_ids[len(written) :] == rest) is (on_update == "recompute")


def test_weight_update_drops_cached_prefixes():
    prompt, params = list(range(1, 30)), SamplingParams(max_new_tokens=12, seed=4)
    engine = Engine(fresh(), config=EngineConfig(max_batch=8, page_size=4))
    engine.generate([prompt], params)
    engine.update_weights(perturbed(3))
    got = engine.generate([prompt], params)[0].rollouts[0]
    updated = fresh()
    clean = Engine(updated, config=EngineConfig(max_batch=8, page_size=4))
    clean.update_weights(perturbed(3))
    assert got.token_ids == clean.generate([prompt], params)[0].rollouts[0].token_ids
    assert got.versions == [1] * 12


def test_misshapen_update_changes_nothing():
    decoder = fresh()
    engine = Engine(decoder)
    bad = perturbed(3)
    bad["model.norm.weight"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        engine.update_weights(bad)
    for name, tensor in model().state_dict().items():
        assert torch.equal(decoder.state_dict()[name], tensor)
    assert engine.version == 0
