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

    Presence     the rank's main thread: `where`, `waits`, `ending`, `failure`, `hang`
    Heartbeat    its own thread (`heartbeat_thread`): `beat`, `halted`, `statuses`, `answered_at` and the rest

Each reads the fields of the other. `Where` and `Ending` are frozen and replaced as a whole, so a reader sees one
moment. Events carry requests and answers between the two.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from fzero._torch_compat import default_store, gloo_timeout
from fzero.comm.hang_report import TEXT_CHARS, Phase, hang_error, no_store
from fzero.comm.heartbeat_thread import ANSWER_SECONDS, STARTED, Ending, Heartbeat, Where
from fzero.errors import FzeroError, HangError, PeerError, named

SOURCE = re.compile(r"^\[[^]]*\.cc:\d+\] ")  # gloo's messages begin with it


class Presence:
    """This rank's part in one process group, as the main thread writes it.

    `enter` and `leave` frame a collective call; `running` frames its op loop. Transports set `waits` while they wait
    for another rank; it is a field of its own because a new `Where` per wait would cost microseconds.

    label: a rank in words, with its coordinates on a mesh of several axes.

    Only the main thread writes the fields here; the heartbeat's thread reads `where`, `waits`, `ending` and `failure`
    (the last ending of a call that failed alone, which a later call does not undo for those that wait in that one).
    Once `hang` is set, every later `enter` raises.
    """

    def __init__(
        self, rank: int, world_size: int, group: Any = None, store: Any = None, timeout: float = 1800.0
    ) -> None:
        self.rank, self.world_size, self.timeout_seconds = rank, world_size, timeout
        self.where, self.waits, self.ending, self.failure = Where(), False, Ending(), Ending()
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
        why = named(error)[:TEXT_CHARS] if error is not None else ""
        self.ending = Ending(phase, why, self.where.text(waits=False), self.where.call)
        self.failure = self.ending if phase is Phase.FAILED else self.failure
        self.heartbeat.publish()

    def _alive(self) -> bool:
        return self.heartbeat.alive() and os.getpid() == self.pid


ALONE = Presence(0, 1)
_PRESENCES: weakref.WeakKeyDictionary[Any, Presence] = (
    weakref.WeakKeyDictionary()
)  # torch keeps its groups the same way
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


def made(group: Any = None) -> Presence:
    """The presence that `of` has made, else `ALONE`: it makes none, which takes the other ranks."""
    return of(group) if group is None or group in _PRESENCES else ALONE


def _ended() -> None:
    """Ends every thread while Python is whole: one in the store when Python ends aborts the process (SIGABRT)."""
    for presence in list(_PRESENCES.values()):
        presence.close()
    for heartbeat in list(STARTED):
        heartbeat.stop(ANSWER_SECONDS)


atexit.register(_ended)
