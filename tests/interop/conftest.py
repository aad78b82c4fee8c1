"""A Trainer collects all garbage when it begins: a quarter of a second in a process of tests, of which it frees
nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    memory = sys.modules.get("accelerate.utils.memory")
    if memory is None:
        yield
        return
    with mock.patch.object(memory, "clear_device_cache"):
        yield
