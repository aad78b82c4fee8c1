"""hang_report: what ranks that waited in vain know of one another, and the error that names who did not come.

Each rank tells a `Record` of itself (`fzero.comm.heartbeat`). Whoever waited in vain reads those of all ranks twice
and calls a rank silent whose record stood still in between. Then, in this order, those are missing that

1. failed alone in the middle of a call, for that error is the cause of all that follows;
2. are silent (stopped, killed, unreachable), ended their program, or left the process group;
3. answer but do not wait for anyone: stuck in a segment, or in the program's own code.

Where every rank waits none is missing: they wait in different places, and all of these are shown.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass

from fzero.errors import HangError


@dataclass(frozen=True)
class Record:
    """What a rank told last. `beat` counts its records, `time` is its clock, `call` counts its collective calls. `at`
    is where it is, for `seconds`. `end` is "" while it goes on, "failed" (alone, in this call), "lost" (it waited in
    vain and raised), "ended" (its program) or "left" (the process group), with `why`; `told`: others need not answer
    it any more. `agreed` is the last call that all ranks agreed on, as far as it knows."""

    beat: int
    time: float
    call: int
    at: str
    seconds: float
    waits: bool
    end: str
    why: str
    told: bool
    agreed: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: bytes | str) -> Record | None:
        """None where the text is no record."""
        try:
            return Record(**json.loads(text))
        except (ValueError, TypeError):
            return None

    def stops(self, call: int) -> bool:
        """Whether a rank that waits in `call` waits in vain for the rank of this record. A rank that failed alone may
        come to a later call, one whose program ended has done what it had to in its last."""
        if self.end == "failed":
            return self.call == call
        return self.call <= call if self.end == "lost" else self.call < call and self.end != ""


def hang_error(
    rank: int, records: Mapping[int, Record | None], silent: Collection[int], cause: str, timeout_seconds: float
) -> HangError:
    """The error of `rank`, from what all ranks told last (None: nothing, ever). `cause` is what the transport said."""
    missing = _missing(records, silent)
    newest = max((record for record in records.values() if record is not None), key=lambda record: record.call)
    lines = [sentence(r, records[r], r in silent, newest) for r in missing]
    gave_up = [r for r, record in records.items() if record and record.end == "lost" and r != rank]
    if not missing and any(record.call < newest.call for record in records.values() if record and record.end == "lost"):
        lines = [f"{_ranks(gave_up)} waited in vain in an earlier call, and gave this process group up"]
    elif not missing:
        lines = ["every rank waits for another: they do not make the same calls, or one of them lost a message"]
    shown: dict[str, list[int]] = {}
    for r, record in records.items():
        if r not in missing and record is not None:
            shown.setdefault(record.at, []).append(r)
    lines += [f"{_ranks(who)}: {at}{' (this rank is one)' if rank in who else ''}" for at, who in shown.items()]
    lines.append(f"The transport said: {cause}. A rank is waited for {timeout_seconds:g} s (Spec(timeout=)).")
    lines.append("This process group cannot be used any more: start all ranks again, from the last checkpoint.")
    return HangError("\n  ".join(lines), missing)


def no_store(rank: int, holder: int | None, at: str, cause: str, known: str = "") -> HangError:
    """The error where the process group's store, through which ranks tell where they are, does not answer. `known`:
    what was heard before."""
    if known:
        who, lines = (() if holder is None else (holder,)), [known]
    elif holder is None:
        who, lines = (), ["the store of the process group does not answer: its process or machine is stopped or gone"]
    else:
        who, lines = (holder,), [f"rank {holder} does not answer, nor does the store that its process keeps: it is "
                                 "stopped, or its process or machine is gone"]  # fmt: skip
    lines += [f"rank {rank}: {at} (this rank)", f"The transport said: {cause}. Where other ranks are is not known."]
    lines.append("This process group cannot be used any more: start all ranks again, from the last checkpoint.")
    return HangError("\n  ".join(lines), who)


def _missing(records: Mapping[int, Record | None], silent: Collection[int]) -> tuple[int, ...]:
    failed = [r for r, record in records.items() if record is not None and record.end == "failed"]
    gone = [r for r, record in records.items() if r in silent or (record and record.end in ("ended", "left"))]
    busy = [r for r, record in records.items() if record and not record.end and not record.waits]
    return tuple(failed or gone or busy)


def sentence(rank: int, record: Record | None, silent: bool = False, newest: Record | None = None) -> str:
    """Why others wait in vain for a rank. `newest`: the record of the rank that is furthest."""
    if record is None:
        return f"rank {rank} is missing: it has not called fzero yet"
    if record.end == "failed":
        return f"rank {rank} failed alone, {record.at}: {record.why}"
    if record.end:
        what = "its program ended" if record.end == "ended" else "it left the process group"
        return f"rank {rank} is missing: {what}{f' ({record.why})' if record.why else ''}, {record.at}"
    if silent:
        ago = max(time.time() - record.time, 0)
        later = newest.agreed if newest is not None and newest.agreed != record.agreed else ""
        since = f"; it has agreed on {later} since" if later else ""
        return (
            f"rank {rank} is missing: it does not answer, so it is stopped, or its process or machine is gone; "
            f"last heard of {ago:.1f} s ago, {record.at}{since}"
        )
    return f"rank {rank} is missing: it answers, but has been for {record.seconds:.1f} s {record.at}"


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
