"""hang_report: the error that names the rank that did not come, from the records of all ranks.

Each rank writes a `RankStatus` of itself (`fzero.comm.heartbeat`). A rank that waited in vain reads the records of all
ranks twice. It calls a rank silent if that rank's record did not change in between. Then the missing ranks are the
first of these groups that is not empty:

1. ranks that failed alone in the middle of a call, for that error is the cause of all that follows;
2. ranks that are silent (stopped, killed, unreachable), that ended their program, or that left the process group;
3. ranks that answer but do not wait for anyone: they are stuck in a segment, or in the program's own code.

If every rank waits, none is missing: they wait in different places, and the error shows all of these places.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from fzero.errors import HangError, printable

MOST_BYTES = 1 << 16  # of a record; one of this program has some hundreds
TEXT_CHARS = 400  # of its texts
MOST = 1 << 60  # of its numbers


class Phase(StrEnum):
    """How far a rank's part in the process group has come. The values are those in the store."""

    GOING = ""
    FAILED = "failed"  # alone, in the middle of a call; its next call makes it GOING again, and the record keeps why
    LOST = "lost"  # it waited in vain and raised
    ENDED = "ended"  # its program ended
    LEFT = "left"  # the process group is gone from its process


@dataclass(frozen=True)
class RankStatus:
    """The last record that a rank wrote of itself. The field names are those in the store.

    beat: how many records it has written. time: its clock, in seconds since 1970. call: how many collective calls have
    begun. at: where it is, in words; seconds: for how long. waits: whether it waits for another rank. end: its Phase;
    why: the reason, if it ended. told: others need not answer it any more. agreed: the last call that all ranks agreed
    on, as far as it knows. process: see `process_name`. failed: the last call that the rank failed in alone, and where
    and why; it may be GOING since.
    """

    beat: int
    time: float
    call: int
    at: str
    seconds: float
    waits: bool
    end: Phase
    why: str
    told: bool
    agreed: str
    process: str = ""
    failed: int = 0
    failed_at: str = ""
    failed_why: str = ""

    def to_json(self) -> str:
        """The text for the store."""
        cut = {name: value[:TEXT_CHARS] if isinstance(value, str) else value for name, value in vars(self).items()}
        return json.dumps(cut)

    @staticmethod
    def from_json(text: bytes | str) -> RankStatus | None:
        """The inverse of `to_json`; None if the text is no record.

        Whoever reaches the store can write to it: each field has its type and range, and a text is printable.
        """
        try:
            content = json.loads(text if len(text) <= MOST_BYTES else "")
            return RankStatus(**{f.name: _checked(str(f.type), content[f.name]) for f in fields(RankStatus)})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def stops(self, call: int) -> bool:
        """Whether a rank that waits in `call` waits in vain for this rank.

        A rank that failed alone may still come to a later call, but not to that one again. A rank whose program ended
        has done its part in its last call.
        """
        if self.end == Phase.FAILED or self.failed == call:
            return call in (self.call, self.failed)
        return self.call <= call if self.end == Phase.LOST else self.call < call and self.end != Phase.GOING

    def read_in(self, calls: Collection[int]) -> RankStatus:
        """The record as those read it who wait in these calls: that of the rank's failure, if it failed in one."""
        if self.failed not in calls:
            return self
        return replace(self, end=Phase.FAILED, waits=False, at=self.failed_at, why=self.failed_why)


def _checked(kind: str, value: Any) -> Any:
    """The value of a record's field. Raises ValueError and TypeError if it is of another kind, or out of range."""
    allowed = {"int": (int,), "float": (int, float), "bool": (bool,)}.get(kind, (str,))
    if type(value) not in allowed:
        raise TypeError(kind)
    if isinstance(value, str):
        return Phase(value) if kind == "Phase" else printable(value[:TEXT_CHARS])
    if not 0 <= value <= MOST:
        raise ValueError(kind)
    return float(value) if kind == "float" else value


def hang_error(
    rank: int,
    statuses: Mapping[int, RankStatus | None],
    silent: Collection[int],
    cause: str,
    timeout_seconds: float,
    label: Callable[[int], str] = "rank {}".format,
) -> HangError:
    """Returns the error of `rank`, made from the last records of all ranks.

    statuses: None for a rank that never wrote one. silent: ranks whose record did not change. cause: the transport's
    message. label: a rank in words.
    """
    calls = {status.call for status in statuses.values() if status and status.end == Phase.LOST}
    statuses = {r: status and status.read_in(calls) for r, status in statuses.items()}
    missing = _missing(statuses, silent)
    newest = max((status for status in statuses.values() if status is not None), key=lambda status: status.call)
    names = {r: f"{label(r)}{' (this rank)' if r == rank else ''}" for r in missing}
    lines = [sentence(names[r], statuses[r], r in silent, newest) for r in missing]
    lost = {r: status for r, status in statuses.items() if status and status.end == Phase.LOST}
    if not missing and any(status.call < newest.call for status in lost.values()):
        gave_up = [r for r in lost if r != rank]
        lines = [f"{_ranks(gave_up)} waited in vain in an earlier call, and gave this process group up"]
    elif not missing:
        lines = ["every rank waits for another: they do not make the same calls, or one of them lost a message"]
    ranks_at: dict[str, list[int]] = {}
    for r, status in statuses.items():
        if r not in missing and status is not None:
            ranks_at.setdefault(status.at, []).append(r)
    for place, ranks in ranks_at.items():
        who = _ranks(ranks) if len(ranks) > 1 else label(ranks[0])
        lines.append(f"{who}: {place}{' (this rank is one)' if rank in ranks else ''}")
    lines.append(f"The transport said: {cause}. A rank is waited for {timeout_seconds:g} s (Spec(timeout=)).")
    lines.append("This process group cannot be used any more: start all ranks again, from the last checkpoint.")
    return HangError("\n  ".join(lines), missing)


def no_store(
    rank: int,
    holder: int | None,
    place: str,
    cause: str,
    known: str = "",
    label: Callable[[int], str] = "rank {}".format,
) -> HangError:
    """Returns the error of a rank whose store, in which all ranks write where they are, does not answer.

    holder: the rank whose process holds the store, if any. place: where this rank is. known: a reason that was learned
    before the store fell silent. label: a rank in words.
    """
    missing = () if holder is None else (holder,)
    if known:
        lines = [known]
    elif holder is None:
        lines = ["the store of the process group does not answer: its process or machine is stopped or gone"]
    else:
        lines = [
            f"{label(holder)} does not answer, nor does the store that its process keeps: it is stopped, or its "
            "process or machine is gone"
        ]
    lines += [
        f"{label(rank)}: {place} (this rank)",
        f"The transport said: {cause}. Where other ranks are is not known.",
    ]
    lines.append("This process group cannot be used any more: start all ranks again, from the last checkpoint.")
    return HangError("\n  ".join(lines), missing)


def not_come(rank: int, world_size: int, missing: Sequence[int], seconds: float, cause: str = "") -> HangError:
    """Returns the error of a rank that waited in vain for others to start the process group with it."""
    who = _ranks([*missing]) if missing else "some"
    their = "its process" if len(missing) == 1 else "their processes"
    return HangError(
        f"rank {rank}: {who} of {world_size} did not come within {seconds:g} s to start the process group"
        f"{f' ({cause})' if cause else ''}. What {their} printed has the first error. Start all ranks again, or give "
        "them more time: Spec(timeout=)",
        missing,
    )


def _missing(statuses: Mapping[int, RankStatus | None], silent: Collection[int]) -> tuple[int, ...]:
    ended = (Phase.ENDED, Phase.LEFT)
    failed = [r for r, status in statuses.items() if status is not None and status.end == Phase.FAILED]
    gone = [r for r, status in statuses.items() if r in silent or (status and status.end in ended)]
    busy = [r for r, status in statuses.items() if status and status.end == Phase.GOING and not status.waits]
    return tuple(failed or gone or busy)


def sentence(rank: str, status: RankStatus | None, silent: bool = False, newest: RankStatus | None = None) -> str:
    """Returns why others wait in vain for a rank, which is given in words.

    newest: the status of the rank that has made the most calls.
    """
    if status is None:
        return f"{rank} is missing: it has not called fzero yet"
    if status.end == Phase.FAILED:
        return f"{rank} failed alone, {status.at}: {status.why}"
    if status.end == Phase.LOST:
        return f"{rank} waited in vain before, {status.at}{f' ({status.why})' if status.why else ''}"
    if status.end != Phase.GOING:
        reason = "its program ended" if status.end == Phase.ENDED else "it left the process group"
        still = "; its process is still there: it runs what is left to do at its end (atexit)"
        still = still if status.end == Phase.ENDED and _state(status.process) not in ("", GONE) else ""
        return f"{rank} is missing: {reason}{f' ({status.why})' if status.why else ''}, {status.at}{still}"
    if silent:
        ago = max(time.time() - status.time, 0)
        later = newest.agreed if newest is not None and newest.agreed != status.agreed else ""
        since = f"; it has agreed on {later} since" if later else ""
        return (
            f"{rank} is missing: it does not answer, so it is stopped, or its process or machine is gone; "
            f"last heard of {ago:.1f} s ago, {status.at}{since}{fate(status.process)}"
        )
    return f"{rank} is missing: it answers, but has been for {status.seconds:.1f} s {status.at}"


def process_name() -> str:
    """This process, as others of its machine find it: machine, namespace, number, start. "" where /proc tells none.

    Machines that were made as copies of one that runs have one boot_id: their names differ."""
    try:
        machine = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}@{os.uname().nodename}"
        return f"{machine} {os.readlink('/proc/self/ns/pid')} {os.getpid()} {_stat(os.getpid())[1]}"
    except (OSError, IndexError):
        return ""


def fate(process: str) -> str:
    """What became of a process of this machine, as the end of a sentence; "" if nothing is known of it."""
    state = _state(process)
    if state == GONE:
        return (
            "; its process has ended without a word: it was killed, or crashed. If it printed nothing, memory may have "
            "been short: the kernel's log (dmesg) names what it killed for that"
        )
    return "; its process is stopped (SIGSTOP, or a debugger)" if state and state in "Tt" else ""


GONE = "X"


def _state(process: str) -> str:
    """The state of a process of this machine, as the kernel writes it; GONE if it has ended, "" if it is not known.

    A /proc that hides the processes of other users (hidepid) has no file of one that runs.
    """
    here, there = process_name().split(), process.split()
    if len(there) != 4 or here[:2] != there[:2] or not re.fullmatch("[1-9][0-9]{0,9}", there[2]):
        return ""
    try:
        state, start = _stat(int(there[2]))
        return GONE if state in "ZX" or start != there[3] else state
    except FileNotFoundError:
        return GONE if _unknown(int(there[2])) else ""
    except ProcessLookupError:
        return GONE
    except (OSError, IndexError):
        return ""


def _unknown(pid: int) -> bool:
    """Whether the kernel knows no process of this number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def _stat(pid: int) -> tuple[str, str]:
    """(state, start) of a process, as the kernel writes them. Raises OSError."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def _ranks(ranks: list[int]) -> str:
    """`ranks 0-3, 7`"""
    runs: list[list[int]] = []
    for r in sorted(ranks):
        if runs and r == runs[-1][-1] + 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
