"""disk_file: the file of a rank for what it keeps on disk, read and written by threads.

A transfer is cut into blocks of 8 MiB. Threads that only read and threads that only write take them in the order of
their start. Each byte count is checked, and the rest is asked for again (`blocks`). The sum of every 4,096 bytes is
kept in memory when they are written and compared when they are read (`sums`).

The file is scratch: it has no name, and goes with its process (`open_file`). What lasts is a checkpoint.

Memory: 8 bytes for 4,096 of the file, and a block for each thread that moved to memory that direct I/O cannot use, or
uses badly. Four threads each way, so that some have a call running while others compute sums.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from fzero import backend
from fzero.disk import blocks, open_file
from fzero.disk.blocks import BLOCK, Bytes
from fzero.disk.calls import Disk
from fzero.disk.open_file import OpenFile
from fzero.disk.sums import UNIT, Sums
from fzero.errors import CorruptError, HangError, OffloadError

log = logging.getLogger("fzero")
CLOSE_SECONDS = 60.0  # that `close` waits for what was started
TOLD = 4  # transfers in flight that a report of a hang names


class DiskFile:
    """A file of `nbytes` zeros in `folder`, without a name.

    A range that was written keeps whole units: it begins at a multiple of UNIT (4,096 bytes), may have any length, and
    the rest of its last unit becomes zeros. Transfers of ranges that overlap must be apart in time, unless both read.

    folder: on a disk; tmpfs is refused. checksums: whether what is read is compared with what was written. threads: how
    many read, and how many write. disk: through which the system is called; tests make it fail. timeout: seconds that
    `wait` waits for a transfer. owner: whose file it is, in the error of a wait that ended badly.

    Raises OffloadError if the file cannot be made. It says how many bytes are needed and how many are free.

    Written here alone: `nbytes`, by `grow`; `patience`, by `wait`; `in_flight`, under `lock`; and the counters
    `bytes_read` and `bytes_written` (asked for, by transfers that ended well).

    >>> with DiskFile(".", 8192) as file:
    ...     moments, back = torch.randn(1500), torch.empty(1500)
    ...     file.wait(file.write(0, moments))
    ...     file.wait(file.read(0, back))
    >>> bool((back == moments).all())
    True
    """

    def __init__(
        self, folder: str | os.PathLike[str], nbytes: int, *, checksums: bool = True, threads: int = 4,
        disk: Disk | None = None, timeout: float = 1800.0, owner: str = "this process",
    ) -> None:  # fmt: skip
        if nbytes < 0 or threads < 1:
            raise ValueError(f"nbytes={nbytes} and threads={threads}: needed at least 0 and at least 1")
        self.file = open_file.make(Path(folder), nbytes, disk or Disk())
        self.folder, self.nbytes, self.direct = self.file.folder, self.file.nbytes, bool(self.file.direct)
        self.timeout, self.patience, self.owner = timeout, timeout, owner
        self.sums = Sums(self.nbytes) if checksums else None
        self.lock = threading.Lock()
        self.in_flight: list[Transfer] = []
        self.bytes_read = self.bytes_written = 0
        self._reads, self._writes, self._threads = _start(self.file, threads)
        self._end = weakref.finalize(self, _stop, [self._reads, self._writes], threads)
        self._end.atexit = False
        self._gone = "is closed"
        _FILES.add(self)

    def read(self, offset: int, into: Tensor, what: str = "") -> Future[None]:
        """Starts to fill `into` from byte `offset`; the result of the future is None when it is full.

        into: a contiguous tensor on the CPU, of any dtype. It must not be used before. Memory of `aligned` is filled
        without a copy. what: the reader's name for it ("op 7, opt_state/mu, tile 3"), with which errors begin.

        The future raises OffloadError, and CorruptError if the bytes are not those that were written. ValueError: a
        range outside the file, off a unit, or that is being written.
        """
        return self._begin("read", offset, into, what)

    def write(self, offset: int, source: Tensor, what: str = "") -> Future[None]:
        """Starts to write `source` from byte `offset` on; the result of the future is None when that is done.

        source: a contiguous tensor on the CPU, of any dtype. It must not change before. The future raises OffloadError;
        the range then holds anything. ValueError: see `read`.
        """
        return self._begin("write", offset, source, what)

    def wait(self, *transfers: Future[None]) -> None:
        """Returns when transfers have ended; raises the first error.

        HangError: one did not end in `timeout` seconds. It may still use its memory. Later waits do not wait again:
        they raise at once unless the disk has answered meanwhile.
        """
        _, late = wait(transfers, self.patience)
        if late:
            self.patience = 0.0
            raise self._hang(late)
        self.patience = self.timeout
        for transfer in transfers:
            transfer.result()

    def grow(self, nbytes: int) -> None:
        """Makes the file at least so large; what is new is zeros. Nothing may be in flight. Raises OffloadError."""
        if nbytes > self.nbytes:
            open_file.grow(self.file, nbytes)
            self.nbytes = self.file.nbytes
            if self.sums is not None:
                self.sums.grow(self.nbytes)

    def busy(self) -> list[str]:
        """Returns a line for each transfer that has not ended, the oldest first, for a report of a hang."""
        now = time.monotonic()
        with self.lock:
            return [f"{one} for {now - one.began:.1f} s" for one in self.in_flight]

    def close(self) -> None:
        """Ends what was started, and frees the file; a second call does nothing. Waits a minute at most."""
        with self.lock:
            self._end()
        until = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))
        if stuck := self.busy():
            log.warning("%s: the offload file stays open, a call does not return: %s", self.folder, "; ".join(stuck))

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, kind: str, offset: int, tensor: Tensor, what: str) -> Future[None]:
        memory = _bytes(tensor)
        transfer = Transfer(kind, offset, len(memory), what)
        if offset % UNIT or offset < 0 or offset + len(memory) > self.nbytes:
            raise ValueError(
                f"{transfer} of a file of {self.nbytes:,}: needed a range inside it, from a multiple of {UNIT:,} on"
            )
        move, queue = (blocks.read, self._reads) if kind == "read" else (blocks.write, self._writes)
        with self.lock:
            if not self._end.alive:
                raise OffloadError(self.folder, f"{transfer}: the offload file {self._gone}")
            for other in self.in_flight:
                if transfer.meets(other):
                    raise ValueError(f"{transfer} meets one that has not ended ({other}): wait for that one first")
            if memory.size:
                self.in_flight.append(transfer)
            else:
                transfer.future.set_result(None)
            for start in range(0, len(memory), BLOCK):
                part = memory[start : start + BLOCK]
                queue.put(partial(self._run, transfer, partial(move, self.file, self.sums, offset + start, part)))
        return transfer.future

    def _hang(self, late: set[Future[None]]) -> HangError:
        with self.lock:
            names = [str(one) for one in self.in_flight if one.future in late]
        doing = self.busy()
        more = [f"and {len(doing) - TOLD} more"] * (len(doing) > TOLD)
        lines = [
            f"{self.owner}: the disk of {self.folder} does not answer, in {self.timeout:g} s (Spec(timeout=)), to "
            f"{names[0] if names else 'a transfer that has just ended'}",
            *(f"in flight: {line}" for line in (*doing[:TOLD], *more)),
            "Look at the kernel's log and at the drive. What was in flight may still use its memory: start all ranks "
            "again, from the last checkpoint; Spec(nvme_path=) names another disk.",
        ]
        return HangError("\n  ".join(lines))

    def _run(self, transfer: Transfer, block: Callable[[], None]) -> None:
        """Runs a block of a transfer, unless one before it failed; the last block ends the transfer."""
        try:
            if transfer.error is None:
                block()
        except BaseException as error:
            transfer.error = error
        with self.lock:
            transfer.left -= 1
            if transfer.left:
                return
        blocks.forget(self.file, transfer.offset, transfer.nbytes)
        with self.lock:
            self.in_flight.remove(transfer)
            if transfer.error is None and transfer.kind == "read":
                self.bytes_read += transfer.nbytes
            elif transfer.error is None:
                self.bytes_written += transfer.nbytes
        transfer.end()

    def _forked(self) -> None:
        """In a child: the threads are not there, and the descriptor would keep the room of a dead parent."""
        self._end.detach()
        self._gone = "belongs to the process that made it, and this is a fork of that: train in the process that began"
        self.lock, self._threads = threading.Lock(), []
        self.file.close()


class Transfer:
    """A range that is being read or written.

    left: blocks that have not ended. error: of a block. `DiskFile._run` alone writes them.
    """

    def __init__(self, kind: str, offset: int, nbytes: int, what: str) -> None:
        self.kind, self.offset, self.nbytes, self.what = kind, offset, nbytes, what
        self.began, self.left = time.monotonic(), -(-nbytes // BLOCK)
        self.error: BaseException | None = None
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # a transfer that began cannot be cancelled

    def __str__(self) -> str:
        text = f"{self.kind} of {self.nbytes:,} bytes at byte {self.offset:,}"
        return f"{self.what}: {text}" if self.what else text

    def meets(self, other: Transfer) -> bool:
        """Whether the two share a unit that one of them writes."""
        apart = _units_end(self) <= other.offset or _units_end(other) <= self.offset
        return not apart and "write" in (self.kind, other.kind)

    def end(self) -> None:
        """Gives the future its result."""
        error, self.error = self.error, None
        if error is None:
            self.future.set_result(None)
            return
        if self.what and isinstance(error, (OffloadError, CorruptError)):
            named = type(error)(error.file, f"{self.what}: {error.text}", error.errno)
            named.__cause__ = error.__cause__
            error = named.with_traceback(error.__traceback__)
        self.future.set_exception(error)


def _units_end(transfer: Transfer) -> int:
    return transfer.offset + -(-transfer.nbytes // UNIT) * UNIT


def _bytes(tensor: Tensor) -> Bytes:
    """A tensor's own memory as bytes."""
    if not backend.of(tensor.device).on_host or not tensor.is_contiguous():
        how = "" if tensor.is_contiguous() else " that is not contiguous"
        raise ValueError(f"a tensor on {tensor.device}{how}: needed a contiguous tensor on the CPU")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


# --- threads; they know the file, not the DiskFile, so that one that nobody uses is collected ------------------------

Queue = SimpleQueue[Callable[[], None] | None]


def _start(file: OpenFile, threads: int) -> tuple[Queue, Queue, list[threading.Thread]]:
    """Starts the threads that read and those that write. The last that ends closes the file."""
    reads: Queue = SimpleQueue()
    writes: Queue = SimpleQueue()
    left = list(range(2 * threads))
    all_threads = []
    for name, queue in (("read", reads), ("write", writes)):
        for n in range(threads):
            thread = threading.Thread(target=_serve, args=(queue, left, file), name=f"fzero {name} {n}", daemon=True)
            thread.start()
            all_threads.append(thread)
    return reads, writes, all_threads


def _serve(queue: Queue, left: list[int], file: OpenFile) -> None:
    while (task := queue.get()) is not None:
        task()
        del task  # it holds the memory, and perhaps the last reference to the DiskFile
    if left.pop() == 0:
        file.close()


def _stop(queues: list[Queue], threads: int) -> None:
    for queue in queues:
        for _ in range(threads):
            queue.put(None)


_FILES: weakref.WeakSet[DiskFile] = weakref.WeakSet()  # for forks alone


def _forked() -> None:
    for file in _FILES:
        file._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
