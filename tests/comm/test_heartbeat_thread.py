"""heartbeat_thread: what one tick writes, reads and ends. Time is played: it passes where the thread would sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fzero.comm import heartbeat_thread
from fzero.comm.hang_report import Phase, RankStatus
from fzero.comm.heartbeat_thread import ANSWER_SECONDS, POISON_TAG, STARTED, Ending, Heard, Heartbeat, Where

TICK = 0.5
pytestmark = pytest.mark.timeout(20, method="thread")  # each test takes some milliseconds, or waits without end
STATUS = RankStatus(
    beat=1, time=0.0, call=1, at="in step 1", seconds=0.0, waits=False, end=Phase.GOING, why="", told=False, agreed=""
)  # fmt: skip


@dataclass
class Part:
    """What the thread sees of its rank."""

    rank: int = 0
    world_size: int = 3
    timeout_seconds: float = 60.0
    where: Where = Where(1, "step 1", True, "step 0")  # noqa: RUF009
    waits: bool = False
    ending: Ending = Ending()  # noqa: RUF009
    failure: Ending = Ending()  # noqa: RUF009
    label: Callable[[int], str] = field(default="rank {}".format)


class Clock:
    """Seconds, which pass where someone sleeps; `then` is called at each sleep."""

    def __init__(self) -> None:
        self.now = 100.0
        self.then: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.then()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    played = Clock()
    monkeypatch.setattr(heartbeat_thread, "time", played)
    return played


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The receives that nobody sends to: (group, peer, tag, milliseconds of the wait)."""
    asked: list[Any] = []

    def irecv(tensor: Any, group: Any, group_src: int, tag: int) -> Any:
        if group.closed:
            raise RuntimeError("closed")

        def wait(patience: Any) -> None:
            asked.append((group, group_src, tag, patience.total_seconds()))
            raise RuntimeError("timed out")

        return None if group.left == group_src else SimpleNamespace(wait=wait)

    monkeypatch.setattr(heartbeat_thread, "dist", SimpleNamespace(irecv=irecv))
    return asked


class Group:
    """A process group of this rank, which is 0."""

    def __init__(self, size: int, *, left: int = -1, closed: bool = False) -> None:
        self.number, self.left, self.closed = size, left, closed

    def size(self) -> int:
        return self.number

    def rank(self) -> int:
        return 0


def beating(part: Part, group: Any = None) -> Heartbeat:
    """One whose thread does not run, with a tick of half a second and a patience of two."""
    made = Heartbeat(part, group, dist.HashStore())
    made.tick, made.patience = TICK, 2.0
    return made


def written(beat: Heartbeat, rank: int = 0) -> RankStatus:
    status = RankStatus.from_json(beat.store.get(str(rank)))
    assert status is not None
    return status


def other(of: Heartbeat, rank: int, **changed: Any) -> None:
    """Another rank writes its record."""
    of.store.set(str(rank), replace(STATUS, **changed).to_json())


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "timeout", "tick", "patience"), [(2, 60.0, 1.0, 2.5), (2, 0.5, 0.05, 2.0), (1024, 60.0, 4.0, 10.0)]
)
def test_a_tick_is_short_beside_the_timeout_and_long_in_a_large_world(
    world: int, timeout: float, tick: float, patience: float
) -> None:
    beat = Heartbeat(Part(world_size=world, timeout_seconds=timeout), None, None)
    assert (beat.tick, beat.patience) == (tick, patience)
    assert beat.holder is None


def test_who_holds_the_store_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_thread, "store_holder", lambda store: 3 if store == "its store" else None)
    assert Heartbeat(Part(), None, "its store").holder == 3


def test_a_record_says_where_the_rank_is_and_for_how_long(clock: Clock) -> None:
    part = Part(waits=True)
    beat = beating(part)
    beat._tell()
    clock.now += 3
    beat._tell()
    status = written(beat)
    assert (status.beat, status.call, status.seconds, status.time) == (2, 1, 3.0, 1e9 + 103)
    assert (status.at, status.waits, status.agreed) == (
        "waiting in step 1, for all ranks to agree on it",
        True,
        "step 0",
    )
    assert (status.end, status.told, beat.answered_at) == (Phase.GOING, False, 103.0)
    part.where = replace(part.where, position=lambda: 7)
    clock.now += 1
    beat._tell()
    assert written(beat).seconds == 0.0, "it has moved on"
    part.waits = False
    clock.now += 1
    beat._tell()
    assert (written(beat).seconds, written(beat).waits) == (0.0, False)
    assert not beat.store.check(["over"])
    assert not beat.published.is_set()


def test_an_end_is_written_for_all_to_see(clock: Clock) -> None:
    part = Part(ending=Ending(Phase.LOST, "closed", "waiting in step 1, op 3"))
    beat = beating(part)
    beat._tell()
    status = written(beat)
    assert (status.end, status.why, status.at) == (Phase.LOST, "closed", "waiting in step 1, op 3")
    assert status.waits, "it waited when it was lost"
    assert beat.store.check(["over"])
    assert beat.published.is_set()
    part.ending = Ending(Phase.ENDED)
    beat._tell()
    assert (written(beat).waits, written(beat).at) == (False, "in step 1, before its first op")


# --- a wait that is in vain -------------------------------------------------------------------------------------------


def test_a_wait_for_a_rank_that_failed_is_ended_at_the_second_tick(clock: Clock, poisoned: list[Any]) -> None:
    groups = [Group(3), Group(2), Group(2, closed=True), Group(3, left=1)]
    beat = beating(Part(waits=True), groups[0])
    beat.groups += [lambda one=one: one for one in groups[1:]]  # type: ignore[misc]
    beat.groups.append(lambda: None)
    other(beat, 1)
    other(beat, 2, end=Phase.FAILED, why="ValueError: x")
    beat.store.set("over", "1")
    beat._tell()
    assert beat.halted == "", "it has only come"
    beat._tell()
    assert beat.halted == "rank 2 failed alone, in step 1: ValueError: x"
    first, second, _, fourth = groups
    assert poisoned == [
        (group, peer, POISON_TAG, 0.001) for group, peer in ((first, 1), (first, 2), (second, 1), (fourth, 2))
    ]
    beat._tell()
    assert len(poisoned) == 4, "once"


def test_a_wait_goes_on_if_nobody_says_that_it_is_over(clock: Clock, poisoned: list[Any]) -> None:
    beat = beating(Part(waits=True))
    other(beat, 1, end=Phase.FAILED)
    for _ in range(3):
        beat._tell()
    assert (beat.halted, beat.heard) == ("", {})
    busy = beating(Part())
    other(busy, 1, end=Phase.FAILED)
    busy.store.set("over", "1")
    for _ in range(3):
        busy._tell()
    assert busy.halted == "", "it waits for nobody"


def test_a_wait_goes_on_if_who_ended_has_done_its_part_or_the_rank_moves(clock: Clock, poisoned: list[Any]) -> None:
    beat = beating(Part(waits=True))
    other(beat, 1, end=Phase.ENDED)
    beat.store.set("over", "1")
    beat._tell()
    beat._tell()
    assert beat.halted == "", "its last call is this one"
    part = Part(waits=True)
    beat = beating(part)
    other(beat, 1, end=Phase.FAILED)
    beat.store.set("over", "1")
    beat._tell()
    read = beat._listen

    def moves() -> None:
        read()
        part.waits = False

    beat._listen = moves  # type: ignore[method-assign]
    beat._tell()
    assert (beat.halted, poisoned) == ("", [])


def test_shortly_before_the_time_is_up_the_others_are_listened_to(clock: Clock) -> None:
    """So the roll call knows at once who has been silent. Patience and two ticks before: 3 seconds."""
    beat = beating(Part(waits=True, timeout_seconds=10.0))
    other(beat, 1, end=Phase.FAILED)
    beat._tell()
    clock.now += 7
    beat._tell()
    assert beat.heard == {}
    clock.now += 0.5
    beat._tell()
    assert {rank: heard.status is None for rank, heard in beat.heard.items()} == {1: False, 2: True}
    assert beat.halted == "", "nobody has said that it is over"


# --- what is heard ----------------------------------------------------------------------------------------------------


def test_a_record_is_news_once_it_differs(clock: Clock) -> None:
    beat = beating(Part())
    other(beat, 1)
    beat.listens = True
    beat._tell()
    assert {rank: (heard.at, heard.news) for rank, heard in beat.heard.items()} == {
        1: (100.0, False),
        2: (100.0, False),
    }
    clock.now += 1
    beat._listen()
    assert beat.heard[1].at == 100.0
    other(beat, 1, beat=2)
    beat._listen()
    assert (beat.heard[1].at, beat.heard[1].news, beat.heard[2].news) == (101.0, True, False)
    assert beat.answered_at == 101.0
    assert 0 not in beat.heard


def test_silence_counts_from_the_beginning_of_the_wait(clock: Clock) -> None:
    beat = beating(Part(world_size=5))
    ended = replace(STATUS, end=Phase.ENDED)
    beat.heard = {1: Heard(STATUS, 90.0, True), 2: Heard(ended, 90.0, True), 3: Heard(None, 96.0, False)}
    assert beat.silent(80.0, 10.0) == [1]
    assert beat.silent(80.0, 4.0) == [1, 3]
    assert beat.silent(97.0, 4.0) == []
    assert beat.silent(96.0, 4.0) == [1, 3]


def test_a_roll_call_tells_those_that_answer_from_those_that_are_silent(clock: Clock) -> None:
    """Rank 1 writes on, rank 2 has ended, rank 3 writes no more, rank 4 never wrote."""
    beat = beating(Part(world_size=5, ending=Ending(Phase.LOST, "closed", "here")))
    other(beat, 1)
    other(beat, 2, end=Phase.ENDED)
    other(beat, 3)
    beats: list[int] = []

    def then() -> None:
        other(beat, 1, beat=int(clock.now * 8))
        beats.append(written(beat).beat)

    clock.then = then
    statuses, silent = beat._roll_call()
    assert beats == [*range(1, len(beats) + 1)], "others that call the roll too hear from it"
    assert silent == {3, 4}
    assert [*statuses] == [0, 1, 2, 3, 4]
    assert statuses[4] is None
    assert statuses[0] == written(beat)
    assert written(beat).told, "the others need not answer any more"
    assert clock.now == 102.0, "its patience"


def test_a_roll_call_ends_once_all_have_answered_or_are_known_to_be_silent(clock: Clock) -> None:
    beat = beating(Part(ending=Ending(Phase.LOST)))
    beat.heard = {1: Heard(STATUS, 90.0, True), 2: Heard(STATUS, 99.9, True)}
    other(beat, 1)
    other(beat, 2)
    clock.then = lambda: other(beat, 2, beat=2)
    assert beat._roll_call()[1] == {1}
    assert clock.now == 100.0 + TICK / 4
    beat = beating(Part(ending=Ending(Phase.LOST)))
    beat.stopped.set()
    began = clock.now
    assert beat._roll_call()[1] == {1, 2}, "nobody has answered yet"
    assert clock.now == began


def test_who_holds_the_store_stays_until_the_others_have_read(clock: Clock) -> None:
    beat = beating(Part())
    beat.holder = 0
    other(beat, 1)
    other(beat, 2, end=Phase.LOST)

    def reads() -> None:
        if clock.now >= 101:
            other(beat, 1, told=True)
        if clock.now >= 100.5:
            other(beat, 2, end=Phase.ENDED)

    clock.then = reads
    beat._let_read({0, 1, 2})
    assert clock.now == 101.0
    clock.then = lambda: None
    other(beat, 1)
    beat._let_read({1})
    assert clock.now == 103.0, "for as long as its patience"
    beat._let_read({0})
    beat.holder = 1
    beat._let_read({1, 2})
    assert clock.now == 103.0, "another holds it"


def test_a_rank_that_is_lost_lets_those_read_that_wait(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    beat = beating(Part(world_size=4, ending=Ending(Phase.LOST)))
    kept: list[set[int]] = []
    monkeypatch.setattr(beat, "_let_read", kept.append)
    other(beat, 1, waits=True)
    other(beat, 2)
    clock.then = lambda: (other(beat, 1, beat=2, waits=True), other(beat, 2, beat=2))  # type: ignore[assignment, func-returns-value]
    beat._roll_call()
    assert kept == [{0, 1}], "rank 3 has written nothing, rank 2 waits for nobody"


# --- the thread -------------------------------------------------------------------------------------------------------


def lived(beat: Heartbeat) -> None:
    """Runs the thread's function here; for as long as it sleeps, if it does, it is stopped at its first sleep."""
    STARTED.add(beat)
    wait = beat.wake.wait

    def sleeps(seconds: float) -> bool:
        assert seconds == TICK
        beat.stopped.set()
        return wait(0)

    beat.wake.wait = sleeps  # type: ignore[assignment]
    beat._live()
    assert beat not in STARTED


def test_a_rank_whose_group_is_gone_has_left_it(clock: Clock) -> None:
    beat = beating(Part(where=Where(1, "step 1")))
    lived(beat)
    assert (written(beat).end, written(beat).at) == (Phase.LEFT, "in the program's own code, after step 1")
    assert beat.beat == 1
    assert not beat.stopped.is_set(), "of itself"
    beat = beating(Part())
    lived(beat)
    assert written(beat).at == "in step 1, before its first op", "it waits for nobody"
    held = Group(2)
    beat = beating(Part(), held)
    lived(beat)
    assert (written(beat).end, beat.stopped.is_set()) == (Phase.GOING, True)
    beat = beating(Part(), held)
    beat.wake.set()
    lived(beat)
    assert not beat.wake.is_set(), "it is woken once"
    beat = beating(Part(ending=Ending(Phase.FAILED, "x")))
    lived(beat)
    assert written(beat).end is Phase.FAILED, "what it wrote of itself stays"


@pytest.mark.parametrize(("phase", "lets"), [(Phase.FAILED, True), (Phase.ENDED, True), (Phase.GOING, False)])
def test_at_its_end_a_rank_lets_all_read_why(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, phase: Phase, lets: bool
) -> None:
    held = Group(3)
    beat = beating(Part(ending=Ending(phase)), held)
    kept: list[set[int]] = []
    monkeypatch.setattr(beat, "_let_read", kept.append)
    lived(beat)
    assert kept == [{0, 1, 2}] * lets


def test_a_lost_rank_calls_the_roll_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Group(3)
    beat = beating(Part(ending=Ending(Phase.LOST)), held)
    monkeypatch.setattr(beat, "_roll_call", lambda: ({}, {1}))
    lived(beat)
    assert beat.call_roll() == ({}, {1})
    assert beat.answered.is_set()
    beat.stopped.clear()
    monkeypatch.setattr(beat, "_roll_call", lambda: ({}, {2}))
    lived(beat)
    assert beat.statuses == ({}, {1})


def test_a_store_that_is_gone_ends_the_thread_and_whoever_waits_for_it(clock: Clock) -> None:
    held = Group(3)
    beat = beating(Part(), held)
    beat.store = None
    lived(beat)
    assert beat.answered.is_set()
    assert beat.published.is_set()
    assert beat.call_roll() is None


def test_a_store_that_does_not_answer_is_waited_for_so_long(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    beat = beating(Part())
    asked: list[float] = []

    def wait(seconds: float) -> bool:
        asked.append(seconds)
        clock.sleep(seconds)
        return False

    monkeypatch.setattr(beat.answered, "wait", wait)
    assert beat.call_roll() is None
    assert beat.wake.is_set(), "it is asked at once"
    assert asked == [TICK] * 5, "its patience and a tick after the last answer"
    monkeypatch.setattr(beat.published, "wait", wait)
    beat.published.set()
    beat.wake.clear()
    beat.publish()
    assert asked[5:] == [ANSWER_SECONDS]
    assert beat.wake.is_set()
    assert not beat.published.is_set(), "that was of an earlier ending"


def test_a_thread_is_started_once_and_ends(poisoned: list[Any]) -> None:
    held = Group(3)
    beat = beating(Part(), held)
    beat.stop(1.0)
    assert not beat.alive()
    beat.stopped.clear()
    beat.tick = 30.0
    beat.start()
    thread = beat.thread
    assert thread is not None
    assert thread.daemon, "or Python would wait for it"
    beat.start()
    assert beat.thread is thread
    assert beat.alive()
    assert beat in STARTED
    began = time.monotonic()
    beat.stop(20.0)
    assert not beat.alive()
    assert time.monotonic() - began < 15, "it is woken"
