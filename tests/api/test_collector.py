"""The garbage collector while a step is lowered."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from fzero import collector
from fzero.collector import collector_paused

pytestmark = pytest.mark.usefixtures("thawed")


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


def test_what_somebody_else_has_frozen_stays_frozen_and_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.freeze()
    frozen, asked, count = gc.get_freeze_count(), [], gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: asked.append(1) or count())
    for _ in range(3):
        with collector_paused():
            assert not gc.isenabled()
    assert count() > frozen // 2  # another thread may have dropped some of them
    assert len(asked) == 1


@pytest.mark.parametrize("rings", [100, 450])  # fewer than `MANY`; and more, of which `collect` within makes old ones
@pytest.mark.sampled(1)
def test_what_outlives_one_context_is_collected_after_some(rings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a context froze is old to Python, which seldom walks old objects: each lowering left its program behind."""
    monkeypatch.setattr(collector, "MANY", 300)
    monkeypatch.setattr(collector, "_made", 0)

    class Ring:
        def __init__(self) -> None:
            self.own = self

    kept: list[Ring] = []
    made: list[weakref.ref[Ring]] = []
    for _ in range(8 if rings < 300 else 3):  # each collection of all takes half a second in a suite's process
        with collector_paused():
            kept = [Ring() for _ in range(rings)]  # those of the context before are garbage from here on
            collector.collect()
        made += map(weakref.ref, kept)
    assert sum(ring() is not None for ring in made) <= max(600, 2 * rings)


def test_contexts_of_two_threads_leave_it_as_it_was() -> None:
    """Whichever ends first: the one that began second has found it paused, and must not leave it so."""
    inside, go = threading.Event(), threading.Event()

    def second() -> None:
        with collector_paused():
            inside.set()
            go.wait()

    thread = threading.Thread(target=second)
    with collector_paused():
        thread.start()
        inside.wait()
    assert not gc.isenabled(), "the second is still open"
    go.set()
    thread.join()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("others", [False, True])
def test_a_function_is_found_by_its_code_among_frozen_objects_too(others: bool) -> None:
    """Python's search does not see them: what a method read of the function around it was not watched."""

    def known() -> None:
        pass

    if others:
        gc.freeze()
    with collector_paused():

        def new() -> None:
            pass

        frozen = gc.get_freeze_count()
        found = collector.functions_of({known.__code__, new.__code__})
        assert {*found} == {known, new}
        assert gc.get_freeze_count() > frozen // 2
    assert (gc.get_freeze_count() > 0) == others
    assert collector.functions_of({known.__code__}) == [known]
