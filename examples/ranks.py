"""Ranks: start one process per rank on this machine, and end them all as soon as one of them ends badly.

`torchrun` does the same and more; this is what lets `python examples/train_gpt.py --world 2` work alone. A rank learns
who it is from torchrun's environment variables, so that the training program cannot tell the two apart.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

STOPPED = 130  # what a shell reports for a program that Ctrl-C ended
STOPS = (STOPPED, 143)  # and with those that SIGTERM ended
GRACE_SECONDS = 10.0  # for a rank to save what it has
LOG_LINES = 15


def here() -> tuple[int, int] | None:
    """(rank, world size) of this process, or None when nobody has started ranks yet."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def attempt() -> int:
    """How often all ranks were started again before: 0 the first time."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launch(command: Sequence[str], world_size: int, logs: Path, *, restarts: int = 0) -> int:
    """Run `command` once per rank and return the exit status: 0, that of the first rank to fail, or 130 for Ctrl-C.

    Rank 0 has this terminal; what another rank prints goes to `logs`/rankN.log, whose end is shown if it fails. When a
    rank fails the others are ended too; up to `restarts` times all of them are then started again.
    """
    for number in range(restarts + 1):
        status = _launched(command, world_size, logs, number)
        if status in (0, STOPPED) or number == restarts:
            break
        print(f"all {world_size} ranks start again ({number + 1} of at most {restarts} times)", file=sys.stderr)
    return status


def _launched(command: Sequence[str], world_size: int, logs: Path, number: int) -> int:
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_sigterm_as_interrupt())
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(_stop, ranks)
        try:
            port = _free_port()
            for rank in range(world_size):
                log = None if rank == 0 else stack.enter_context(_log(logs, rank).open("wb"))
                environment = _environment(rank, world_size, port, number)
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log and subprocess.STDOUT))
            failed = _wait(ranks)
        except KeyboardInterrupt:
            _stop(ranks)
            print(f"\nstopped: all {world_size} ranks have ended", file=sys.stderr)
            return STOPPED
    if not failed:
        return 0
    if any(status in STOPS for status in failed.values()):
        print(f"\nstopped: all {world_size} ranks have ended", file=sys.stderr)
        return STOPPED
    for rank, status in failed.items():
        print(_obituary(rank, status, logs), file=sys.stderr)
    print(f"all {world_size} ranks have ended", file=sys.stderr)
    return next(max(status, 1) for status in failed.values())


def run(args: argparse.Namespace, script: str, argv: Sequence[str] | None, train: Callable[..., None]) -> int:
    """`train(args, rank)` on each of `args.world` ranks, started here unless torchrun did; the exit status."""
    if here() is None and args.world > 1:
        command = [sys.executable, str(Path(script).resolve()), *(sys.argv[1:] if argv is None else argv)]
        return launch(command, args.world, args.out)
    try:
        train(args, (here() or (0, 1))[0])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def every_rank(value: Any) -> list[Any]:
    """The value of every rank, by rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    """The ranks that failed first, by exit status; empty when all of them are done."""
    while True:
        statuses = {rank: process.poll() for rank, process in enumerate(ranks)}
        failed = {rank: status for rank, status in statuses.items() if status}
        if failed or None not in statuses.values():
            return failed
        time.sleep(0.05)


def _stop(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask those that still run to end; a rank that waits inside a collective does not hear it, and is killed."""
    running = [process for process in ranks if process.poll() is None]
    for process in running:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if running and sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # a progress bar that was killed leaves the cursor hidden


def _obituary(rank: int, status: int, logs: Path) -> str:
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
    if rank == 0:
        return f"\nrank 0 {how}: its error is above"
    lines = _log(logs, rank).read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([f"\nrank {rank} {how}; the end of {_log(logs, rank)}:", *(f"  {line}" for line in lines)])


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank{rank}.log"


def _environment(rank: int, world_size: int, port: int, number: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // world_size)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(number),
    }


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """A launcher that is told to end takes its ranks along, as for Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
