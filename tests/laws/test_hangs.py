"""A rank that does not come is named on every other one, with where all of them were; within a bound, and for good."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import free_port, gloo, values
from workers import hangs as worker

import fzero
from fzero.comm import hang_report
from fzero.comm.hang_report import Phase, RankStatus, hang_error, no_store, process_name, sentence

TIMEOUT = 3.0


def trouble(
    world: int, how: str, wrong: int, via: str, kind: str, tmp_path: Any, timeout: float = TIMEOUT, **given: Any
) -> Any:
    """What each rank but `wrong` found out; the same rank is named on all of them, and they can end."""
    fn = functools.partial(worker.trouble, how, wrong, via, timeout, kind, str(tmp_path), **given)
    outcomes = gloo(world, fn, timeout=300)
    others = [r for r in range(world) if r != wrong]
    found = dict(zip(others, values([outcomes[r] for r in others]), strict=True))
    for rank, one in found.items():
        assert one["missing"] == (wrong,), one["message"]
        assert re.search(rf"ranks? [0-9, -]*{rank}.*this rank", one["message"]), one["message"]
        bound = 2 if how == "stop" else 12  # the others have been listened to before; else a busy machine, and asking
        assert one["seconds"] < TIMEOUT + bound, one
        assert one["teardown"] < 5
        assert one["again"].startswith("HangError: step 3: this process group was lost before (rank")
        assert one["ended"] == ""
        assert one["readable"]
    return outcomes, [one["message"] for one in found.values()], found


def waiting_op(message: str, lines: list[str]) -> None:
    """The op that this rank waits in is shown as the program shows it."""
    place = re.search(r"waiting in step 3, (op (\d+): wait [^\n]*?)( \(this rank is one\))?\n", message)
    assert place, message
    assert place[1] == lines[int(place[2])]


GRID = {"mesh": {"pp": 2, "dp": 2}, "microbatches": 2, "pipeline": "1f1b"}
LONG = pytest.mark.acceptance
P2P_IS_LONG = pytest.mark.parametrize("transfers", ["shared", pytest.param("p2p", marks=LONG)])
SHARED_IS_LONG = pytest.mark.parametrize("transfers", ["p2p", pytest.param("shared", marks=LONG)])


@SHARED_IS_LONG
def test_a_rank_that_is_stopped_between_steps(transfers: str, tmp_path: Any) -> None:
    _, messages, _ = trouble(3, "stop", 1, transfers, "", tmp_path)
    for message in messages:
        assert message.startswith("rank 1 is missing: it does not answer, so it is stopped, or its process or machine")
        assert "last heard of" in message
        assert "ranks 0, 2: waiting in step 3, for all ranks to agree on it (this rank is one)" in message
        assert "A rank is waited for 3 s (Spec(timeout=))" in message


@LONG
@pytest.mark.parametrize("transfers", ["p2p", "shared"])
def test_a_rank_that_is_stopped_in_a_step(transfers: str, tmp_path: Any) -> None:
    _, messages, found = trouble(2, "stop", 1, transfers, "run", tmp_path)
    for message, one in zip(messages, found.values(), strict=True):
        assert message.startswith("rank 1 is missing: it does not answer")
        waiting_op(message, one["lines"])


@pytest.mark.parametrize("how", [*(pytest.param(how, marks=LONG) for how in ("steps", "save", "front")), "end"])
def test_a_rank_that_is_stopped_in_a_save(how: str, tmp_path: Path) -> None:
    """Its thread may wait for that rank for as long as it likes: the process does not, and ends. The clock is that of
    all processes, from the signal to the other process's end. A machine with many that wait for a core has more."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    env["PYTHONPATH"] = os.pathsep.join(str(Path(__file__).parents[n] / name) for n, name in ((2, "."), (1, "support")))
    program = [sys.executable, "-c", f"from workers import hangs; hangs.stopped_in_a_save({how!r}, {str(tmp_path)!r})"]
    ranks = [
        subprocess.Popen(program, env=env | {"RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    try:
        said = ranks[0].communicate(timeout=120)[1]
        end = time.monotonic()
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[0].returncode == 1
    assert "fzero.errors.HangError: rank 1 is missing: it does not answer" in said, said
    if how != "steps":
        assert "rank 0: waiting in the save of step 1, until all ranks have done their part" in said
    busy = max(os.getloadavg()[0] / len(os.sched_getaffinity(0)) - 3, 0)
    took = end - float((tmp_path / "stopped").read_text())
    assert took < TIMEOUT + 2 + busy, f"{took:.1f} s of {TIMEOUT:g}, load {os.getloadavg()[0]:.1f}"


@pytest.mark.parametrize(
    ("how", "wrong"),
    [("before", 1), pytest.param("before", 0, marks=LONG), pytest.param("token", 1, marks=LONG), ("met", 2),
     pytest.param("met", 0, marks=LONG)],
)  # fmt: skip
def test_a_rank_that_dies_before_the_ranks_have_met(how: str, wrong: int) -> None:
    outcomes = gloo(3, worker.never_met, how, wrong, timeout=120)
    for rank in {0, 1, 2} - {wrong}:
        one = outcomes[rank].value
        assert one["missing"] == (wrong,), one
        assert one["message"].startswith(f"rank {rank}: rank {wrong} of 3 did not come within 4 s to start"), one


@pytest.mark.parametrize("left", [5, 30])
def test_too_few_files_are_told_before_any_is_missing(left: int) -> None:
    for one in values(gloo(2, worker.few_files, left, timeout=60)):
        assert re.match(
            r"LimitError: this process may have [\d,]+ files .* raise the limit, as by `ulimit -n \d+`", one
        )


def test_a_rank_that_is_killed_in_a_step(tmp_path: Any) -> None:
    outcomes, messages, found = trouble(2, "kill", 1, "p2p", "run", tmp_path, timeout=60.0)
    assert outcomes[1].error.startswith("Died: rank 1")
    assert messages[0].startswith("rank 1 is missing: it does not answer")
    waiting_op(messages[0], found[0]["lines"])


@pytest.mark.parametrize(
    ("how", "kind", "transfers"),
    [
        ("kill", "run", "shared"),
        pytest.param("kill", "recv", "p2p", marks=LONG),
        pytest.param("stop", "run", "shared", marks=LONG),
        pytest.param("stop", "run", "p2p", marks=LONG),
    ],
)
@pytest.mark.acceptance
def test_a_rank_of_a_grid_is_named_with_its_coordinates(how: str, kind: str, transfers: str, tmp_path: Any) -> None:
    """Role, coordinate, slot and op: of the rank that is gone, and of those that wait for it or for each other."""
    patience = 60.0 if how == "kill" else TIMEOUT
    _, messages, _ = trouble(4, how, 3, transfers, kind, tmp_path, timeout=patience, **GRID)
    for message in messages:
        assert message.startswith("rank 3 (pp=1 dp=1) is missing: it does not answer")
    assert re.search(
        r"rank 1 \(pp=0 dp=1\): waiting in step 3, op \d+: wait \S+ \| [BF]0\.\d (from|to) role 1", messages[0]
    )


@pytest.mark.parametrize("transfers", ["shared", pytest.param("p2p", marks=LONG)])
def test_a_rank_of_a_grid_that_fails_alone(transfers: str, tmp_path: Any) -> None:
    _, messages, _ = trouble(4, "raise", 1, transfers, "run", tmp_path, timeout=60.0, **GRID)
    for message in messages:
        assert re.match(
            r"rank 1 \(pp=0 dp=1\) failed alone, in step 3, op \d+: run .*: ValueError: only here\n", message
        )


def test_a_rank_that_stays_in_the_programs_own_code(tmp_path: Any) -> None:
    _, messages, _ = trouble(2, "stay", 1, "p2p", "", tmp_path)
    for message in messages:
        first = message.partition("\n")[0]
        assert re.fullmatch(
            r"rank 1 is missing: it answers, but has been for [\d.]+ s in the program's own code, after step 2", first
        )


@P2P_IS_LONG
@pytest.mark.acceptance
def test_a_rank_that_stays_in_a_segment(transfers: str, tmp_path: Any) -> None:
    _, messages, found = trouble(2, "stay", 1, transfers, "run", tmp_path)
    first = messages[0].partition("\n")[0]
    place = re.fullmatch(r"rank 1 is missing: it answers, but has been for \S+ s in step 3, (op (\d+): run .*)", first)
    assert place, first
    assert place[1] == found[0]["lines"][int(place[2])]
    waiting_op(messages[0], found[0]["lines"])


def test_a_rank_whose_program_ends(tmp_path: Any) -> None:
    _, messages, _ = trouble(2, "end", 1, "shared", "", tmp_path, timeout=60.0)
    for message in messages:
        assert message.startswith("rank 1 is missing: its program ended, in the program's own code, after step 2")


def test_a_program_that_has_ended_in_a_process_that_has_not(tmp_path: Any) -> None:
    """What runs at its end takes long, as an upload does: the process is seen alive, and the message says why."""
    found = values(gloo(2, worker.ends_slowly, str(tmp_path), timeout=120)[:1])[0]
    first = found["message"].partition("\n")[0]
    assert first == (
        "rank 1 is missing: its program ended, in the program's own code, after step 1; its process is still there: it "
        "runs what is left to do at its end (atexit)"
    )


@SHARED_IS_LONG
def test_a_rank_that_fails_alone_in_a_step(transfers: str, tmp_path: Any) -> None:
    """It goes on living, and no connection breaks: the others hear of it all the same, long before the time is up."""
    outcomes, messages, found = trouble(3, "raise", 1, transfers, "run", tmp_path, timeout=60.0)
    assert outcomes[1].value["own"] == "only here"
    for message, one in zip(messages, found.values(), strict=True):
        place = re.match(r"rank 1 failed alone, in step 3, (op (\d+): run .*): ValueError: only here\n", message)
        assert place, message
        assert place[1] == one["lines"][int(place[2])]
        waiting_op(message, one["lines"])


@pytest.mark.parametrize("how", ["stop", pytest.param("kill", marks=LONG), pytest.param("end", marks=LONG)])
def test_the_rank_that_holds_the_store(how: str, tmp_path: Any) -> None:
    """Without torchrun that is rank 0: then nobody can ask where the others are, but who is gone is known."""
    _, messages, _ = trouble(2, how, 0, "p2p", "", tmp_path)
    for message in messages:
        gone = "rank 0 is missing: its program ended" if how == "end" else "rank 0 does not answer, nor does the store"
        assert message.startswith(gone), message


@LONG
def test_a_failure_after_the_first_write_says_so(tmp_path: Any) -> None:
    """The state of a rank that had begun to write when it lost another is unusable."""
    outcomes = gloo(2, worker.trouble, "stay", 1, "p2p", TIMEOUT, "all_gather", str(tmp_path), timeout=300)
    one = outcomes[0].value
    assert one["missing"] == (1,)
    assert one["ended"].startswith("is unusable: step 3 failed after it began to write (HangError: rank 1 is missing")
    assert "\n" not in one["ended"]


@SHARED_IS_LONG
def test_a_step_that_failed_on_all_ranks_can_be_taken_again(transfers: str) -> None:
    """Though one rank failed later than the others: nobody waited in that call."""
    for ended, again, calls in values(gloo(2, worker.retried, transfers)):
        assert (ended, again) == ("", "")
        assert calls > 4


@LONG
def test_a_new_process_group_hears_nothing_of_the_old_one() -> None:
    first, second = values(gloo(2, worker.restarted))
    assert first == second
    assert len(set(first)) == 1


@LONG
def test_a_store_in_a_file(tmp_path: Any) -> None:
    (tmp_path / "done").mkdir()
    found, _ = values(gloo(2, worker.stored_in_a_file, str(tmp_path / "store"), str(tmp_path / "done")))
    assert found["missing"] == (1,)
    assert found["message"].startswith("rank 1 is missing: it answers, but has been for")
    assert "rank 0: waiting in the whole of 'params/blocks/0' and 1 more leaves, for all ranks" in found["message"]


@pytest.fixture
def limited() -> Iterator[str]:
    """A control group of little memory; "" where this user may make none."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"fzero-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(64 << 20))
            (group / "cgroup.procs").open("a").close()
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        yield str(group)
        with contextlib.suppress(OSError):
            group.rmdir()
        return
    yield ""


@pytest.mark.acceptance
def test_a_rank_that_the_kernel_kills_for_memory(limited: str) -> None:
    outcomes = gloo(2, worker.killed_for_memory, limited, timeout=120)
    assert outcomes[1].error == "Died: rank 1 with exit status -9"
    found = values(outcomes[:1])[0]
    assert found["missing"] == (1,)
    first = found["message"].partition("\n")[0]
    assert first.startswith("rank 1 is missing: it does not answer")
    assert "its process has ended without a word: it was killed, or crashed" in first
    assert "memory may have been short: the kernel's log (dmesg)" in first


def test_strangers_at_the_port_of_the_store_end_no_run() -> None:
    """What they send is no message of the store's; a record that is none counts for none, and ends no heartbeat."""
    for one in values(gloo(2, worker.strangers, 1.0, timeout=120)):
        assert one["thread"]
        assert one["stranger"]
        assert one["steps"] > worker.STEPS


# --- the text ---------------------------------------------------------------------------------------------------------


def record(**given: Any) -> RankStatus:
    plain = {"beat": 1, "time": time.time(), "call": 5, "at": "waiting in step 4, op 2: wait x", "seconds": 3.0}
    rest = {"waits": True, "end": Phase.GOING, "why": "", "told": False, "agreed": "step 4"}
    return RankStatus(**{**plain, **rest, **given})


def test_who_is_missing_comes_in_an_order() -> None:
    """A failure is the cause of a silence, and a silence that of a rank that is busy with neither."""
    records: dict[int, RankStatus | None] = {
        0: record(),
        1: record(waits=False, at="in step 4, op 1: run s"),
        2: record(beat=9, agreed="step 3"),
        3: record(end=Phase.FAILED, waits=False, at="in step 4, op 1: run s", why="ValueError: x"),
    }
    assert hang_error(0, records, {2}, "closed", 3.0).missing == (3,)
    records[3] = record(end=Phase.ENDED, waits=False)
    silent = hang_error(0, records, {2}, "closed", 3.0)
    assert silent.missing == (2, 3)
    assert "; it has agreed on step 4 since" in str(silent)
    assert hang_error(0, {r: records[r] for r in (0, 1)}, set(), "closed", 3.0).missing == (1,)
    assert "it has not called fzero yet" in str(hang_error(0, {0: record(), 1: None}, {1}, "closed", 3.0))
    everyone = hang_error(0, dict.fromkeys(range(12), record()), set(), "closed", 3.0)
    assert everyone.missing == ()
    assert "every rank waits for another" in str(everyone)
    assert "ranks 0-11: waiting in step 4, op 2: wait x (this rank is one)" in str(everyone)
    gave_up = hang_error(0, {0: record(call=6), 1: record(end=Phase.LOST)}, set(), "closed", 3.0)
    assert str(gave_up).startswith("rank 1 waited in vain in an earlier call")
    assert no_store(1, None, "waiting", "closed").missing == ()


def test_nothing_is_said_of_a_process_that_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run: where /proc hides what other users run, on a copy of this machine, in another container."""
    silent = {"waits": False, "process": process_name()}
    ended, stopped = "its process has ended without a word", "its process is stopped"

    def said(**given: Any) -> str:
        return sentence("rank 1", record(**{**silent, **given}), silent=True)

    machine, namespace, number, start = process_name().split()
    assert ended not in said()
    assert stopped not in said()
    assert ended in said(process=f"{machine} {namespace} {number} 1"), "another process of the same number"
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert ended in said(process=f"{machine} {namespace} {child.pid} {start}")
    for other in (
        f"{machine}2 {namespace} {child.pid}",
        f"{machine} {namespace}2 {child.pid}",
        f"{machine} {namespace} 0",
    ):
        assert said(process=f"{other} {start}").endswith(record().at)
    boot_id = machine.partition("@")[0]
    assert f"{boot_id}@{os.uname().nodename}" == machine

    def hidden(pid: int) -> Any:
        if pid == int(number):
            return real(pid)
        raise FileNotFoundError(pid)

    real = hang_report._stat
    monkeypatch.setattr(hang_report, "_stat", hidden)
    assert said(process=f"{machine} {namespace} {os.getppid()} {start}").endswith(record().at)
    assert ended in said(process=f"{machine} {namespace} {child.pid} {start}")


def test_what_ends_a_wait() -> None:
    assert record(end=Phase.FAILED).stops(5)
    assert not record(end=Phase.FAILED).stops(6)  # it may come again
    assert record(end=Phase.LOST).stops(5)
    assert record(end=Phase.LOST).stops(6)
    assert not record(end=Phase.ENDED).stops(5)  # what it had to send in its last call is sent
    assert record(end=Phase.ENDED).stops(6)
    assert not record().stops(5)


def test_a_record_survives_the_store_and_nothing_else_does() -> None:
    one = record(at='a "quoted" wait\n| é')
    assert RankStatus.from_json(one.to_json().encode()) == one
    for text in (b"", b"{}", b"[1]", b"7", b"\xff\xfe", one.to_json()[:-3]):
        assert RankStatus.from_json(text) is None


@pytest.mark.parametrize("timeout", [0, -1.0, "3", float("inf"), float("nan"), True])
def test_a_timeout_that_is_none(timeout: Any) -> None:
    with pytest.raises(fzero.errors.SpecError, match=r"timeout.*needed seconds > 0"):
        fzero.Spec(loss=worker.loss, optimizer=fzero.optim.sgd(0.1), timeout=timeout)
