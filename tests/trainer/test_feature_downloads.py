"""Features on a device are copied to host memory by a thread, in order. A CPU stands in for the device here; tests/gpu has the
real one."""

from __future__ import annotations

import threading

import pytest
import torch

from paceline.trainer import feature_downloads
from paceline.trainer.feature_downloads import FeatureDownloads
from paceline.types import FeatureRecord


class DeviceTensor:
    """Features that are not in host memory: `arrived` says when they are."""

    def __init__(self, number: int, arrived: threading.Event, num_bytes: int = 8) -> None:
        self.number, self.arrived, self.num_bytes = number, arrived, num_bytes
        self.device = torch.device("cuda")

    def numel(self) -> int:
        return self.num_bytes

    def element_size(self) -> int:
        return 1


@pytest.fixture
def downloads(monkeypatch) -> FeatureDownloads:
    def copy(self, features, computed):
        assert threading.current_thread() is not threading.main_thread()
        features.arrived.wait(10)
        return torch.full((2, 4), float(features.number))

    monkeypatch.setattr(FeatureDownloads, "_copy", copy)
    monkeypatch.setattr(torch.cuda, "Event", lambda: type("Event", (), {"record": lambda self: None})())
    return FeatureDownloads()


def record(features) -> FeatureRecord:
    return FeatureRecord([1, 2, 3], features, (-1,), [0, 0], 1)


def test_records_are_delivered_in_order_without_waiting_for_them(downloads):
    kept, arrived = [], [threading.Event() for _ in range(4)]
    for number, event in enumerate(arrived):
        downloads.add(record(DeviceTensor(number, event)), lambda found: kept.append(int(found.features[0, 0])))
    downloads.start()
    downloads.poll()
    assert kept == []
    for event in reversed(arrived):
        event.set()
    downloads.wait()
    assert kept == [0, 1, 2, 3]


def test_copies_begin_when_they_are_waited_for_or_too_many_wait(downloads, monkeypatch):
    """While answers are generated, nothing should compete with the thread that launches their steps."""
    monkeypatch.setattr(feature_downloads, "_MAX_DELAYED_BYTES", 20)
    kept, arrived = [], threading.Event()
    arrived.set()

    def add(number: int) -> None:
        downloads.add(record(DeviceTensor(number, arrived)), lambda found: kept.append(int(found.features[0, 0])))

    add(0)
    add(1)
    downloads.poll()
    assert kept == [] and not downloads._pending and downloads._thread is None
    add(2)  # 24 bytes
    assert len(downloads._pending) == 3
    add(3)
    downloads.wait()
    assert kept == [0, 1, 2, 3]
    downloads.wait()
    assert kept == [0, 1, 2, 3]


@pytest.mark.parametrize("notice", ["poll", "wait"])
def test_a_failed_delivery_is_noticed(downloads, notice):
    arrived, reached = threading.Event(), threading.Event()
    arrived.set()

    def fail(found):
        reached.set()
        raise OSError("no space left")

    downloads.add(record(DeviceTensor(0, arrived)), fail)
    downloads.start()
    assert reached.wait(10) and isinstance(downloads._pending[0][0].exception(10), OSError)
    with pytest.raises(OSError, match="no space left"):
        getattr(downloads, notice)()


def test_generation_waits_if_too_much_of_the_device_is_held(downloads, monkeypatch):
    """Those whose copies have not begun count, too."""
    monkeypatch.setattr(feature_downloads, "MAX_PENDING_BYTES", 20)
    monkeypatch.setattr(feature_downloads, "_MAX_DELAYED_BYTES", 12)
    kept, first, later = [], threading.Event(), threading.Event()
    later.set()
    for number, event in enumerate((first, later, later)):
        downloads.add(record(DeviceTensor(number, event)), lambda found: kept.append(int(found.features[0, 0])))
    assert kept == []
    threading.Timer(0.05, first.set).start()
    downloads.add(record(DeviceTensor(3, later)), lambda found: kept.append(int(found.features[0, 0])))
    assert kept[:1] == [0]
    downloads.wait()
    assert kept == [0, 1, 2, 3]


def test_features_in_host_memory_are_delivered_at_once_without_a_copy():
    one, kept = record(torch.randn(2, 4)), []
    FeatureDownloads().add(one, kept.append)
    assert kept[0].features is one.features
