"""The garbage collector while a step is lowered."""

from __future__ import annotations

import gc

import pytest

from fzero.compile.collector import collector_paused


def test_frozen_objects_are_counted_once_however_deep_contexts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python walks all of them to count them: a small lowering took three times as long."""
    asked: list[int] = []
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: asked.append(1) or count())
    for _ in range(2):
        with collector_paused(), collector_paused():
            with pytest.raises(ZeroDivisionError), collector_paused():
                _ = 1 / 0
            assert not gc.isenabled()
            assert count() > 0
        assert gc.isenabled()
        assert count() == 0
    assert len(asked) == 2


def test_what_somebody_else_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collector_paused():
            pass
        assert gc.get_freeze_count() > frozen // 2  # another thread may have dropped some of them
    finally:
        gc.unfreeze()
