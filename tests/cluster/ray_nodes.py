"""Ray clusters of several nodes on this machine."""

from __future__ import annotations

from typing import Any

import ray
from ray.cluster_utils import Cluster

_MAX_STARTS = 4


def start_cluster(**resources: Any) -> Cluster:
    """A cluster with one node. Ray gives it half a minute to start, which is not enough while the machine is very busy, so it may
    take several attempts."""
    for attempt in range(1, _MAX_STARTS + 1):
        try:
            return Cluster(initialize_head=True, head_node_args=resources)
        except Exception as error:  # what Ray raises is not of a kind of its own
            if "timed out during startup" not in str(error) or attempt == _MAX_STARTS:
                raise
            ray.shutdown()
    raise AssertionError
