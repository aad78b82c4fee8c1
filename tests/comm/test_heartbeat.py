"""The thread that tells the other ranks where this one is."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fzero.comm import heartbeat
from fzero.comm.hang_report import TEXT_CHARS, Phase, RankStatus, _stat, fate, process_name
from fzero.comm.heartbeat import Presence
from fzero.comm.heartbeat_thread import ANSWER_SECONDS, Ending, Where
from fzero.errors import HangError, PeerError

SCRIPT = """
import atexit, threading
import torch.distributed as dist

def threads():
    return [thread for thread in threading.enumerate() if thread.name == "fzero presence"]

atexit.register(lambda: print(len(threads()), "at the end"))  # runs after what is registered below
from fzero.comm import heartbeat

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
presence = heartbeat.of()
presence.heartbeat.start()
dist.destroy_process_group()
print(len(threads()), "without its group")
"""


def test_its_thread_ends_before_python_does() -> None:
    """One that is in the store while Python ends, ends the process with SIGABRT."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "1 without its group\n0 at the end\n"), done.stderr


# --- records that fzero did not write: torch's store is open to every program that reaches its port

PLAIN: dict[str, Any] = {"beat": 1, "time": time.time(), "call": 1, "at": "in step 1", "seconds": 1.0, "waits": False}
PLAIN |= {"end": "", "why": "", "told": False, "agreed": "step 1", "process": ""}
NO_RECORD = {
    "text": "hello",
    "bytes": b"\xff\xfe\0",
    "list": "[]",
    "null": "null",
    "deep": "[" * 100_000,
    "deep and no record": '{"a":' * 10_000,
    "5,000 digits": '{"beat": ' + "9" * 5000 + "}",
    "10 MB": json.dumps({**PLAIN, "at": "A" * 10_000_000}),
    "a field is missing": json.dumps({"beat": 1}),
}
WRONG = [("at", 5), ("at", None), ("seconds", "x"), ("seconds", 10**400), ("seconds", float("nan"))]
WRONG += [("time", "y"), ("time", float("inf")), ("call", "x"), ("call", [1]), ("call", None), ("call", 1e300)]
WRONG += [("call", -1), ("beat", True), ("waits", "yes"), ("told", 5), ("end", "weird"), ("end", []), ("why", {})]
NO_RECORD |= {f"{name}={value!r:.20}": json.dumps({**PLAIN, name: value}) for name, value in WRONG}
COLOURED = "\x1b[2J\x1b]0;x\x07\r\udcff"
RECORDS = {
    name: json.dumps({**PLAIN, **changed})
    for name, changed in {
        "a place": {"at": COLOURED},
        "a failure": {"end": "failed", "why": COLOURED},
        "an end": {"end": "ended", "call": 0, "why": COLOURED},
        "an agreement": {"agreed": COLOURED},
        "a process": {"process": process_name().rpartition(" ")[0] + COLOURED},
        "long": {"end": "failed", "why": "A" * 60_000},
    }.items()
}


class _Group:
    """As much of a process group as a heartbeat looks at."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def lost(*records: str | bytes) -> tuple[str, bool]:
    """What rank 0 raises that waits in vain where these are the other records; whether its thread lived. On a machine
    under load the thread may need longer to read them."""
    message, alive = _lost(records, 0.1)
    return _lost(records, 5.0) if "does not answer" in message else (message, alive)


def _lost(records: Sequence[str | bytes], patience: float) -> tuple[str, bool]:
    store, group = dist.HashStore(), _Group()
    presence = Presence(0, 2, group, store, 0.2)
    presence.heartbeat.patience = patience
    store.set("over", "1")
    for rank, record in enumerate(records, 1):
        store.set(str(rank), record)
    presence.enter("step 1")
    presence.waits = True
    time.sleep(0.1)
    error = presence.lost(PeerError("it did not come"))
    alive = presence.heartbeat.alive()
    presence.heartbeat.stop(1.0)
    return str(error), alive


@pytest.mark.parametrize("record", NO_RECORD.values(), ids=NO_RECORD)
def test_what_is_no_record_is_a_rank_without_one(record: str | bytes) -> None:
    message, alive = lost(record)
    assert alive
    assert message.startswith("rank 1 is missing: it has not called fzero yet\n"), message


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_record_is_shown_without_what_moves_a_cursor(record: str) -> None:
    message, alive = lost(record)
    assert alive
    assert message.startswith("rank 1")
    assert message.replace("\n", "").isprintable(), repr(message)
    assert len(message) < 3 * TEXT_CHARS


def test_a_rank_does_not_read_its_own_record_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another may have written it since: then no rank had one, and there was none to name."""
    plain = dist.HashStore.set
    monkeypatch.setattr(dist.HashStore, "set", lambda store, key, value: plain(store, key, "" if key == "0" else value))
    message, alive = lost("")
    assert alive
    assert "rank 0: waiting in step 1, for all ranks to agree on it (this rank is one)" in message


@pytest.mark.skipif(not process_name(), reason="needs /proc of Linux")
def test_what_became_of_a_process_of_this_machine() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        machine, namespace, *_ = process_name().split()
        name = f"{machine} {namespace} {child.pid} {_stat(child.pid)[1]}"
        assert fate(name) == fate(process_name()) == ""
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert fate(name) == "; its process is stopped (SIGSTOP, or a debugger)"
        assert "has ended" in fate(name[:-1] + "x"), "another of its number"
        child.kill()
        child.wait()
        assert "memory may have been short" in fate(name)
    rest = name.split()[2:]
    foreign = [
        f"elsewhere {namespace} {' '.join(rest)}",
        f"{machine} pid:[1] {' '.join(rest)}",
        f"{machine} {namespace}",
    ]
    foreign += [f"{machine} {namespace} ../1 5", f"{machine} {namespace} {'9' * 300} 5", "", "x"]
    assert [fate(other) for other in foreign] == [""] * 7


# --- several ranks of this process, over one store --------------------------------------------------------------------


@pytest.fixture
def ranks() -> Iterator[Callable[[int], list[Presence]]]:
    """Presences of a world whose ticks take a hundredth of a second."""
    made: list[Presence] = []
    groups: list[_Group] = []

    def start(world: int) -> list[Presence]:
        store = dist.HashStore()
        for rank in range(world):
            groups.append(_Group())
            presence = Presence(rank, world, groups[-1], store, 0.1)
            presence.heartbeat.patience = 0.3
            made.append(presence)
        return made

    yield start
    for presence in made:
        presence.heartbeat.stop(1.0)


def test_a_rank_that_failed_alone_is_named_to_those_that_wait_for_it(ranks: Any) -> None:
    waiting, failing, third = ranks(3)
    for presence in (waiting, failing, third):
        presence.enter("step 1")
        assert presence.call == 1
    waiting.waits = third.waits = True
    with pytest.raises(ZeroDivisionError), failing.running(lambda: 3, lambda: "op 3"):
        raise ZeroDivisionError("by zero")
    assert not failing.where.inside
    until = time.monotonic() + 5
    while not waiting.halted and time.monotonic() < until:
        time.sleep(0.01)
    assert waiting.halted == "rank 1 failed alone, in step 1, op 3: ZeroDivisionError: by zero"
    error = waiting.lost(PeerError("closed"))
    assert error.missing == (1,)
    assert "ranks 0, 2: waiting in step 1, for all ranks to agree on it (this rank is one)" in str(error)
    assert "this wait was ended" in str(error)
    assert waiting.lost(PeerError("again")) is error
    with pytest.raises(type(error), match=r"step 2: this process group was lost before \(rank 1 failed alone"):
        waiting.enter("step 2")
    failing.enter("step 2")
    assert failing.ending.phase is Phase.GOING, "it may come to a later call"


def test_an_error_without_words_is_its_name_alone() -> None:
    """The complaint: "(KeyboardInterrupt: )", of Ctrl-C."""
    one = Presence(0, 1)
    for error, why in ((KeyboardInterrupt(), "KeyboardInterrupt"), (ValueError("bad row"), "ValueError: bad row")):
        one._publish(Phase.ENDED, error)
        assert one.ending.why == why


def test_a_rank_that_failed_alone_and_comes_to_the_next_call_is_named_as_one_that_failed(ranks: Any) -> None:
    """It caught the error and goes on before the others have read that it failed: they wait in vain all the same."""
    waiting, failing = ranks(2)
    for presence in (waiting, failing):
        presence.enter("step 1")
    failing.heartbeat.published.wait(1)
    waiting.waits = True
    with pytest.raises(ValueError, match="bad row"), failing.running(lambda: 3, lambda: "op 3"):
        raise ValueError("bad row")
    failing.enter("step 1")
    failing.waits = True
    why = "failed alone, in step 1, op 3: ValueError: bad row"
    until = time.monotonic() + 5
    while not waiting.halted and time.monotonic() < until:
        time.sleep(0.01)
    assert waiting.halted == f"rank 1 {why}"
    error = waiting.lost(PeerError("closed"))
    assert str(error).startswith(f"rank 1 {why}\n")
    while not failing.halted and time.monotonic() < until:
        time.sleep(0.01)
    assert (
        failing.halted
        == "rank 0 waited in vain before, waiting in step 1, for all ranks to agree on it (this wait was ended)"
    )
    error = failing.lost(PeerError("closed"))
    assert (error.missing, str(error).partition("\n")[0]) == ((1,), f"rank 1 (this rank) {why}")


def test_a_rank_that_is_silent_is_told_from_one_that_is_busy(ranks: Any) -> None:
    waiting, busy, silent = ranks(3)
    for presence in (waiting, busy, silent):
        presence.enter("step 1")
    time.sleep(0.1)
    silent.heartbeat.stop(1.0)
    waiting.waits = True
    error = waiting.lost(PeerError("[x.cc:3] closed. More"))
    assert error.missing == (2,)
    assert "rank 2 is missing: it does not answer" in str(error)
    assert "The transport said: closed." in str(error)
    silent.heartbeat.thread = None
    other = busy.lost(PeerError("closed"))
    assert other.missing == (2,)


@pytest.mark.timeout(60, method="thread")  # it waits without end where nobody listens
def test_a_wait_for_what_others_do_ends_with_a_rank_that_is_silent(ranks: Any) -> None:
    one, other = ranks(2)
    for presence in (one, other):
        presence.enter("a plan")
    asked: list[float | None] = []

    def done(seconds: float | None) -> bool:
        asked.append(seconds)
        assert one.where.text(one.waits) == "in rank 0 plans, until all ranks have done their part"
        time.sleep(seconds or 0)
        return len(asked) == 3

    before = one.where
    one.wait_for(done, "rank 0 plans")
    assert len(asked) == 3
    assert one.where == before
    assert not one.heartbeat.listens
    other.heartbeat.stop(1.0)
    with pytest.raises(HangError, match="rank 1 is missing: it does not answer"):
        one.wait_for(lambda seconds: time.sleep(seconds), "rank 0 plans")  # type: ignore[arg-type, func-returns-value]
    alone = Presence(0, 1)
    asked.clear()
    alone.wait_for(lambda seconds: asked.append(seconds) or True, "it")
    assert asked == [None], "as long as it takes"


def test_an_error_of_a_peer_becomes_one_that_names_it(ranks: Any) -> None:
    one, other = ranks(2)
    for presence in (one, other):
        presence.enter("step 1")
    other.close()
    one.waits = True
    with pytest.raises(HangError, match="rank 1 is missing: its program ended"), one.running(lambda: 1, lambda: "op 1"):
        raise PeerError("closed")
    assert one.ending.phase is Phase.LOST


def test_a_place_in_words() -> None:
    where = Where()
    assert where.text(False) == "at the beginning"
    where = Where(2, "step 1")
    assert where.text(True) == "in the program's own code, after step 1"
    where = Where(2, "step 1", True)
    assert where.text(True) == "waiting in step 1, for all ranks to agree on it"
    assert where.text(False) == "in step 1, before its first op"
    where = Where(2, "step 1", True, op=lambda: "op 3")
    assert (where.text(True), where.text(False)) == ("waiting in step 1, op 3", "in step 1, op 3")
    assert len(Where(2, "step 1", True, op=lambda: "x" * 999).text(True)) == TEXT_CHARS


def test_a_call_has_a_name_and_an_end() -> None:
    presence = Presence(0, 1)
    presence.enter("step 1")
    presence.set_agreed("step 1")
    presence.rename("step 1, again")
    assert (presence.call, presence.call_name, presence.where.agreed, presence.where.inside) == (
        1, "step 1, again", "step 1", True
    )  # fmt: skip
    presence.leave()
    assert not presence.where.inside
    with presence.running(lambda: 4, lambda: "op 4"):
        assert (presence.where.position(), presence.where.op()) == (4, "op 4")
    assert (presence.where.position(), presence.where.op(), presence.where.inside) == (0, "", False)
    assert presence.heartbeat.thread is None, "alone, no thread is needed"


# --- what the main thread writes, and when ----------------------------------------------------------------------------


STATUS = RankStatus(**{**PLAIN, "end": Phase.GOING, "waits": True})


class Played:
    """A heartbeat that notes what it is asked for."""

    def __init__(self, alive: bool = True) -> None:
        self.runs, self.calls, self.patience, self.halted, self.holder = alive, list[Any](), 3.0, "", None
        self.store, self.statuses = "store", None

    def alive(self) -> bool:
        return self.runs

    def call_roll(self) -> Any:
        self.calls.append("call_roll")
        return self.statuses

    def __getattr__(self, call: str) -> Any:
        return lambda *given: self.calls.append((call, *given) if given else call)


def presence(alive: bool = True, world: int = 3) -> tuple[Presence, Played]:
    made = Presence(1, world)
    made.heartbeat = played = Played(alive)  # type: ignore[assignment]
    return made, played


def test_a_rank_that_fails_says_so_once() -> None:
    here, played = presence()
    here.enter("step 1")
    here.failed(ValueError("x" * 999))
    assert here.ending.phase is Phase.FAILED
    assert here.ending.why == ("ValueError: " + "x" * 999)[:TEXT_CHARS]
    assert here.ending.place == "in step 1, before its first op"
    here.failed(KeyError("another"))
    assert "ValueError" in here.ending.why, "the first is the cause"
    assert played.calls == ["start", "publish"]
    here.enter("step 2")
    assert here.ending == Ending(), "it may come to a later call"


def test_what_is_lost_stays_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    here, played = presence()
    asked: list[Any] = []
    monkeypatch.setattr(heartbeat.atexit, "register", asked.append)
    here.enter("step 1")
    played.statuses = ({0: None, 1: STATUS, 2: None}, set())
    error = here.lost(PeerError("[x.cc:3] closed by peer. More\nlines"))
    lost = Ending(Phase.LOST, "closed by peer", "waiting in step 1, for all ranks to agree on it")
    assert here.ending == lost
    assert "The transport said: closed by peer." in str(error)
    here.failed(ValueError("x"))
    here.close()
    assert here.ending == lost
    assert played.calls == ["start", "call_roll", ("stop", 1.0)]
    assert here.hang is error
    assert asked == [gc.freeze], "or the last collections of Python would take a second or two"


def test_a_thread_runs_in_a_world_of_two() -> None:
    here, played = presence(world=2)
    here.enter("step 1")
    assert played.calls == ["start"]


@pytest.mark.parametrize(("alive", "pid", "asks"), [(True, 0, True), (False, 0, False), (True, 1, False)])
def test_without_a_thread_and_in_a_fork_nothing_is_written(alive: bool, pid: int, asks: bool) -> None:
    here, played = presence(alive)
    here.pid = here.pid + pid
    here.failed(ValueError("x"))
    assert (here.ending.phase is Phase.FAILED) == asks
    assert ("publish" in played.calls) == asks
    played.calls.clear()
    here.close()
    assert [call[0] for call in played.calls] == ["stop"] * asks
    error = here.lost(PeerError("closed"))
    assert ("call_roll" in played.calls) == asks
    assert "the store of the process group does not answer" in str(error)


def test_at_its_end_a_program_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("last_exc", "last_value"):
        monkeypatch.delattr(sys, name, raising=False)
    here, played = presence()
    here.close()
    assert (here.ending.phase, here.ending.why) == (Phase.ENDED, "")
    assert played.calls == ["publish", ("stop", 3.0 + ANSWER_SECONDS)], "it lets the others read"
    monkeypatch.setattr(sys, "last_value", ValueError("x"), raising=False)
    here, _ = presence()
    here.close()
    assert here.ending.why == "ValueError: x"


def test_a_thread_runs_where_there_are_others_and_a_store() -> None:
    for world, store, starts in ((3, "store", True), (1, "store", False), (3, None, False)):
        here, played = presence(world=world)
        played.store = store
        here.enter("step 1")
        assert (played.calls == ["start"]) == starts
    here, _ = presence()
    here.ending = Ending(Phase.LEFT, "x")
    here.enter("step 2")
    assert here.ending.phase is Phase.LEFT


def test_a_wait_that_was_ended_is_said_to_be() -> None:
    here, played = presence()
    played.halted = "rank 0 failed"
    assert here.halted == "rank 0 failed"
    here.lost(PeerError("timed out"))
    assert here.ending.why == "this wait was ended"


class _Named(_Group):
    """A process group with a name."""

    def __init__(self, name: str) -> None:
        self.group_name = name


def test_each_group_has_a_presence_and_a_part_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may come again after its group was destroyed."""
    assert heartbeat.of() is heartbeat.ALONE, "without a process group"
    assert (heartbeat.ALONE.rank, heartbeat.ALONE.world_size, heartbeat.ALONE.waits) == (0, 1, False)
    store, world = dist.HashStore(), _Named("world")
    monkeypatch.setattr(heartbeat.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(heartbeat.dist, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(heartbeat.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(heartbeat.dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(heartbeat, "gloo_timeout", lambda group: 77.0)
    monkeypatch.setattr(heartbeat, "default_store", lambda: SimpleNamespace(clone=lambda: store))
    monkeypatch.setattr(heartbeat, "_NUM_MADE", {})
    here = heartbeat.of()
    assert (here.rank, here.world_size, here.timeout_seconds) == (1, 4, 77.0)
    assert heartbeat.of(None) is heartbeat.of(world) is here
    here.heartbeat.store.set("1", "x")
    again, other = _Named("world"), _Named("small")
    heartbeat.of(again).heartbeat.store.set("1", "y")
    heartbeat.of(other).heartbeat.store.set("1", "z")
    keys = [f"fzero/presence/{part}/1" for part in ("world/1", "world/2", "small/1")]
    assert store.check(keys), "it would be waited for"
    assert [store.get(key) for key in keys] == [b"x", b"y", b"z"]
    smaller = _Named("line")
    here.joins(smaller)
    assert heartbeat.of(smaller) is here, "a wait in it is one of this presence"
    assert here.heartbeat.groups[-1]() is smaller
    monkeypatch.setattr(heartbeat, "default_store", lambda: None)
    alone = _Named("alone")
    assert heartbeat.of(alone).heartbeat.store is None


def test_at_the_end_of_python_every_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    (here, played), (_, left) = presence(), presence()
    group = _Named("x")
    monkeypatch.setattr(heartbeat, "_PRESENCES", {group: here})
    monkeypatch.setattr(heartbeat, "STARTED", {left})
    heartbeat._ended()
    assert played.calls == ["publish", ("stop", 3.0 + ANSWER_SECONDS)]
    assert left.calls == [("stop", ANSWER_SECONDS)], "of a group that was destroyed"
