"""Features are copied to host memory without waiting for the device, and are delivered in order."""

from __future__ import annotations

import torch

from paceline.engine.runner import Download
from paceline.trainer.feature_downloads import FeatureDownloads
from paceline.types import FeatureRecord


class Copy:
    """An event of the device that happens when `done` is set, or is waited for."""

    def __init__(self, done: bool = False) -> None:
        self.done, self.waited = done, False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = self.waited = True


def record(number: int) -> FeatureRecord:
    return FeatureRecord([1, 2, 3], torch.full((2, 4), float(number)), (-1,), [0, 0], 1)


def test_records_are_delivered_in_order_once_they_have_arrived(monkeypatch):
    copies, kept = [Copy() for _ in range(4)], []
    events = iter(copies)
    monkeypatch.setattr(Download, "start", classmethod(lambda cls, tensor: cls((tensor,), next(events))))
    downloads = FeatureDownloads()
    for number in range(4):
        downloads.add(record(number), lambda found: kept.append(int(found.features[0, 0])))
    downloads.poll()
    assert kept == []
    copies[0].done = copies[2].done = True
    downloads.poll()
    assert kept == [0]
    assert not any(copy.waited for copy in copies[1:])
    downloads.wait()
    assert kept == [0, 1, 2, 3]


def test_pinned_memory_is_not_kept():
    pinned = torch.randn(2, 4)
    found = Download((pinned,), Copy(done=True)).host_tensor()  # type: ignore[arg-type]
    assert torch.equal(found, pinned) and found.data_ptr() != pinned.data_ptr()


def test_features_in_host_memory_are_delivered_at_once_without_a_copy():
    one, kept, downloads = record(5), [], FeatureDownloads()
    downloads.add(one, kept.append)
    downloads.poll()
    assert kept[0].features is one.features
