"""hang_report: of the records of all ranks, who is missing, and the words for it."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fzero.comm import hang_report
from fzero.comm.hang_report import Phase, RankStatus, hang_error, no_store, not_come, sentence

GOING = RankStatus(
    beat=3, time=0.0, call=5, at="waiting in step 5, op 7", seconds=2.0, waits=True, end=Phase.GOING, why="",
    told=False, agreed="step 5",
)  # fmt: skip
BUSY = replace(GOING, waits=False, at="in step 5, op 3")
FAILED = replace(GOING, end=Phase.FAILED, why="ValueError: x", at="in step 5, op 3")
AGAIN = replace(GOING, call=6, failed=5, failed_at="in step 5, op 3", failed_why="ValueError: x")
LOST = replace(GOING, end=Phase.LOST, why="closed")
ENDED = replace(GOING, end=Phase.ENDED, at="in the program's own code, after step 5")
LEFT = replace(ENDED, end=Phase.LEFT)
LAST = (
    "The transport said: closed. A rank is waited for 60 s (Spec(timeout=)).\n  "
    "This process group cannot be used any more: start all ranks again, from the last checkpoint."
)


def told(*others: RankStatus | None, silent: Any = (), rank: int = 0) -> tuple[tuple[int, ...], str]:
    """(who is missing, the message) where the first rank waits and these are the records of the others."""
    error = hang_error(rank, dict(enumerate([GOING, *others])), silent, "closed", 60.0)
    text = str(error)
    assert text.endswith(LAST)
    return tuple(error.missing), text


@pytest.mark.parametrize(
    ("others", "silent", "missing"),
    [
        ((GOING, BUSY), (), (2,)),
        ((GOING, ENDED, BUSY), (), (2,)),
        ((LEFT, GOING), (), (1,)),
        ((BUSY, GOING, None), (3,), (3,)),
        ((BUSY, FAILED, ENDED), (1,), (2,)),
        ((GOING, LOST), (), ()),
        ((GOING, GOING), (), ()),
    ],
)
def test_the_first_group_that_is_not_empty_is_missing(others: Any, silent: Any, missing: tuple[int, ...]) -> None:
    """Those that failed alone; those that are silent or gone; those that wait for nobody."""
    assert told(*others, silent=silent)[0] == missing


def test_a_rank_that_failed_and_came_again_is_missing_where_another_was_lost_in_that_call() -> None:
    why = "failed alone, in step 5, op 3: ValueError: x\n"
    there, here = (hang_error(r, {0: LOST, 1: AGAIN}, (), "closed", 60.0) for r in (0, 1))
    assert (there.missing, here.missing) == ((1,), (1,))
    assert str(there).startswith(f"rank 1 {why}")
    assert str(here).startswith(f"rank 1 (this rank) {why}")
    later = hang_error(0, {0: replace(LOST, call=6), 1: AGAIN}, (), "closed", 60.0)
    assert later.missing == (), "that all ranks failed in an earlier call has nothing to do with this one"


def test_ranks_are_listed_by_where_they_are() -> None:
    lines = told(GOING, GOING, BUSY, replace(GOING, at="waiting in step 4"), rank=1)[1].splitlines()
    assert lines == [
        "rank 3 is missing: it answers, but has been for 2.0 s in step 5, op 3",
        "  ranks 0-2: waiting in step 5, op 7 (this rank is one)",
        "  rank 4: waiting in step 4",
        *("  " + line.strip() for line in LAST.splitlines()),
    ]


def test_where_all_wait_none_is_missing() -> None:
    assert told(GOING)[1].startswith("every rank waits for another: they do not make the same calls")
    gone = told(replace(LOST, call=4), replace(LOST, call=4))[1]
    assert gone.startswith("ranks 1, 2 waited in vain in an earlier call, and gave this process group up\n")
    assert told(LOST)[1].startswith("every rank waits for another"), "in this call"
    assert told(replace(GOING, call=4), LOST)[1].startswith("every rank waits for another"), "nobody has given it up"


def test_a_rank_alone_at_its_place_is_named_in_the_words_of_its_mesh() -> None:
    records = dict(enumerate([GOING, GOING, replace(GOING, at="waiting in step 4")]))
    lines = str(hang_error(0, records, (), "closed", 60.0, "rank {} (dp)".format)).splitlines()
    assert lines[1:3] == [
        "  ranks 0, 1: waiting in step 5, op 7 (this rank is one)",
        "  rank 2 (dp): waiting in step 4",
    ]


@pytest.mark.parametrize(
    ("status", "silent", "words"),
    [
        (None, False, "r is missing: it has not called fzero yet"),
        (FAILED, True, "r failed alone, in step 5, op 3: ValueError: x"),
        (LOST, False, "r waited in vain before, waiting in step 5, op 7 (closed)"),
        (replace(LOST, why=""), False, "r waited in vain before, waiting in step 5, op 7"),
        (ENDED, True, "r is missing: its program ended, in the program's own code, after step 5"),
        (replace(LEFT, why="x"), False, "r is missing: it left the process group (x), " + LEFT.at),
        (BUSY, False, "r is missing: it answers, but has been for 2.0 s in step 5, op 3"),
    ],
)  # fmt: skip
def test_a_sentence_for_each_end(status: RankStatus | None, silent: bool, words: str) -> None:
    assert sentence("r", status, silent, GOING) == words
    assert silent or sentence("r", status) == words, "a rank is silent if it is said to be"


def test_a_silent_rank_was_heard_of_some_time_ago() -> None:
    status = replace(GOING, time=time.time() - 9, agreed="step 4")
    text = sentence("r", status, True, GOING)
    assert re.fullmatch(
        r"r is missing: it does not answer, so it is stopped, or its process or machine is gone; last heard of "
        r"(9|10)\.\d s ago, waiting in step 5, op 7; it has agreed on step 5 since",
        text,
    ), text
    assert "since" not in sentence("r", replace(status, agreed="step 5"), True, GOING)
    assert "heard of 0.0 s ago" in sentence("r", replace(status, time=time.time() + 99), True, None), "another clock"


@pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="needs /proc of Linux")
def test_a_process_has_its_number_and_its_start_in_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have its number later: the kernel's 22nd field tells the two apart."""
    after = " ".join(map(str, range(3, 50)))
    monkeypatch.setattr(hang_report.Path, "read_text", lambda path: f"7 (a) b) {after}")
    *_, number, start = hang_report.process_name().split()
    assert (int(number), start) == (os.getpid(), "22")


@pytest.mark.skipif(not hang_report.process_name(), reason="needs /proc of Linux")
def test_a_program_that_ended_may_still_be_there() -> None:
    here = replace(ENDED, process=hang_report.process_name())
    assert "its process is still there" in sentence("r", here)
    assert "still there" not in sentence("r", replace(here, process=here.process[:-1] + "x"))
    assert "still there" not in sentence("r", replace(here, end=Phase.LEFT))


def test_a_store_that_does_not_answer() -> None:
    error = no_store(1, 0, "waiting in step 5", "closed")
    assert tuple(error.missing) == (0,)
    assert str(error).splitlines()[:3] == [
        "rank 0 does not answer, nor does the store that its process keeps: it is stopped, or its process or machine "
        "is gone",
        "  rank 1: waiting in step 5 (this rank)",
        "  The transport said: closed. Where other ranks are is not known.",
    ]
    assert str(error).endswith(LAST.partition("\n")[2])
    alone = no_store(1, None, "here", "closed")
    assert tuple(alone.missing) == ()
    assert str(alone).startswith("the store of the process group does not answer")
    assert str(no_store(1, 0, "here", "closed", "rank 2 failed")).startswith("rank 2 failed\n")


def test_ranks_that_do_not_come() -> None:
    assert str(not_come(1, 4, [0], 5.0)) == (
        "rank 1: rank 0 of 4 did not come within 5 s to start the process group. What its process printed has the "
        "first error. Start all ranks again, or give them more time: Spec(timeout=)"
    )
    several = str(not_come(1, 4, [0, 2, 3], 5.0, "refused"))
    assert "ranks 0, 2, 3 of 4 did not come" in several
    assert "(refused). What their processes printed" in several
    assert "rank 1: some of 4 did not come" in str(not_come(1, 4, [], 5.0))


def test_ranks_in_words() -> None:
    names = [hang_report._ranks(ranks) for ranks in ([5], [3, 0, 1, 2, 7], [1, 2], [0, 1, 4, 5, 6])]
    assert names == ["rank 5", "ranks 0-3, 7", "ranks 1, 2", "ranks 0, 1, 4-6"]


@pytest.mark.parametrize(
    ("status", "calls"),
    [
        (GOING, []), (replace(GOING, call=9), []), (FAILED, [5]), (AGAIN, [5]), (LOST, [5, 6]), (ENDED, [6]),
        (LEFT, [6]),
    ],
)  # fmt: skip
def test_in_which_calls_a_rank_is_waited_for_in_vain(status: RankStatus, calls: list[int]) -> None:
    """It had begun 5 (AGAIN: 6, after it failed in 5). One that failed alone may come to a later call; one that ended
    has done its part in its last."""
    assert [call for call in (4, 5, 6) if status.stops(call)] == calls


def test_a_record_comes_back() -> None:
    for status in (GOING, FAILED, AGAIN, LEFT, replace(GOING, told=True, seconds=0.25, process="a b 1 2")):
        assert RankStatus.from_json(status.to_json()) == status
    long = replace(GOING, at="x" * 999)
    assert RankStatus.from_json(long.to_json()) == replace(long, at="x" * hang_report.TEXT_CHARS)


def test_a_system_that_names_no_process_knows_no_fate(monkeypatch: pytest.MonkeyPatch) -> None:
    name = hang_report.process_name()

    def fails(*given: Any) -> str:
        raise PermissionError

    monkeypatch.setattr(hang_report.Path, "read_text", fails)
    assert hang_report.process_name() == ""
    assert hang_report.fate(name) == ""


@pytest.mark.parametrize(
    ("error", "known", "state"),
    [
        (FileNotFoundError, True, ""),  # /proc hides it
        (FileNotFoundError, False, "X"),
        (ProcessLookupError, True, "X"),
        (PermissionError, True, ""),
        (IndexError, True, ""),
    ],
)
@pytest.mark.skipif(not hang_report.process_name(), reason="needs /proc of Linux")
def test_a_process_of_which_the_kernel_shows_no_state(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], known: bool, state: str
) -> None:
    machine, namespace, *_ = hang_report.process_name().split()
    monkeypatch.setattr(hang_report, "process_name", lambda: f"{machine} {namespace} 1 2")

    def stat(pid: int) -> tuple[str, str]:
        assert pid == 77
        raise error

    def kill(pid: int, signal: int) -> None:
        assert (pid, signal) == (77, 0), "it is only asked for"
        raise PermissionError if known else ProcessLookupError

    monkeypatch.setattr(hang_report, "_stat", stat)
    monkeypatch.setattr(hang_report.os, "kill", kill)
    assert hang_report._state(f"{machine} {namespace} 77 5") == state


def test_a_number_out_of_range_is_no_record() -> None:
    for changed, fits in (
        ({"beat": 0}, True), ({"beat": 1 << 60}, True), ({"beat": -1}, False), ({"beat": (1 << 60) + 1}, False),
        ({"seconds": 3}, True), ({"seconds": -0.5}, False), ({"told": 1}, False),
    ):  # fmt: skip
        found = RankStatus.from_json(json.dumps({**vars(GOING), **changed}))
        assert (found is not None) == fits, changed
    plain = len(json.dumps({**vars(GOING), "x": ""}))
    for room, fits in (((1 << 16) - plain, True), ((1 << 16) - plain + 1, False)):
        long = json.dumps({**vars(GOING), "x": "y" * room})
        assert (RankStatus.from_json(long) is not None) == fits
    assert isinstance(RankStatus.from_json(json.dumps({**vars(GOING), "seconds": 3})).seconds, float)  # type: ignore[union-attr]
