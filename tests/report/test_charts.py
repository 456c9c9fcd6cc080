"""Arithmetic and number formats that the charts and the terminal view are built on."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.report import length_metrics
from paceline.report.charts import moving_mean
from paceline.report.formatting import format_duration, format_steps, format_value
from paceline.report.metrics import phase_seconds


def test_moving_mean_skips_nan():
    smooth = moving_mean(np.array([1.0, math.nan, 3.0, 5.0]), 3)
    assert smooth.tolist() == [1.0, 2.0, 4.0, 4.0]
    assert np.isnan(moving_mean(np.array([math.nan, math.nan]), 3)).all()


def test_length_metrics():
    assert length_metrics([1, 2, 3, 4]) == pytest.approx(
        {"length/mean": 2.5, "length/p50": 2.5, "length/p99": 3.97, "length/max": 4})
    assert length_metrics([]) == {}


def test_phase_seconds():
    whole = phase_seconds({"time/generate": 3.0, "time/train": 1.0, "time/step": 5.0})
    assert whole == {"generate": 3.0, "train": 1.0, "other": 1.0}
    assert phase_seconds({"time/generate": 3.0, "time/idle": math.nan, "time/step": 2.0}) == {"generate": 3.0}


def test_number_formats():
    assert [format_value(v) for v in (1234567, 0.123456, 12.0, 345.67, True, None, math.nan, 2.5e9, -1234.5)] == [
        "1,234,567", "0.123", "12", "345.7", "yes", "–", "nan", "2.5e+09", "-1,234"]
    assert [format_duration(v) for v in (0.123, 4.2, 42, 187, 43387)] == ["0.12 s", "4.2 s", "42 s", "3:07", "12:03:07"]
    assert [format_steps(3, 3), format_steps(3, 7)] == ["step 3", "steps 3–7"]
