"""progress: what takes longer than two seconds says so: a bar of rich on a terminal, a line now and then elsewhere.

    with progress.shown("saving step 120", total=nbytes, unit="B") as work:
        for part in parts:
            ...
            work.advance(part.nbytes)

Only rank 0 shows anything, on stderr, and `FZERO_PROGRESS=0` nothing at all. What is shown within something that is
shown is a part of its line, not a second one. All bars of a process are one display: a terminal has one last line.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TextIO

import torch.distributed as dist

AFTER = 2.0  # seconds of silence
EVERY = 10.0  # seconds between two lines
REDRAWN = 0.2  # seconds between two looks of a bar


class Work:
    """Something that takes long. done: of `total`, in `unit` ("B": bytes); total 0: not known. now: what it does.
    inner: a part of it that is shown with it."""

    def __init__(self, what: str, total: float = 0, unit: str = "") -> None:
        self.what, self.total, self.unit, self.done, self.now = what, total, unit, 0.0, ""
        self.inner: Work | None = None
        self.failed = True  # until it has come to its end
        self.began, self.ended = time.monotonic(), threading.Event()

    def advance(self, amount: float = 1) -> None:
        """So much more is done."""
        self.done += amount

    @property
    def amount(self) -> str:
        """How much is done, as text; "" where no total is known.

        >>> work = Work("reading", 3e9, "B")
        >>> work.advance(1.5e9)
        >>> work.amount
        '1.5 of 3 GB'
        """
        if not self.total:
            return ""
        if self.unit != "B":
            return f"{self.done:g} of {self.total:g} {self.unit}".rstrip()
        scale, unit = next((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if self.total >= s or u == "kB")
        return f"{self.done / scale:.3g} of {self.total / scale:.3g} {unit}"

    def __str__(self) -> str:
        inner = str(self.inner or "")
        return ", ".join(part for part in (self.what, self.amount, self.now, inner) if part)


_shown: ContextVar[Work | None] = ContextVar("fzero_progress", default=None)  # a thread has its own


@contextmanager
def shown(what: str, total: float = 0, unit: str = "") -> Iterator[Work]:
    """What is in it is shown from the third second on.

    >>> with shown("a moment", total=2) as work:
    ...     work.advance()
    """
    outer, work = _shown.get(), Work(what, total, unit)
    watcher = None
    if outer is not None:
        outer.inner = work
    elif _wanted():
        watcher = threading.Thread(target=_watch, args=(work,), name="fzero progress", daemon=True)
        watcher.start()
    token = _shown.set(work)
    try:
        yield work
        work.failed = False
    finally:
        _shown.reset(token)
        work.ended.set()
        if outer is not None:
            outer.inner = None
        if watcher is not None:
            watcher.join()


@contextmanager
def quietly() -> Iterator[None]:
    """What is in it is not shown: it says by itself how far it is."""
    token = _shown.set(Work(""))
    try:
        yield
    finally:
        _shown.reset(token)


def now(words: str) -> None:
    """Says in what is shown around it, if anything is, what it does now."""
    if (work := _shown.get()) is not None:
        work.now = words


def advance(amount: float = 1) -> None:
    """So much more is done of what is shown around it, if anything is."""
    if (work := _shown.get()) is not None:
        work.advance(amount)


def _wanted() -> bool:
    first = (
        dist.get_rank() == 0 if dist.is_available() and dist.is_initialized() else os.environ.get("RANK", "0") == "0"
    )
    return first and os.environ.get("FZERO_PROGRESS") != "0"


def _watch(work: Work) -> None:
    """Runs beside the work, until it ends."""
    if work.ended.wait(AFTER):
        return
    stream = sys.stderr
    display = Display.on(stream)
    if display is None:
        with suppress(OSError, ValueError):  # a full disk, a reader that is gone, a stream that was closed
            _print(work, stream)
        return
    task = display.add(work.total or None)
    while not work.ended.wait(REDRAWN):
        part = work if work.total else work.inner or work  # read once: the work goes on beside
        display.show(task, str(work), part.done, part.total or None)
    display.remove(task)


def _print(work: Work, stream: TextIO | None) -> None:
    """Writes a line now and then, and one at the end of the work."""
    said = False
    while stream is not None and not (said and work.ended.wait(EVERY)):
        print(f"fzero: {work} ({time.monotonic() - work.began:.0f} s)", file=stream, flush=True)
        said = True
    if said:
        ended = "failed after" if work.failed else "done in"
        print(f"fzero: {work.what}: {ended} {time.monotonic() - work.began:.0f} s", file=stream, flush=True)


class Display:
    """The bars of a process on its terminal, with rich. A last bar that is removed ends it."""

    _one: Display | None = None
    _lock = threading.Lock()

    def __init__(self, stream: TextIO) -> None:
        """Raises ImportError where rich is not installed."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
        self.bars: Any = Progress(*columns, console=Console(file=stream))
        self.tasks: set[int] = set()

    @classmethod
    def on(cls, stream: TextIO | None) -> Display | None:
        """The display; None where there is no terminal, or no rich."""
        if stream is None or stream.closed or not stream.isatty():
            return None
        with cls._lock:
            try:
                cls._one = cls._one or cls(stream)
            except ImportError:
                return None
            return cls._one

    def add(self, total: float | None) -> int:
        """A bar more; of no total: one without an end."""
        with self._lock:
            if not self.tasks:
                self.bars.start()
            task: int = self.bars.add_task("", total=total)
            self.tasks.add(task)
            return task

    def show(self, task: int, words: str, done: float, total: float | None) -> None:
        """Moves a bar."""
        self.bars.update(task, description=words, completed=done, total=total)

    def remove(self, task: int, keep: bool = False) -> None:
        """Takes a bar away, or leaves it as it is for the reader."""
        with self._lock:
            self.tasks.discard(task)
            if not keep:
                self.bars.remove_task(task)
            if not self.tasks:
                self.bars.stop()
                type(self)._one = None
