"""Small arithmetic that charts and the view stand on."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.report.figures import downsample, duration, human, length_figures, moving_mean, phase_seconds
from paceline.report.svg import tick_labels, ticks


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 17), (0.981, 0.983), (1e-9, 4e-9), (0, 5000), (-1e12, 3e12), (0.5, 1.5)])
def test_ticks_are_round_and_inside(low, high):
    values = ticks(low, high, 6)
    assert 2 <= len(values) <= 7 and low - 1e-9 * abs(low) <= values[0] and values[-1] <= high * (1 + 1e-9)
    assert len(set(tick_labels(values))) == len(values)
    gap = values[1] - values[0]
    assert round(gap / 10 ** math.floor(math.log10(gap) + 1e-9), 6) in (1, 2, 5)


def test_whole_ticks():
    assert ticks(0.5, 2.5, 8, whole=True) == [1, 2]


def test_tick_labels():
    assert tick_labels([0, 0.05, 0.1]) == ["0.00", "0.05", "0.10"] and tick_labels([0, 20_000]) == ["0k", "20k"]
    assert tick_labels([0, 2000, 4000]) == ["0", "2,000", "4,000"] and tick_labels([]) == []


def test_moving_mean_skips_nan():
    smooth = moving_mean(np.array([1.0, math.nan, 3.0, 5.0]), 3)
    assert smooth.tolist() == [1.0, 2.0, 4.0, 4.0]
    assert np.isnan(moving_mean(np.array([math.nan, math.nan]), 3)).all()


def test_downsampling_keeps_ends_and_extremes():
    rng = np.random.default_rng(0)
    x, y = np.arange(10_000.0), rng.standard_normal(10_000)
    y[4321], y[77] = 99, math.nan
    few_x, few_y = downsample(x, y, 600)
    assert len(few_x) <= 602 and few_x[0] == 0 and few_x[-1] == 9999 and (np.diff(few_x) > 0).all()
    assert few_y[few_x == 4321] == 99 and np.nanmin(few_y) == np.nanmin(y)
    assert np.isnan(downsample(x, np.full(10_000, math.nan), 600)[1]).all()


def test_length_figures():
    assert length_figures([1, 2, 3, 4]) == pytest.approx(
        {"length/mean": 2.5, "length/p50": 2.5, "length/p99": 3.97, "length/max": 4})
    assert length_figures([]) == {}


def test_phase_seconds():
    whole = phase_seconds({"time/generate": 3.0, "time/train": 1.0, "time/step": 5.0})
    assert whole == {"generate": 3.0, "train": 1.0, "other": 1.0}
    assert phase_seconds({"time/generate": 3.0, "time/idle": math.nan, "time/step": 2.0}) == {"generate": 3.0}


def test_number_formats():
    assert [human(v) for v in (1234567, 0.123456, 12.0, 345.67, True, None, math.nan, 2.5e9, -1234.5)] == [
        "1,234,567", "0.123", "12", "345.7", "yes", "–", "nan", "2.5e+09", "-1,234"]
    assert [duration(v) for v in (0.123, 4.2, 42, 187, 43387)] == ["0.12 s", "4.2 s", "42 s", "3:07", "12:03:07"]
