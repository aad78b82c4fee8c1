"""agree: small all-gathers by which ranks compare notes before any data moves.

`gathered` moves one small tensor per rank, and `tell` one short note per rank. `agree` checks that all ranks make the
same call on the same program. All of them go over gloo, on the CPU. Bytes and JSON only: nothing is pickled.

A collective call of the user begins in `agree`: it tells the heartbeat (`fzero.comm.heartbeat`) the name of the call.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fzero._torch_compat import default_store
from fzero.comm import heartbeat
from fzero.errors import DisagreementError, HangError, printable

NOTE_BYTES = 512
POLL_SECONDS = 0.05
CALL_BYTES = 160  # of a note; of its digest and of each shared value at most PART_BYTES
PART_BYTES = 80
TABLE_BYTES = 1 << 16  # of the inputs by name, which are told after an error alone
STEP_NEEDS = "a step needs batches of the same shapes, dtypes and static values on all ranks, and functions that read "
STEP_NEEDS += "the same values of Python, and optimizers of the same numbers"


@dataclass(frozen=True)
class Same:
    """A value that some of the ranks must share: those that give the same `among`.

    what: the value in words. remedy: how to mend a difference. shown: whether the error shows the two values (a
    digest would say nothing).
    """

    what: str
    among: int
    value: str
    remedy: str = ""
    shown: bool = False


def tell(note: bytes, world_size: int, group: Any, num_bytes: int = NOTE_BYTES) -> list[bytes]:
    """Returns the notes of all ranks, by rank. Collective.

    Each note is cut at `num_bytes`, and zero bytes at its end are lost. The cost is one small all-gather over gloo.
    Raises HangError if a rank does not come.
    """
    rows = _rows(world_size, group, num_bytes)
    rows[-1] = torch.tensor(list(note[:num_bytes].ljust(num_bytes, b"\0")), dtype=torch.uint8)
    _all_gather(list(rows[:-1]), rows[-1], group)
    return [bytes(row).rstrip(b"\0") for row in rows[:-1].tolist()]


_kept: WeakKeyDictionary[heartbeat.Presence, torch.Tensor] = WeakKeyDictionary()


def _rows(world_size: int, group: Any, num_bytes: int = NOTE_BYTES) -> torch.Tensor:
    """Room for a note of each rank and for this rank's own: uint8 (ranks + 1, num_bytes). It is kept, because gloo's
    threads let go of what they were given when they like: a step would hold more at one time than at another."""
    presence = heartbeat.of(group)
    rows = _kept.get(presence)
    if rows is None or rows.shape != (world_size + 1, num_bytes):
        rows = _kept[presence] = torch.empty(world_size + 1, num_bytes, dtype=torch.uint8, device="cpu")
    return rows


def gathered(local: torch.Tensor, world_size: int, group: Any) -> list[torch.Tensor]:
    """Returns the small CPU tensors of all ranks, by rank, over gloo. Collective.

    `local` has the same shape and dtype on every rank. Raises HangError if a rank does not come.
    """
    tensors = [torch.empty_like(local) for _ in range(world_size)]
    _all_gather(tensors, local, group)
    return tensors


def _all_gather(tensors: list[torch.Tensor], local: torch.Tensor, group: Any) -> None:
    presence = heartbeat.of(group)
    if presence is heartbeat.ALONE:
        raise HangError(
            "the process group of this state was destroyed: its ranks cannot be asked any more. Call "
            "torch.distributed.destroy_process_group() after the last fzero call. To go on, fzero.load a checkpoint, "
            "which starts a process group; what this rank holds of a leaf is still in .local"
        )
    presence.waits = True
    try:
        dist.all_gather(tensors, local, group=group)
    except RuntimeError as error:
        raise presence.lost(error) from error
    finally:
        presence.waits = False


def from_first(text: str, call: str, rank: int, world_size: int, group: Any) -> str:
    """Returns the text of rank 0, of any length, on every rank. Collective; what others give is not read.

    call: its name, for messages. Rank 0 may take as long as it wants before it calls: the others wait for as long as
    its heartbeat answers. Raises HangError if it is silent for the timeout.
    """
    if world_size == 1:
        return text
    presence, store = heartbeat.of(group), default_store()
    presence.enter(call)
    try:
        key = f"fzero/first/{presence.call}"
        if rank == 0:
            store.set(key, text)
            return text

        def told(seconds: float | None) -> bool:
            while not (there := bool(store.check([key]))) and seconds is None:
                time.sleep(POLL_SECONDS)
            time.sleep(0 if there else POLL_SECONDS)
            return there

        presence.wait_for(told, call)
        return str(store.get(key).decode())
    finally:
        presence.leave()


def agree(
    rank: int,
    world_size: int,
    call: str,
    digest: str,
    group: Any,
    failure: BaseException | None = None,
    flags: int = 0,
    inputs: Callable[[], Sequence[Mapping[str, str]]] = tuple,
    same: Sequence[Same] = (),
    needs: str = STEP_NEEDS,
) -> int:
    """Checks that all ranks make the same call, and returns the union of their `flags`. Collective.

    call: the name of the call, for messages. digest: identifies the program that this rank is about to run. failure:
    the error that this rank met before the call, if any. flags: bits that this rank sends to the others. inputs:
    returns the inputs of the call by name, as text, in groups of which the first that differs is told; it is used only
    if the digests differ, so that the error can name the input. same: what groups of ranks must share; as many on every
    rank. needs: what the call needs of its inputs, in words.

    Raises `failure` if there is one. Raises DisagreementError on every rank if calls, digests or shared values differ,
    and on the ranks that did not fail if another rank failed. Raises HangError if a rank does not come.

    The cost is one small all-gather of fixed size. The collective call begins here. The caller ends it with
    `heartbeat.of(group).leave()`; the next call ends it too.
    """
    presence, any_rank_flags = heartbeat.of(group), flags
    try:
        if world_size > 1:
            presence.enter(call)
            text = printable(f"{type(failure).__name__}: {failure}") if failure is not None else ""
            shared = json.dumps([(value.among, _within(value.value, PART_BYTES)) for value in same])
            asked = f"{_within(call, CALL_BYTES)}\n{_within(digest, PART_BYTES)}"
            note = f"{'!' if failure is not None else '='}{int(flags)}\n{asked}\n{shared}\n{text}"
            notes = tell(note.encode(), world_size, group)
            presence.set_agreed(call)
            if failure is None:
                parts = [note.decode(errors="replace").split("\n", 4) for note in notes]
                _compare_failures(rank, parts, presence.label)
                if len({part[1] for part in parts}) == 1:  # one call: as many shared values on every rank
                    _compare_shared(same, [json.loads(part[3]) for part in parts], presence.label)
                    if len({part[2] for part in parts}) > 1:
                        texts = tell(b"\0".join(map(_text, inputs())), world_size, group, TABLE_BYTES)
                        cut = any(len(text) == TABLE_BYTES for text in texts)
                        groups = list(zip(*(map(_table, text.split(b"\0")) for text in texts), strict=False))
                        for number, tables in enumerate(groups, 1):
                            _compare_inputs(tables, cut and number == len(groups), needs, presence.label)
                _compare(parts, presence.label)
                any_rank_flags = functools.reduce(operator.or_, (int(part[0][1:]) for part in parts))
        if failure is not None:
            raise failure
    except BaseException:
        presence.leave()
        raise
    finally:
        failure = None  # this frame is in its traceback, and would keep the caller's state with it
    return any_rank_flags


def _within(text: str, num_bytes: int) -> str:
    """The text in one line of at most so many bytes: of a longer one its beginning and a digest."""
    line = printable(text).replace("\n", "\\n").encode()
    if len(line) <= num_bytes:
        return line.decode()
    digest = hashlib.blake2b(line, digest_size=8).hexdigest()
    return f"{line[: num_bytes - len(digest) - 4].decode(errors='ignore')}... {digest}"


def _text(inputs: Mapping[str, str]) -> bytes:
    """A line for each input; the names and values of a batch may hold anything, of which `_within` leaves no tab."""
    lines = (f"{_within(name, CALL_BYTES)}\t{_within(value, CALL_BYTES)}\n" for name, value in inputs.items())
    return "".join(lines).encode()


def _table(note: bytes) -> dict[str, str]:
    """The inverse of `_text`. A note may have been cut, so text after the last line end is dropped."""
    lines = note.decode(errors="replace").split("\n")[:-1]
    return dict(line.split("\t") for line in lines)


def _compare_inputs(tables: Sequence[dict[str, str]], cut: bool, needs: str, label: Callable[[int], str]) -> None:
    """Raises DisagreementError for the first input that differs from that of rank 0, else for the first that one of
    them lacks. cut: a table may end before its last input."""
    first = tables[0]
    for name, here in first.items():
        for rank, table in enumerate(tables):
            if (there := table.get(name, here)) != here:
                remedy = _remedy(here, there) if needs == STEP_NEEDS else ""
                raise DisagreementError(f"{name} is {here} on {label(0)}, {there} on {label(rank)}: {needs}{remedy}")
    for rank, table in enumerate(() if cut else tables):
        for (has, one), (lacks, other) in permutations(((0, first), (rank, table))):
            for name in (name for name in one if name not in other):
                raise DisagreementError(f"{name} is {one[name]} on {label(has)}, and {label(lacks)} has none: {needs}")


def _remedy(here: str, there: str) -> str:
    """How to mend two values of an input that differ: a sentence, or nothing."""
    if any(text.startswith(("int ", "float ")) for text in (here, there)):
        return ". Give a number that differs between ranks as a tensor: torch.tensor(x)"
    if here.partition("[")[0] == there.partition("[")[0] and "[" in here and "static(" not in here:
        return (
            ". Pad to a multiple that holds them all, or to the longest of all ranks (an all_reduce of the length with "
            "MAX, before the step), and leave the padding out of the loss: fzero.Mean(total, count)"
        )
    return ""


def _compare_failures(rank: int, notes: list[list[str]], label: Callable[[int], str]) -> None:
    """Raises DisagreementError if a rank failed. A note is [mark and flags, call, digest, shared values, error
    text]."""
    failed = [(r, note[-1]) for r, note in enumerate(notes) if note[0].startswith("!")]
    if failed:
        raise DisagreementError("; ".join(f"{label(r)} failed before {notes[rank][1]}: {text}" for r, text in failed))


def _compare(notes: list[list[str]], label: Callable[[int], str]) -> None:
    """Raises DisagreementError if calls or digests differ."""
    if len({(note[1], note[2]) for note in notes}) > 1:
        made = [f"{note[1]} of {note[2]}" if note[2] else note[1] for note in notes]
        shown = "; ".join(f"{label(r)}: {call}" for r, call in enumerate(made))
        remedy = (
            "give every rank the same spec, the same params and batches of one shape, as many threads "
            "(OMP_NUM_THREADS: sums round by them), and make the same calls on all of them"
            if len({note[1] for note in notes}) == 1
            else "they make different calls. Make each on all ranks in one order, with as many batches for each (no "
            "fzero.step, evaluate, save or .full() inside `if rank == 0`)"
        )
        raise DisagreementError(f"the ranks do not run the same program ({shown}): {remedy}")


def _compare_shared(same: Sequence[Same], notes: list[list[list[Any]]], label: Callable[[int], str]) -> None:
    """Raises DisagreementError for the first value in which ranks differ that must share it. A note is the [among,
    value] pairs of a rank."""
    for number, own in enumerate(same):
        first: dict[int, int] = {}
        for rank, note in enumerate(notes):
            among, value = note[number]
            other = first.setdefault(among, rank)
            if notes[other][number][1] != value:
                values = f": {notes[other][number][1]} and {value}" if own.shown else ""
                raise DisagreementError(
                    f"{own.what} differs between {label(other)} and {label(rank)}{values}. {own.remedy}"
                )
