"""The spot trainer: it learns, it yields, it is deterministic, and it leaves the policy alone."""

from __future__ import annotations

import threading
import time
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from spot.answers import OPS, answers, sampled
from tiny import eagle, model

from paceline.drafters.eagle import Eagle
from paceline.models.decoder import Rope
from paceline.spot.buffer import FeatureBuffer
from paceline.spot.config import SpotConfig
from paceline.spot.coverage import coverage
from paceline.spot.initialization import capture_layers, fresh_eagle
from paceline.spot.losses import DrafterLoss
from paceline.spot.packing import pack, stretches
from paceline.spot.scaling import measure_scales, to_plain_scale, to_training_scale
from paceline.spot.trainer import SpotTrainer

LAYERS = capture_layers(eagle("qwen3", "eagle3").config)  # enough for either form
SMALL = {"step_tokens": 60, "micro_batch_tokens": 24, "warmup_steps": 3, "max_length": 256}


def filled(lengths, layers=LAYERS, folder=None) -> FeatureBuffer:
    buffer = FeatureBuffer(10**9, folder)
    for record in answers(model("qwen3"), lengths, layers):
        buffer.add(record, 0)
    return buffer


def made(buffer: FeatureBuffer, **options) -> SpotTrainer:
    config = SpotConfig(**{**SMALL, **options})
    return SpotTrainer(eagle("qwen3", config.module_form), model("qwen3"), buffer, config)


def micro_batches(count: int):
    """`until` that lets so many pass."""
    left = iter([False] * count)
    return lambda: next(left, True)


def same(a: SpotTrainer, b: SpotTrainer) -> bool:
    return all(torch.equal(a.parameters[n], b.parameters[n]) and torch.equal(a.averaged[n], b.averaged[n]) for n in a.parameters)


FORMS = [("eagle", "cross_entropy"), ("hass", "cross_entropy"), ("hass", "agreement"), ("eagle3", "cross_entropy")]


@pytest.mark.parametrize(("form", "objective"), FORMS)
def test_packed_loss_is_the_loss_of_each_record_alone(form, objective):
    policy, config = model("qwen3"), SpotConfig(form=form, objective=objective, **SMALL)
    drafter, records = eagle("qwen3", config.module_form), answers(model("qwen3"), [12, 4, 25, 8], LAYERS)
    scales = measure_scales(policy, drafter.config, records)
    loss = DrafterLoss(policy, config, scales, OPS, Rope(policy.config, 256, torch.float64, "cpu"))
    shares = loss.row_weights([(len(r.token_ids), r.prompt_length) for r in records])

    def run(parts):
        module = to_training_scale(drafter, scales)
        found = [loss(module, pack(part, drafter.config.feature_layers, 32), shares) for part in parts]
        sum(x.total for x in found).backward()
        return sum(x.total.item() for x in found), [p.grad for p in module.parameters() if p.grad is not None], found

    total, grads, (together,) = run([records])
    alone, grads_alone, _ = run([[r] for r in records])
    assert total == pytest.approx(alone, rel=1e-10)
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in zip(grads, grads_alone, strict=True))
    assert float(together.weight.sum()) == pytest.approx(1.0), "weights of all steps and rows sum up to one"


@pytest.mark.parametrize(("form", "objective"), [
    pytest.param(*each, marks=pytest.mark.slow) if each[0] == "hass" else each for each in FORMS])
def test_one_batch_is_learned_by_heart(form, objective):
    policy = model("qwen3", dtype=torch.float32)
    records = sampled(policy, [24, 30, 18], LAYERS, temperature=0.4)
    buffer = FeatureBuffer(10**9)
    for record in records:
        buffer.add(record, 0)
    config = SpotConfig(form=form, objective=objective, unroll=None if form == "eagle" else 3, lr=1e-2, step_tokens=70,
                        average=0.9, schedule="cosine", total_steps=200, max_length=256, temperature=0.4)
    trainer = SpotTrainer(fresh_eagle(policy, config.module_form, records), policy, buffer, config)
    before = coverage(trainer.drafter(), policy, records, tau=1.0, depth=3, temperature=0.4).by_depth[1]
    trainer.run(lambda: trainer.progress.step >= 200)
    after = coverage(trainer.drafter(), policy, records, tau=1.0, depth=3, temperature=0.4).by_depth[1]
    assert before[0] < 0.6 and after[0] > 0.9
    assert form == "eagle" or min(after) > 0.9


def test_the_policy_and_the_drafter_given_are_left_alone():
    buffer, policy, given = filled([20, 30, 9]), model("qwen3"), eagle("qwen3")
    before = [deepcopy(list(m.state_dict().items())) for m in (policy, given)]
    trainer = made(buffer)
    trainer.run(micro_batches(12))
    trainer.drafter()
    for module, kept in zip((policy, given), before, strict=True):
        assert all(torch.equal(module.state_dict()[name], value) for name, value in kept)
    assert all(p.grad is None and not p.requires_grad for p in policy.parameters())
    assert not torch.equal(trainer.drafter().fc.weight, given.fc.weight)


@pytest.mark.parametrize("form", ["hass", "eagle3"])
def test_two_trainers_on_the_same_records_give_the_same_weights(form):
    a, b, other = (made(filled([20, 30, 9, 14, 26]), form=form, unroll=2, feature_noise=0.1, seed=s) for s in (0, 0, 1))
    for trainer in (a, b, other):
        trainer.run(micro_batches(15))
    assert a.progress.step > 3 and same(a, b) and not same(a, other)


def test_stopped_anywhere_it_goes_on_there():
    """One micro-batch a call, among them the middle of optimizer steps."""
    whole, pieces = made(filled([20, 30, 9, 14, 26])), made(filled([20, 30, 9, 14, 26]))
    whole.run(micro_batches(11))
    middles = 0
    for _ in range(11):
        report = pieces.run(micro_batches(1))
        assert report.micro_batches == 1
        middles += pieces.progress.cursor > 0
    assert middles > 3 and same(whole, pieces)


def test_it_asks_whether_to_stop_before_each_micro_batch():
    trainer = made(filled([20, 30, 9]))
    asked = []

    def until() -> bool:
        asked.append(None)
        return len(asked) > 4

    report = trainer.run(until)
    assert report.micro_batches == 4 and len(asked) == 5
    assert report.tokens > 0 and {"hidden", "target", "overlap/1", "top1/3"} <= report.losses.keys()


def test_a_time_limit_is_exceeded_by_at_most_one_micro_batch(monkeypatch):
    """By a clock on which only micro-batches take time: two seconds each."""
    now = [0.0]
    monkeypatch.setattr("paceline.spot.trainer.time", SimpleNamespace(perf_counter=lambda: now[0]))
    trainer = made(filled([20, 30, 9]))

    def tick() -> None:
        now[0] += 2.0

    report = trainer.run(5.0, on_micro_batch=tick)
    assert (report.micro_batches, report.seconds, report.max_micro_batch_s) == (3, 6.0, 2.0)
    assert report.tokens_per_second == report.tokens / 6


def test_the_learning_rate_falls_over_the_known_length(monkeypatch):
    """By steps, and by a clock on which only drawing records takes time, ten seconds each. Constant if it is not known."""
    now = [0.0]
    monkeypatch.setattr("paceline.spot.trainer.time", SimpleNamespace(perf_counter=lambda: now[0]))
    rates = {}
    for name, options in {"steps": {"total_steps": 10}, "seconds": {"total_seconds": 100.0}, "unknown": {}}.items():
        buffer = filled([20, 30, 9])
        draw = buffer.draw
        monkeypatch.setattr(buffer, "draw", lambda *given, draw=draw: (now.__setitem__(0, now[0] + 10.0), draw(*given))[1])
        trainer = made(buffer, lr=1.0, schedule="linear", warmup_steps=1, min_lr_ratio=0.1, micro_batch_tokens=1000, **options)
        rates[name] = []
        for step in range(1, 13):
            trainer.run(lambda step=step, trainer=trainer: trainer.progress.step >= step)
            rates[name].append(trainer.optimizer.param_groups[0]["lr"])
    falling = [0.1 + 0.9 * (1 - min(10, k) / 10) for k in range(12)]
    assert rates["steps"] == pytest.approx(falling) and rates["seconds"] == pytest.approx(falling)
    assert rates["unknown"] == [1.0] * 12


def test_training_on_an_empty_buffer_returns_at_once():
    assert made(FeatureBuffer(10)).run(lambda: False).micro_batches == 0


def test_what_is_not_a_number_changes_no_weight():
    buffer = filled([20])
    trainer = made(buffer)
    record = buffer.get(0)
    record.features[5] = torch.nan
    before = {name: p.detach().clone() for name, p in trainer.parameters.items()}
    trainer.run(micro_batches(4))
    assert trainer.progress.skipped > 0 and trainer.progress.step == 0
    assert all(torch.equal(trainer.parameters[name], value) for name, value in before.items())


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
@pytest.mark.parametrize("draft_vocab", [0, 20])
def test_into_the_units_of_training_and_back_changes_no_bit(form, draft_vocab):
    policy, records = model("qwen3"), answers(model("qwen3"), [20, 9], LAYERS)
    for dtype in (torch.float64, torch.bfloat16):
        plain = Eagle.random(eagle("qwen3", form).config, 0, 0.2, dtype, draft_ids=eagle("qwen3", form, draft_vocab=20).draft_ids)
        scales = measure_scales(policy, plain.config, records)
        module = to_training_scale(plain, scales)
        back = to_plain_scale(module, dict(module.named_parameters()), scales, plain.config, dtype)
        assert all(torch.equal(value, back.state_dict()[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("form", ["hass", "eagle3"])
def test_a_reduced_vocabulary_holds_the_tokens_that_occur(form):
    policy, records = model("qwen3", dtype=torch.float32), answers(model("qwen3", dtype=torch.float32), [20] * 4, LAYERS)
    config = SpotConfig(form=form, unroll=2, **SMALL)
    drafter = fresh_eagle(policy, config.module_form, records, draft_vocab=50)
    assert len(drafter.draft_ids) == 50
    assert {t for r in records for t in r.token_ids} <= set(drafter.draft_ids.tolist())
    buffer = FeatureBuffer(10**9)
    for record in records:
        buffer.add(record, 0)
    trainer = SpotTrainer(drafter, policy, buffer, config)
    first = trainer.run(micro_batches(4)).losses["overlap/1"]
    trainer.run(micro_batches(100))
    assert trainer.run(micro_batches(4)).losses["overlap/1"] > first + 0.05


def test_bfloat16_policies_are_served_by_float32_weights():
    policy = model("qwen3", dtype=torch.bfloat16)
    buffer = FeatureBuffer(10**9)
    for record in answers(policy, [20, 30, 25], LAYERS):
        buffer.add(record, 0)
    trainer = SpotTrainer(fresh_eagle(policy), policy, buffer, SpotConfig(**SMALL))
    trainer.run(micro_batches(30))
    assert trainer.progress.step > 5 and trainer.progress.skipped == 0
    assert all(p.dtype == torch.float32 for p in trainer.parameters.values())
    assert trainer.drafter().fc.weight.dtype == torch.bfloat16


def test_settings_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="form"):
        SpotTrainer(eagle("qwen3", "eagle"), model("qwen3"), FeatureBuffer(1), SpotConfig(form="eagle3"))
    with pytest.raises(ValueError, match="hidden_weight"):
        SpotTrainer(eagle("qwen3", "eagle3"), model("qwen3"), FeatureBuffer(1), SpotConfig(form="eagle3", hidden_weight=1.0))
    with pytest.raises(ValueError, match="unrol"):
        SpotConfig(unrol=3)


def test_answers_may_arrive_while_it_trains():
    """As in a thread beside generation: the buffer is small, so records come and go under it."""
    buffer = FeatureBuffer(40_000)
    records = answers(model("qwen3"), [20, 30, 9, 14, 26] * 6, LAYERS)
    buffer.add(records[0], 0)
    trainer, done = made(buffer), threading.Event()
    reports = []
    thread = threading.Thread(target=lambda: reports.append(trainer.run(done.is_set)))
    thread.start()
    for i, record in enumerate(records):
        buffer.add(record, i // 5)
        time.sleep(0.001)
    deadline = time.monotonic() + 120
    while trainer.progress.step == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    done.set()
    thread.join(timeout=60)
    assert not thread.is_alive() and reports[0].steps > 0 and buffer.dropped > 0 and trainer.progress.skipped == 0


def test_long_answers_are_trained_in_parts():
    """Every token of the answer is predicted once per pass, behind at most a window; short answers stay whole."""
    policy = model("qwen3")
    buffer = FeatureBuffer(10**9)
    for record in answers(policy, [200, 40], LAYERS):
        buffer.add(record, 0)
    trainer = SpotTrainer(fresh_eagle(policy, window=66), policy, buffer, SpotConfig(**SMALL | {"step_tokens": 500}))
    lengths = []
    real = trainer._loss.__call__

    class Loss:
        def __getattr__(self, name):
            return getattr(trainer_loss, name)

        def __call__(self, module, packed, *rest):
            lengths.extend(zip(packed.lengths, packed.answer_lengths, strict=True))
            return real(module, packed, *rest)

    trainer_loss, trainer._loss = trainer._loss, Loss()
    while trainer.progress.step == 0:
        trainer.run(micro_batches(1))
    assert max(rows for rows, _ in lengths) <= 2 * 66 and {66, 65} & {count for _, count in lengths}
    parts = [stretches(n, 3, 66) for n in (200, 40)]
    assert trainer.rows_per_pass() == sum(part.end - part.first - 2 for each in parts for part in each)
    assert [part.end - part.start for part in parts[0]] == [65, 66, 66] and parts[1] == [(0, 3, 40)]
    assert stretches(4, 10, 66) == [(0, 10, 4)] and stretches(200, 300, 66)[0].end <= 300
