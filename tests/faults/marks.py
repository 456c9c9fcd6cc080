"""The mark of what the default suite leaves out."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: object) -> Any:
    """A case of a parametrized test that only `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)
