"""heartbeat_thread: writes each tick where this rank is, reads where the others are, and ends waits in vain.

`fzero.comm.heartbeat` says why and when. The thread sees the main thread's part as an `OwnPart`. `Where` and `Ending`
are frozen and replaced as a whole, so it reads one moment.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fzero._torch_compat import store_holder
from fzero.comm.hang_report import TEXT_CHARS, Phase, RankStatus, process_name, sentence

TICK_SECONDS = 1.0
ANSWER_SECONDS = 2.0  # a rank that writes nothing for so long, and for two ticks and a half, is silent
WRITES_PER_SECOND = 256  # of all ranks, at most
POISON_TAG = 0x7FFFFFF1
STARTED: set[Heartbeat] = set()  # those whose thread runs, also after their group was destroyed


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
    """How the rank's part in the group ended: the reason, the place and the call. Phase.GOING: it has not ended."""

    phase: Phase = Phase.GOING
    why: str = ""
    place: str = ""
    call: int = 0


class OwnPart(Protocol):
    """What the thread reads of the rank's part in its group (`fzero.comm.heartbeat.Presence`)."""

    rank: int
    world_size: int
    timeout_seconds: float
    where: Where
    waits: bool
    ending: Ending
    failure: Ending
    label: Callable[[int], str]


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

    def __init__(self, presence: OwnPart, group: Any, store: Any) -> None:
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
            STARTED.add(self)
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
            STARTED.discard(self)

    def _place(self, where: Where, waits: bool) -> tuple[int, bool, int, bool]:
        return (where.call, where.inside, where.position(), waits)

    def _tell(self) -> None:
        """Writes this rank's record. Ends this rank's wait if it waits for a rank that will not come."""
        presence = self.presence
        ending, failure, waits, where = self.left or presence.ending, presence.failure, presence.waits, presence.where
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
            failed=failure.call, failed_at=failure.place, failed_why=failure.why,
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
                self.halted = sentence(presence.label(ended[0]), heard[ended[0]].read_in({where.call}))
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
