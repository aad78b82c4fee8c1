"""heartbeat: every rank writes where it is into the process group's store, so that a rank that waits can name another.

A thread of each rank sleeps. Once a tick (one second; longer in large worlds) it writes one `RankStatus` into the store
(`fzero.comm.hang_report`): the call that the rank is in, the op, whether the rank waits. It reads these from values
that the step writes anyway. So an op costs nothing, and a tick costs 0.03 to 0.1 ms of one core.

A rank whose process is not stopped keeps writing, even if its main thread is stuck. A rank whose wait ended badly (time
is up, a connection closed) does three things. It writes "lost". It reads the records of all ranks until each has
changed, or has stood still for two seconds; a rank that has waited for long reads them before, and knows at once. It
raises `HangError` with the result. Other ranks learn at their next tick that a rank failed or gave up. If
they wait for it in that call, in vain, their wait is ended. Over messages the thread lets a receive on the group time
out, and with gloo this ends all transfers of that group on this rank. Over shared memory the waiting rank looks at
`halted` itself.

The store must answer. torchrun's agent holds it; without torchrun, rank 0's process holds it. In that case a stopped
rank 0 is named because its store is silent, and rank 0 lets the others read before it raises.

Two threads, one writer for each field:

    Presence     the rank's main thread: `where`, `waits`, `ending`, `hang`
    Heartbeat    its own thread: `beat`, `halted`, `statuses`, `answered_at` and the rest

Each reads the fields of the other. `Where` and `Ending` are frozen and replaced as a whole, so a reader sees one
moment. Events carry requests and answers between the two.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fzero._torch_compat import default_store, gloo_timeout, store_holder
from fzero.comm.hang_report import TEXT_CHARS, Phase, RankStatus, hang_error, no_store, process_name, sentence
from fzero.errors import FzeroError, HangError, PeerError

TICK_SECONDS = 1.0
ANSWER_SECONDS = 2.0  # a rank that writes nothing for so long, and for two ticks and a half, is silent
WRITES_PER_SECOND = 256  # of all ranks, at most
POISON_TAG = 0x7FFFFFF1
SOURCE = re.compile(r"^\[[^]]*\.cc:\d+\] ")  # gloo's messages begin with it


@dataclass(frozen=True)
class Where:
    """Where the main thread of a rank is. Only the main thread makes a new one.

    call: how many collective calls have begun. name: the name of the last one. inside: whether it goes on. agreed: the
    last call that all ranks agreed on, as far as this rank knows. position, op: return the number and the text of the
    op that runs; outside of an op loop they return 0 and "".
    """

    call: int = 0
    name: str = ""
    inside: bool = False
    agreed: str = ""
    position: Callable[[], int] = int
    op: Callable[[], str] = str

    def text(self, waits: bool) -> str:
        """The place in words, at most TEXT_CHARS long if it names an op."""
        if not self.inside:
            return f"in the program's own code, after {self.name}" if self.name else "at the beginning"
        op = self.op()
        if waits and not op:
            return f"waiting in {self.name}, for all ranks to agree on it"
        return f"{'waiting ' if waits else ''}in {self.name}, {op or 'before its first op'}"[:TEXT_CHARS]


@dataclass(frozen=True)
class Ending:
    """How the rank's part in the group ended: the reason and the place. Phase.GOING: it has not ended."""

    phase: Phase = Phase.GOING
    why: str = ""
    place: str = ""


class Presence:
    """This rank's part in one process group, as the main thread writes it.

    `enter` and `leave` frame a collective call; `running` frames its op loop. Transports set `waits` while they wait
    for another rank; it is a field of its own because a new `Where` per wait would cost microseconds.

    label: a rank in words, with its coordinates on a mesh of several axes.

    Only the main thread writes the fields here; the heartbeat's thread reads `where`, `waits` and `ending`. Once `hang`
    is set, every later `enter` raises.
    """

    def __init__(
        self, rank: int, world_size: int, group: Any = None, store: Any = None, timeout: float = 1800.0
    ) -> None:
        self.rank, self.world_size, self.timeout_seconds = rank, world_size, timeout
        self.where, self.waits, self.ending = Where(), False, Ending()
        self.hang: HangError | None = None
        self.label: Callable[[int], str] = "rank {}".format
        self.pid = os.getpid()
        self.heartbeat = Heartbeat(self, group, store)

    @property
    def call(self) -> int:
        """The number of collective calls that have begun."""
        return self.where.call

    @property
    def call_name(self) -> str:
        """The name of the last collective call."""
        return self.where.name

    @property
    def halted(self) -> str:
        """Why this rank waits in vain, in words; "" if no reason is known."""
        return self.heartbeat.halted

    def enter(self, call_name: str) -> None:
        """Begins a collective call. Raises HangError if this group was lost before."""
        if self.hang is not None:
            first = str(self.hang).partition("\n")[0]
            raise HangError(
                f"{call_name}: this process group was lost before ({first}). Start all ranks again", self.hang.missing
            )
        if self.ending.phase in (Phase.GOING, Phase.FAILED):
            self.ending = Ending()
        self.where = replace(self.where, call=self.where.call + 1, name=call_name, inside=True)
        if self.heartbeat.store is not None and self.world_size > 1:
            self.heartbeat.start()

    def leave(self) -> None:
        """Ends the call: the program's own code comes next."""
        self.where = replace(self.where, inside=False)

    def rename(self, call_name: str) -> None:
        """Gives the call that goes on another name."""
        self.where = replace(self.where, name=call_name)

    def joins(self, group: Any) -> None:
        """Takes in a smaller process group: a wait in it is a wait of this presence, and is ended with it."""
        _PRESENCES[group] = self
        self.heartbeat.groups.append(weakref.ref(group))

    def set_agreed(self, call_name: str) -> None:
        """Records that all ranks agreed on a call."""
        self.where = replace(self.where, agreed=call_name)

    @contextmanager
    def running(self, position: Callable[[], int] = int, where: Callable[[], str] = str) -> Iterator[None]:
        """Frames the transfers of a call, and ends the call. `position` and `where` return the op's number and text.

        If a peer does not come, the error becomes HangError. Any other error of this rank is written for the ranks that
        wait for it, and raised again.
        """
        self.where = replace(self.where, position=position, op=where)
        try:
            yield
        except PeerError as error:
            raise self.lost(error) from error
        except BaseException as error:
            self.failed(error)
            raise
        finally:
            self.where = replace(self.where, position=int, op=str, inside=False)

    def lost(self, error: BaseException) -> FzeroError:
        """Returns the error to raise after a wait ended badly. Takes some ticks.

        Writes that this rank is out, and asks where the other ranks are.
        """
        if self.hang is None:
            atexit.register(gc.freeze)  # the last collections of Python, with torch's objects, take a second or two
            cause = SOURCE.sub("", str(error).strip()).partition("\n")[0].partition(". ")[0][:TEXT_CHARS]
            cause = "this wait was ended" if self.halted else cause
            self.ending = Ending(Phase.LOST, cause, self.where.text(waits=True))
            statuses = self.heartbeat.call_roll() if self._alive() else None
            if statuses is not None:
                self.hang = hang_error(self.rank, *statuses, cause, self.timeout_seconds, self.label)
            else:
                self.hang = no_store(
                    self.rank, self.heartbeat.holder, self.ending.place, cause, self.halted, self.label
                )
        return self.hang

    def wait_for(self, done: Callable[[float | None], bool], what: str) -> None:
        """Returns once `done(seconds)`, which waits for so long (None: for as long as it takes), has returned True.

        For what a thread does together with threads of the other ranks. However long that takes, a rank that is silent
        for the timeout meanwhile ends the wait: HangError.
        """
        if not self._alive():
            done(None)
            return
        before, began = self.where, time.monotonic()
        self.where = replace(before, name=what, inside=True, op=lambda: "until all ranks have done their part")
        self.heartbeat.listens = True
        try:
            while not done(self.heartbeat.tick):
                if silent := self.heartbeat.silent(began, self.timeout_seconds):
                    raise self.lost(PeerError(f"{what} waits for {self.label(silent[0])}, which is silent"))
        finally:
            self.heartbeat.listens, self.where = False, before

    def failed(self, error: BaseException) -> None:
        """Writes that this rank failed in the middle of a call, alone as far as it knows."""
        if self.ending.phase is Phase.GOING and self._alive():
            self._publish(Phase.FAILED, error)

    def close(self) -> None:
        """Writes that the program ends, and stops the thread."""
        if self._alive():
            if self.ending.phase is Phase.GOING:
                self._publish(Phase.ENDED, getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))
            self.heartbeat.stop(self.heartbeat.patience + ANSWER_SECONDS if self.hang is None else 1.0)

    def _publish(self, phase: Phase, error: BaseException | None) -> None:
        why = f"{type(error).__name__}: {error}"[:TEXT_CHARS] if error is not None else ""
        self.ending = Ending(phase, why, self.where.text(waits=False))
        self.heartbeat.publish()

    def _alive(self) -> bool:
        return self.heartbeat.alive() and os.getpid() == self.pid


@dataclass(frozen=True)
class Heard:
    """The last record that was read of another rank; None if it never wrote one. at: when it was first read (seconds of
    time.monotonic). news: whether another one was read before it."""

    status: RankStatus | None
    at: float
    news: bool

    @property
    def ended(self) -> bool:
        """Whether the rank will write no more, and says so."""
        return self.status is not None and self.status.end is not Phase.GOING


Statuses = tuple[dict[int, RankStatus | None], set[int]]  # the last record of each rank; the ranks that were silent


class Heartbeat:
    """The thread that writes this rank's record each tick, reads those of the other ranks, and ends waits in vain.

    The main thread calls the public methods, sets `listens` (whether the records of the others are read each tick), and
    adds to `groups`: the presence's group first, if it has one, then the smaller ones. Only the heartbeat's own thread,
    which runs the private ones, writes `beat` (records written), `answered_at` (when the store last answered, in
    seconds of time.monotonic), `halted` (why a wait was ended), `own` and `heard` (the last record of this rank, and of
    each other), `statuses` (the result of the roll call), `left` (set when the group is gone), `told` (the others need
    not answer this rank any more), and `last` and `since` (the place last seen, and since when). `wake` and `stopped`
    are set by the main thread; `published` and `answered` by this one.
    """

    def __init__(self, presence: Presence, group: Any, store: Any) -> None:
        """Prepares the thread; `start` starts it."""
        self.presence, self.store = presence, store
        self.groups: list[Callable[[], Any]] = [weakref.ref(group) if group is not None else lambda: None]
        self.tick = max(min(TICK_SECONDS, presence.timeout_seconds / 10), presence.world_size / WRITES_PER_SECOND)
        self.patience = max(2.5 * self.tick, ANSWER_SECONDS)
        self.holder = store_holder(store) if store is not None else None
        self.process = process_name()
        self.thread: threading.Thread | None = None
        self.wake, self.stopped = threading.Event(), threading.Event()
        self.published, self.answered = threading.Event(), threading.Event()
        self.beat, self.told, self.halted = 0, False, ""
        self.answered_at = self.since = time.monotonic()
        self.last: tuple[int, bool, int, bool] | None = None
        self.left: Ending | None = None
        self.listens = False
        self.heard: dict[int, Heard] = {}
        self.own: RankStatus | None = None
        self.statuses: Statuses | None = None

    # --- for the main thread

    def start(self) -> None:
        """Starts the thread, once."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._live, name="fzero presence", daemon=True)
            _STARTED.add(self)
            self.thread.start()

    def alive(self) -> bool:
        """Whether the thread runs."""
        return self.thread is not None and self.thread.is_alive()

    def publish(self) -> None:
        """Has the presence's ending written; waits at most ANSWER_SECONDS for it."""
        self.published.clear()
        self.wake.set()
        self.published.wait(ANSWER_SECONDS)

    def call_roll(self) -> Statuses | None:
        """Returns the statuses of all ranks, read after this rank was lost; None if the store does not answer."""
        self.wake.set()
        while not self.answered.wait(self.tick) and time.monotonic() < self.answered_at + self.patience + self.tick:
            pass
        return self.statuses

    def silent(self, began: float, seconds: float) -> list[int]:
        """The ranks that have been silent for so many seconds since `began` (of time.monotonic) while `listens`."""
        now = time.monotonic()
        heard = list(self.heard.items())
        return [r for r, last in heard if not last.ended and now - max(last.at, began) >= seconds]

    def stop(self, seconds: float) -> None:
        """Ends the thread; waits for it at most `seconds`."""
        self.stopped.set()
        self.wake.set()
        if self.thread is not None:
            self.thread.join(seconds)

    # --- in the thread

    def _live(self) -> None:
        """Runs in the thread: writes the record once a tick, answers the roll call, and lets others read at the end."""
        try:
            while not self.stopped.is_set() and self.left is None:
                if self.groups[0]() is None and self.presence.ending.phase is Phase.GOING:
                    self.left = Ending(Phase.LEFT, place=self.presence.where.text(waits=False))
                self._tell()
                if self.presence.ending.phase is Phase.LOST and self.statuses is None:
                    self.statuses = self._roll_call()
                    self.answered.set()
                if not self.stopped.is_set() and self.left is None:
                    self.wake.wait(self.tick)
                    self.wake.clear()
            if self.presence.ending.phase in (Phase.FAILED, Phase.ENDED):
                self._let_read(set(range(self.presence.world_size)))
        except Exception:  # the store is gone: the main thread finds no answer
            self.answered.set()
            self.published.set()
        finally:
            _STARTED.discard(self)

    def _place(self, where: Where, waits: bool) -> tuple[int, bool, int, bool]:
        return (where.call, where.inside, where.position(), waits)

    def _tell(self) -> None:
        """Writes this rank's record. Ends this rank's wait if it waits for a rank that will not come."""
        presence = self.presence
        ending, waits, where = self.left or presence.ending, presence.waits, presence.where
        place = self._place(where, waits)
        now = time.monotonic()
        stays = place == self.last
        if not stays:
            self.last, self.since = place, now
        self.beat += 1
        status = RankStatus(
            beat=self.beat, time=time.time(), call=where.call, at=ending.place or where.text(waits),
            seconds=now - self.since, waits=waits or ending.phase is Phase.LOST, end=ending.phase, why=ending.why,
            told=self.told, agreed=where.agreed, process=self.process,
        )  # fmt: skip
        self.own = status
        self.store.set(str(presence.rank), status.to_json())
        if ending.phase is not Phase.GOING:
            self.store.set("over", "1")
            self.published.set()
        elif self.listens:
            self._listen()
        elif waits and stays and not self.halted:
            over = self.store.check(["over"])
            if over or now - self.since > presence.timeout_seconds - self.patience - 2 * self.tick:
                self._listen()  # before the time is up: the roll call knows then who has been silent
            heard = {r: other.status for r, other in self.heard.items() if over and other.status is not None}
            ended = [r for r, other in heard.items() if other.stops(where.call)]
            if ended and place == self._place(presence.where, presence.waits):
                self.halted = sentence(presence.label(ended[0]), heard[ended[0]])
                self._poison()
        self.answered_at = time.monotonic()

    def _read(self, ranks: set[int]) -> dict[int, RankStatus | None]:
        """The last record of each of these ranks; None if it never wrote one."""
        texts = {r: self.store.get(str(r)) if self.store.check([str(r)]) else "" for r in sorted(ranks)}
        self.answered_at = time.monotonic()
        return {r: RankStatus.from_json(text) for r, text in texts.items()}

    def _listen(self) -> None:
        """Reads the records of the others, and notes those that are new."""
        for r, status in self._read(set(range(self.presence.world_size)) - {self.presence.rank}).items():
            before = self.heard.get(r)
            if before is None or status != before.status:
                self.heard[r] = Heard(status, time.monotonic(), before is not None)

    def _roll_call(self) -> Statuses:
        """The last record of every rank, and the ranks that were silent. Takes at most `patience` and a read: a tick
        where the others were listened to before."""
        began = time.monotonic()
        while True:
            self._tell()
            self._listen()
            now = time.monotonic()
            answers = {r for r, heard in self.heard.items() if heard.ended or (heard.news and heard.at > began)}
            silent = {r for r, heard in self.heard.items() if now - heard.at >= self.patience} - answers
            undecided = {*self.heard} - answers - silent
            if not undecided or self.stopped.is_set():
                break
            time.sleep(self.tick / 4)
        self.told = True
        self._tell()
        statuses = {r: heard.status for r, heard in self.heard.items()} | {self.presence.rank: self.own}
        self._let_read({r for r, status in statuses.items() if status is not None and status.waits} - silent)
        return dict(sorted(statuses.items())), silent | undecided

    def _let_read(self, ranks: set[int]) -> None:
        """If this process holds the store: waits, for at most `patience`, until these ranks have read or ended."""
        ranks = ranks - {self.presence.rank} if self.holder == self.presence.rank else set()
        until = time.monotonic() + self.patience
        while ranks and time.monotonic() < until:
            time.sleep(self.tick / 4)
            statuses = self._read(ranks)
            ranks = {
                r
                for r in ranks
                if (now := statuses[r]) is not None and not now.told and now.end in (Phase.GOING, Phase.LOST)
            }

    def _poison(self) -> None:
        """Ends the waits of this rank in its groups. A receive that nobody sends to times out, and gloo with it."""
        for group in filter(None, [group() for group in self.groups]):
            for peer in range(group.size()):
                if peer != group.rank():
                    with suppress(RuntimeError, ValueError):
                        work = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=POISON_TAG)
                        if work is not None:
                            work.wait(timedelta(milliseconds=1))


ALONE = Presence(0, 1)
_PRESENCES: weakref.WeakKeyDictionary[Any, Presence] = (
    weakref.WeakKeyDictionary()
)  # torch keeps its groups the same way
_STARTED: set[Heartbeat] = set()  # those whose thread runs, also after their group was destroyed
_NUM_MADE: dict[str, int] = {}  # presences by group name: a name may come again after its group was destroyed


def of(group: Any = None) -> Presence:
    """Returns this rank's presence in a process group (None: the default group); `ALONE` if there is no group.

    The first call for a group makes it. All ranks do that at the same call.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    group = dist.group.WORLD if group is None else group
    if group not in _PRESENCES:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        number = _NUM_MADE[group.group_name] = _NUM_MADE.get(group.group_name, 0) + 1
        store = default_store()
        if store is not None:  # a connection of its own: the other one may be in use for long
            store = dist.PrefixStore(f"fzero/presence/{group.group_name}/{number}", store.clone())
        _PRESENCES[group] = Presence(rank, world_size, group, store, gloo_timeout(group))
    return _PRESENCES[group]


def _ended() -> None:
    """Ends every thread while Python is whole: one in the store when Python ends aborts the process (SIGABRT)."""
    for presence in list(_PRESENCES.values()):
        presence.close()
    for heartbeat in list(_STARTED):
        heartbeat.stop(ANSWER_SECONDS)


atexit.register(_ended)
