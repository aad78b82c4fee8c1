"""The thread that tells the other ranks where this one is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch.distributed as dist

from fzero.comm.hang_report import TEXT_CHARS, _stat, fate, process_name
from fzero.comm.heartbeat import Presence
from fzero.errors import PeerError

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
    """What rank 0 raises that waits in vain where these are the other records; whether its thread lived."""
    store, group = dist.HashStore(), _Group()
    presence = Presence(0, 2, group, store, 0.2)
    presence.heartbeat.patience = 0.1
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
