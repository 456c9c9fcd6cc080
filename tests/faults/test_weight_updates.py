"""Weight updates that fail: all old weights, or an engine that says that it has none it can use."""

from __future__ import annotations

import pytest
import torch
from tiny import CONFIGS, model

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.models.decoder import Decoder
from paceline.models.state_dict import export_state

PROMPT, PARAMS = [1, 2, 3, 4, 5], SamplingParams(max_new_tokens=12, seed=4)


def fresh() -> Decoder:
    decoder = Decoder(CONFIGS["llama"]).to(torch.float64)
    decoder.load_state_dict(model().state_dict())
    return decoder.requires_grad_(False)


def perturbed() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            for name, tensor in export_state(model()).items()}


def tokens(engine: Engine) -> list[int]:
    return engine.generate([PROMPT], PARAMS)[0].rollouts[0].token_ids


def damaged(how: str) -> dict[str, object]:
    """New weights of which the last tensor is wrong."""
    state: dict[str, object] = dict(perturbed())
    match how:
        case "shape":
            state["model.norm.weight"] = torch.ones(3)
        case "unknown":
            state["model.layers.9.norm.weight"] = torch.ones(32)
        case "missing":
            del state["model.norm.weight"]
        case "not a tensor":
            state["model.norm.weight"] = [1.0] * 32
        case "integers":
            state["model.norm.weight"] = torch.ones(32, dtype=torch.int64)
        case "no values":
            state["model.norm.weight"] = torch.ones(32, device="meta")
    return state


DAMAGES = ["shape", "unknown", "missing", "not a tensor", "integers", "no values"]


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("form", [dict, lambda state: list(state.items())])
def test_a_refused_mapping_or_list_changes_nothing(how, form):
    engine = Engine(fresh(), config=EngineConfig(max_batch=4))
    before = tokens(engine)
    with pytest.raises(ValueError, match=r"weights: 1 (unknown )?tensor"):
        engine.update_weights(form(damaged(how)))
    assert engine.version == 0 and tokens(engine) == before
    for name, tensor in model().state_dict().items():
        assert torch.equal(engine.model.state_dict()[name], tensor)


@pytest.mark.parametrize("how", [*DAMAGES, "raises", "interrupted"])
def test_after_a_broken_iterator_no_token_comes_from_half_new_weights(how):
    """An iterator is copied tensor by tensor, so its end is not known at its beginning: what was copied stays, and the engine
    does not run with it."""
    engine = Engine(fresh(), strategy="suffix:d4w2v8", config=EngineConfig(max_batch=4, on_update="recompute"))
    (request,) = engine.add(PROMPT, SamplingParams(max_new_tokens=20, seed=4))
    written: list[int] = []
    while len(written) < 5:
        written += engine.step().tokens.get(request, [])

    def stream():
        yield from damaged(how).items()
        if how == "raises":
            raise OSError("the connection was lost")
        if how == "interrupted":
            raise KeyboardInterrupt

    with pytest.raises((ValueError, OSError, KeyboardInterrupt)):
        engine.update_weights(stream())
    assert engine.version == 0
    with pytest.raises(RuntimeError, match=r"update_weights failed after .* incomplete until another update_weights succeeds"):
        engine.step()
    with pytest.raises(ValueError, match="unknown"):
        engine.update_weights({"nonsense": torch.ones(1)})
    with pytest.raises(RuntimeError, match="incomplete"):
        engine.step()
    engine.update_weights(iter(perturbed().items()), version=7)
    (rollout,) = [r for _ in range(40) for r in engine.step().finished]
    assert rollout.token_ids[: len(written)] == written
    assert rollout.versions == [0] * len(written) + [7] * (20 - len(written))
    clean = Engine(fresh(), strategy="off")
    clean.update_weights(perturbed())
    assert tokens(engine) == tokens(clean)


def test_an_iterator_that_fails_before_its_first_tensor_changes_nothing():
    engine = Engine(fresh())
    before = tokens(engine)

    def stream():
        raise OSError("no connection")
        yield

    with pytest.raises(OSError, match="no connection"):
        engine.update_weights(stream())
    with pytest.raises(ValueError, match="wrong shape"):
        engine.update_weights(iter([("model.norm.weight", torch.ones(3))]))
    assert tokens(engine) == before


def test_an_update_that_is_interrupted_after_the_copies_is_not_used_either(monkeypatch):
    """Between new weights and the end of cached prefixes no step may run."""
    engine = Engine(fresh(), config=EngineConfig(max_batch=4, page_size=4))
    tokens(engine)
    monkeypatch.setattr(engine.scheduler, "drop_prefixes", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.update_weights(perturbed())
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="incomplete"):
        engine.step()
    engine.update_weights(perturbed())
    clean = Engine(fresh(), config=EngineConfig(max_batch=4, page_size=4))
    clean.update_weights(perturbed())
    assert tokens(engine) == tokens(clean)
