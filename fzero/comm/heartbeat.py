"""heartbeat: where every rank is, told through the process group's store, so that a rank that waits can say for whom.

A thread of each rank sleeps, and once a tick (a second; longer in large worlds) writes one `Record` into the store
(`fzero.comm.hang_report`): the call that the rank is in, the op, whether it waits. It reads that from integers that the
step writes anyway: an op costs nothing, a tick 0.03 to 0.1 ms of one core.

A rank that is not stopped keeps telling, whatever its main thread does. So a rank whose wait ended badly (time up,
connection closed) tells "lost", reads all records twice, two seconds apart, and raises `HangError` with what it found.
Others learn of a rank that failed or gave up at their next tick: if they wait in that call, in vain, their wait is
ended: the thread lets a receive on the group time out, which with gloo ends all of that group on this rank; over
shared memory the waiting rank looks at `halted` itself.

The store must answer: torchrun's agent holds it, or rank 0's process where no torchrun is; then a stopped rank 0 is
named by its store's silence, and rank 0 lets the others read before it raises.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fzero._torch_compat import default_store, gloo_timeout, store_holder
from fzero.comm.hang_report import Record, hang_error, no_store, sentence
from fzero.errors import FzeroError, HangError, PeerError

TICK_SECONDS = 1.0
ANSWER_SECONDS = 2.0  # a rank that tells nothing for so long, and for two ticks and a half, is silent
WRITES_PER_SECOND = 256  # of all ranks, at most
POISON_TAG = 0x7FFFFFF1
TEXT_CHARS = 400
SOURCE = re.compile(r"^\[[^]]*\.cc:\d+\] ")  # before what gloo says


class Presence:
    """This rank's presence in one process group. `enter` and `leave` frame a collective call, `running` its op loop;
    transports set `waits` while they wait for another rank."""

    def __init__(
        self, rank: int, world_size: int, group: Any = None, store: Any = None, timeout: float = 1800.0
    ) -> None:
        self.rank, self.world_size, self.store, self.timeout_seconds = rank, world_size, store, timeout
        self.group: Callable[[], Any] = weakref.ref(group) if group is not None else lambda: None
        self.tick = max(min(TICK_SECONDS, timeout / 10), world_size / WRITES_PER_SECOND)
        self.holder = store_holder(store) if store is not None else None
        self.call, self.what, self.agreed, self.inside, self.waits = 0, "", "", False, False
        self.where: Callable[[], str] = str  # the op that runs, as text
        self.position: Callable[[], int] = int
        self.end = self.why = self.at = self.halted = ""
        self.told = self.asked = False
        self.hang: HangError | None = None
        self.thread: threading.Thread | None = None
        self.wake, self.published, self.answered = threading.Event(), threading.Event(), threading.Event()
        self.stop, self.beat, self.heard, self.pid = False, 0, time.monotonic(), os.getpid()
        self.last: Any = None
        self.since = time.monotonic()
        self.found: tuple[dict[int, Record | None], set[int]] | None = None

    # --- the rank's own thread

    def enter(self, what: str) -> None:
        """A collective call begins. Raises HangError where this group was lost before."""
        if self.hang is not None:
            first = str(self.hang).partition("\n")[0]
            raise HangError(
                f"{what}: this process group was lost before ({first}). Start all ranks again", self.hang.missing
            )
        if self.end in ("", "failed"):
            self.end = self.why = self.at = ""
        self.call, self.what, self.inside = self.call + 1, what, True
        if self.thread is None and self.store is not None and self.world_size > 1:
            self.thread = threading.Thread(target=self._live, name="fzero presence", daemon=True)
            self.thread.start()

    def leave(self) -> None:
        """The call is over: what comes is the program's own code."""
        self.inside = False

    @contextmanager
    def running(self, position: Callable[[], int] = int, where: Callable[[], str] = str) -> Iterator[None]:
        """The transfers of a call; `position` and `where` give the op. A peer that does not come becomes HangError; any
        other error of this rank is told to those who wait for it."""
        self.position, self.where = position, where
        try:
            yield
        except PeerError as error:
            raise self.lost(error) from error
        except BaseException as error:
            self.failed(error)
            raise
        finally:
            self.position, self.where, self.inside = int, str, False

    def lost(self, error: BaseException) -> FzeroError:
        """The error to raise where a wait ended badly; tells the others that this rank is out, and asks where they are.
        Takes some ticks."""
        if self.hang is None:
            cause = SOURCE.sub("", str(error).strip()).partition("\n")[0].partition(". ")[0][:TEXT_CHARS]
            cause = "this wait was ended" if self.halted else cause
            self.at = self._text(waits=True)
            self.why, self.end, self.asked = cause, "lost", True
            if self._alive():
                self.wake.set()
                while not self.answered.wait(self.tick) and time.monotonic() < self.heard + self._patience + self.tick:
                    pass
            if self.found is not None:
                self.hang = hang_error(self.rank, *self.found, cause, self.timeout_seconds)
            else:
                self.hang = no_store(self.rank, self.holder, self.at, cause, self.halted)
        return self.hang

    def failed(self, error: BaseException) -> None:
        """This rank alone, as far as it knows, failed in the middle of a call."""
        if self.end or not self._alive():
            return
        self.at = self._text(waits=False)
        self.why = f"{type(error).__name__}: {error}"[:TEXT_CHARS]
        self._publish("failed")

    def close(self) -> None:
        """The program ends."""
        if self._alive() and os.getpid() == self.pid:
            if not self.end:
                error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
                self.at = self._text(waits=False)
                self.why = f"{type(error).__name__}: {error}"[:TEXT_CHARS] if error is not None else ""
                self._publish("ended")
            self.stop = True
            self.wake.set()
            self.thread.join(self._patience + ANSWER_SECONDS if self.hang is None else 1.0)  # type: ignore[union-attr]

    def _publish(self, end: str) -> None:
        self.published.clear()
        self.end = end
        self.wake.set()
        self.published.wait(ANSWER_SECONDS)

    def _alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive() and os.getpid() == self.pid

    @property
    def _patience(self) -> float:
        return max(2.5 * self.tick, ANSWER_SECONDS)

    def _text(self, waits: bool) -> str:
        """Where this rank is."""
        if not self.inside:
            return f"in the program's own code, after {self.what}" if self.what else "at the beginning"
        op = self.where()
        if waits and not op:
            return f"waiting in {self.what}, for all ranks to agree on it"
        return f"{'waiting ' if waits else ''}in {self.what}, {op or 'before its first op'}"[:TEXT_CHARS]

    # --- the thread

    def _live(self) -> None:
        try:
            while not self.stop:
                if self.group() is None and not self.end:
                    self.at, self.end, self.stop = self._text(waits=False), "left", True
                self._tell()
                if self.asked and self.found is None:
                    self.found = self._roll_call()
                    self.answered.set()
                if not self.stop:
                    self.wake.wait(self.tick)
                    self.wake.clear()
            if self.end in ("failed", "ended"):
                self._let_read(set(range(self.world_size)))
        except Exception:  # the store is gone: who asks finds no answer
            self.answered.set()
            self.published.set()

    def _tell(self) -> None:
        """Writes this rank's record; looks whether it waits for a rank that will not come."""
        end, waits = self.end, self.waits
        place = (self.call, self.inside, self.position(), waits)
        now = time.monotonic()
        stays = place == self.last
        if not stays:
            self.last, self.since = place, now
        self.beat += 1
        at = (self.at if end else "") or self._text(waits)
        record = Record(
            beat=self.beat, time=time.time(), call=self.call, at=at, seconds=now - self.since,
            waits=waits or end == "lost", end=end, why=self.why, told=self.told, agreed=self.agreed,
        )  # fmt: skip
        self.store.set(str(self.rank), record.to_json())
        if end:
            self.store.set("over", "1")
            self.published.set()
        elif waits and stays and not self.halted and self.store.check(["over"]):
            records = self._records(set(range(self.world_size)) - {self.rank})
            ended = [r for r, found in records.items() if found is not None and found.stops(place[0])]
            if ended and place == (self.call, self.inside, self.position(), self.waits):
                self.halted = sentence(ended[0], records[ended[0]])
                self._poison()
        self.heard = time.monotonic()

    def _records(self, ranks: set[int]) -> dict[int, Record | None]:
        found = {r: self.store.get(str(r)) if self.store.check([str(r)]) else "" for r in sorted(ranks)}
        self.heard = time.monotonic()
        return {r: Record.from_json(text) for r, text in found.items()}

    def _roll_call(self) -> tuple[dict[int, Record | None], set[int]]:
        """Everyone's last record, and who was silent."""
        first = self._records(set(range(self.world_size)))
        records, silent = dict(first), set(first) - {self.rank}
        until = time.monotonic() + self._patience
        while silent and time.monotonic() < until and not self.stop:
            time.sleep(self.tick / 4)
            self._tell()
            for r, now in self._records(silent).items():
                before = first[r]
                if now is not None and (now.end or before is None or now.beat > before.beat):
                    records[r] = now
                    silent.discard(r)
        self.told = True
        self._tell()
        self._let_read({r for r, record in records.items() if record is not None and record.waits} - silent)
        return records, silent

    def _let_read(self, ranks: set[int]) -> None:
        """Where this process holds the store: waits a little until these ranks have read what they need, or ended."""
        ranks = ranks - {self.rank} if self.holder == self.rank else set()
        until = time.monotonic() + self._patience
        while ranks and time.monotonic() < until:
            time.sleep(self.tick / 4)
            ended = self._records(ranks)
            ranks = {r for r in ranks if (now := ended[r]) is not None and not now.told and now.end in ("", "lost")}

    def _poison(self) -> None:
        """Ends what this rank waits for in the group: a receive that nobody sends to times out, and gloo with it."""
        group = self.group()
        for peer in range(self.world_size):
            if group is not None and peer != self.rank:
                with suppress(RuntimeError, ValueError):
                    work = dist.irecv(torch.empty(1), group=group, group_src=peer, tag=POISON_TAG)
                    if work is not None:
                        work.wait(timedelta(milliseconds=1))


ALONE = Presence(0, 1)
_KNOWN: weakref.WeakKeyDictionary[Any, Presence] = weakref.WeakKeyDictionary()  # torch keeps its groups the same way
_MADE: dict[str, int] = {}


def of(group: Any = None) -> Presence:
    """The presence of this rank in a process group (None: the default one). All ranks make it at the same call."""
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    group = dist.group.WORLD if group is None else group
    if group not in _KNOWN:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        number = _MADE[group.group_name] = _MADE.get(group.group_name, 0) + 1
        store = default_store()
        if store is not None:  # a connection of its own: the other one may be in use for long
            store = dist.PrefixStore(f"fzero/presence/{group.group_name}/{number}", store.clone())
        _KNOWN[group] = Presence(rank, world_size, group, store, gloo_timeout(group))
    return _KNOWN[group]


def _ended() -> None:
    for one in list(_KNOWN.values()):
        one.close()


atexit.register(_ended)
