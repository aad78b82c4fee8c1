"""checkpointer: saves while training goes on, stops at a signal, and resumes from the last save.

A save in the background. `after` copies this rank's part of the state to host memory. Training waits for this copy
only. A thread then writes the copy; it uses a separate gloo group. At most one save is in flight. If the next save is
due before all ranks have finished the last one, it is delayed to the first step at which all have. So a slow disk makes
saves less frequent, not steps slower, and a rank holds at most one copy.

How ranks agree. Threads end or fail, and signals arrive, at different times on different ranks. But all ranks must act
after the same step, or they would wait for one another in different places. So each rank sends four flags in the note
that opens every `fzero.step` (`Session.flags`, `Session.any_rank_flags`): my save runs, my save failed, I got SIGTERM,
I got SIGINT. All ranks act after step k on the flags that any rank sent before step k. No further message is sent.

A signal. SIGTERM or SIGINT is sent as a flag with the next step. After that step all ranks save and exit with status
143 or 130. A second signal of the same kind, or one before there is a state to save, acts as without a Checkpointer.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import types
from collections.abc import Callable, Mapping
from enum import IntFlag
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fzero import api
from fzero._torch_compat import untraced_by_dynamo
from fzero.capture.short_tracebacks import short_tracebacks
from fzero.checkpoint.commit import begun
from fzero.checkpoint.load import load
from fzero.checkpoint.manifest import read, step_name
from fzero.checkpoint.save import Snapshot, snapshot, write
from fzero.disk.calls import Disk
from fzero.errors import CheckpointError, HangError
from fzero.hardware import Hardware
from fzero.session.session import Session, session_of
from fzero.spec import Spec
from fzero.state.state import State

Extra = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None

log = logging.getLogger("fzero")
PATIENCE_SECONDS = 30.0  # for a save in flight once an error has ended the loop: the rank it waits for may be gone
LOST_SECONDS = 0.25  # the same once the process group is lost: only a commit that needs no other rank can still end


class RankFlags(IntFlag):
    """The bits that a rank sends to the others with every step."""

    SAVING = 1
    FAILED = 2
    SIGTERM = 4
    SIGINT = 8


class Checkpointer:
    """Saves a state every `every` steps while training continues, and resumes from the newest checkpoint.

    dir: the directory of the run's checkpoints, the same on all ranks. every: steps between saves; None saves only on
    request. keep: how many checkpoints to keep; None keeps all. background: False writes in the training loop. All
    ranks make the same calls. Within `with`, SIGTERM and the first Ctrl-C save once after the next step and raise
    SystemExit (143, 130) on all ranks.

    The main thread writes all fields. The writing thread (`_Writing`) writes only its `error` and `flags`. A signal
    handler, which runs on the main thread, writes `_signals`.

    >>> import tempfile, fzero
    >>> spec = fzero.Spec(loss=lambda p, b: ((b @ p["w"]) ** 2).mean(), optimizer=fzero.optim.sgd(0.1))
    >>> folder = tempfile.mkdtemp()
    >>> def train(steps):
    ...     with Checkpointer(folder, every=2, keep=1) as saver:
    ...         state = saver.resume({"w": torch.ones(2)}, spec)
    ...         first = state.step, saver.extra
    ...         while state.step < steps:
    ...             state = fzero.step(state, torch.eye(2))
    ...             saver.after(state, extra={"seen": 2 * state.step})
    ...     return first
    >>> train(4), train(6)
    ((0, {}), (4, {'seen': 8}))
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],
        *,
        every: int | None = None,
        keep: int | None = None,
        background: bool = True,
        disk: Disk | None = None,
    ) -> None:
        """Raises CheckpointError for an option out of range."""
        self.dir: Path = Path(dir).absolute()  # a program may go to another directory while a thread writes
        self.every: int | None = every
        self.keep: int | None = keep
        self.background: bool = background
        for name, number in (("every", every), ("keep", keep)):
            if number is not None and (type(number) is not int or number < 1):
                raise CheckpointError(self.dir, f"Checkpointer({name}={number!r}): needed a positive int, or None")
        self.disk: Disk = disk or Disk()
        self.extra: Mapping[str, Any] = {}
        self.saved: int | None = None  # the step last saved or begun to be
        self._due: tuple[State, Extra] | None = None  # a save that is due, or late
        self._writing: _Writing | None = None
        self._taken: Snapshot | None = None  # its memory serves the next
        self._runtime: Session | None = None
        self._group: Any = None
        self._signals = RankFlags(0)
        self._handlers: dict[int, Any] = {}  # those that were there before
        self._inside = False

    @short_tracebacks
    @untraced_by_dynamo
    def resume(
        self,
        params: Any,
        spec: Spec,
        *,
        key: torch.Tensor | None = None,
        batch_like: Any = None,
        hardware: str | Hardware | None = None,
    ) -> State:
        """Returns the newest committed state in `dir`, or that of `fzero.init` if there is none yet.

        params, spec, key: as in `fzero.init`. batch_like, hardware: for a new run with `mesh="auto"`, as there; a
        checkpoint has its plan.

        `extra` then holds the values that were saved with the state; it is {} for a new run. Raises CorruptError if all
        checkpoints are damaged: a new run would hide that.
        """
        if goes_on := begun(self.dir, self.disk):
            state = load(self.dir, spec, like=params, key=key, disk=self.disk)
            self.extra = read(self.dir / step_name(state.step), self.disk).extra or {}
        else:
            state = api.init(params, spec, key=key, batch_like=batch_like, hardware=hardware)
        self._join(session_of(state))
        self.saved = state.step if goes_on else None
        return state

    @short_tracebacks
    @untraced_by_dynamo
    def after(self, state: State, extra: Extra = None) -> None:
        """Begins a save if one is due, and acts on signals. Call it after each step.

        extra: JSON to save along, such as the position in the data, or a function that returns it. Raises
        CheckpointError, on all ranks after the same step, if an earlier save failed. The state is then still valid, and
        the next save will be tried. Raises SystemExit after a signal. If the save before it fails, that is logged, and
        SystemExit is raised anyway.
        """
        runtime = self._join(session_of(state))
        any_rank = RankFlags(runtime.any_rank_flags)
        if stop := any_rank & (RankFlags.SIGTERM | RankFlags.SIGINT):
            number = signal.SIGTERM if RankFlags.SIGTERM in stop else signal.SIGINT
            try:
                self.save(state, extra)
                log.info("fzero: %s: step %d is saved in %s", number.name, state.step, self.dir)
            except CheckpointError as error:  # training stops without a save too
                log.error("fzero: %s: step %d is not saved: %s", number.name, state.step, error)
            raise SystemExit(128 + number)
        if self._due or (self.every is not None and state.step % self.every == 0 and self.saved != state.step):
            self._due = (state, extra() if callable(extra) else extra)  # now: later it would tell of a later position
        if self._writing is not None and RankFlags.SAVING not in any_rank:
            self._finish(others_failed=RankFlags.FAILED in any_rank)
        if self._due and self._writing is None:
            self._begin(*self._due)

    @short_tracebacks
    @untraced_by_dynamo
    def save(self, state: State, extra: Extra = None) -> None:
        """Saves now, and returns when the checkpoint is committed. Raises CheckpointError on all ranks."""
        self._join(session_of(state))
        try:
            self._finish()
        except HangError:
            raise
        except Exception as error:
            log.warning("fzero: an earlier save failed: %s", error)
        if self.saved != state.step:
            self._begin(state, extra)
            self._finish()

    def close(self) -> None:
        """Waits for the save in flight, and makes a save that was delayed. Raises CheckpointError on all ranks."""
        self._finish()
        if self._due and not self._due[0].life.ended:
            self.save(*self._due)

    def __enter__(self) -> Checkpointer:
        self._inside, self._signals = True, RankFlags(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for the save in flight, and restores signal handlers and flags. Raises the save's error only if nothing
        else was raised."""
        try:
            if kind is None:
                self.close()
            else:
                lost = self._runtime is not None and self._runtime.presence.hang is not None
                self._finish(patience=LOST_SECONDS if lost else PATIENCE_SECONDS)
        except Exception as error:
            if kind is None:
                raise
            log.error("fzero: the save of the last checkpoint failed: %s", error)
        finally:
            for number in list(self._handlers):
                self._restore(number)
            self._inside = False
            if self._runtime is not None:
                self._runtime.flags = lambda: 0
                self._runtime = None
            if kind is None:  # no later step sent it to the other ranks
                for flag in RankFlags.SIGTERM, RankFlags.SIGINT:
                    if flag in self._signals:
                        signal.raise_signal(signal.Signals[str(flag.name)])

    # --- pieces

    def _listen(self) -> None:
        if self._inside and not self._handlers and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):  # which no other thread may do
                self._handlers[number] = signal.getsignal(number)
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        self._signals |= RankFlags.SIGTERM if number == signal.SIGTERM else RankFlags.SIGINT
        self._restore(number)

    def _restore(self, number: int) -> None:
        signal.signal(number, self._handlers.pop(number) or signal.SIG_DFL)

    def _flags(self) -> int:
        return self._signals | (RankFlags(0) if self._writing is None else self._writing.flags)

    def _join(self, runtime: Session) -> Session:
        """Joins the flags of this runtime's steps. The first time, all ranks make the group that writes."""
        if self._runtime is not runtime:
            if self._group is None and runtime.world_size > 1:
                self._group = dist.new_group(backend="gloo")
            self._runtime, self.saved = runtime, None  # of another state this step is not saved yet
            runtime.flags = self._flags
            self._listen()
        return runtime

    def _begin(self, state: State, extra: Extra) -> None:
        self._taken = snapshot(state, extra=extra() if callable(extra) else extra, reuse=self._taken)
        taken = self._taken
        self.saved, self._due = state.step, None
        self._writing = _Writing(lambda: self._write(taken))
        session_of(state).any_rank_flags |= RankFlags.SAVING  # until the next step sends them
        if not self.background:
            self._finish()

    def _write(self, taken: Snapshot) -> None:
        write(taken, self.dir, keep=self.keep, group=self._group, disk=self.disk)

    def _finish(self, *, others_failed: bool = False, patience: float | None = None) -> None:
        """Waits for the save in flight, if any, and raises its error; HangError if a rank is silent for the timeout.
        patience: seconds after which it is given up."""
        if self._writing is None:
            return
        writing, self._writing, step = self._writing, None, self.saved
        taken, self._taken = self._taken, None  # until the save has ended, its thread reads that memory
        if patience is None and self._runtime is not None:
            self._runtime.presence.wait_for(writing.wait, f"the save of step {step}")
        elif not writing.wait(patience):
            raise CheckpointError(self.dir, f"step {step} was not written within {patience:g} s: it is given up")
        self._taken = taken
        if writing.error is not None or others_failed:
            self.saved = None
            raise writing.error or CheckpointError(self.dir, f"another rank could not save step {step}: see its error")


class _Writing:
    """A save in flight, on a thread of its own: `save` runs there from the constructor on.

    That thread writes `error`, the error that the save raised, and then `flags`. Nobody writes the other fields.
    """

    def __init__(self, save: Callable[[], None]) -> None:
        self.save, self.flags = save, RankFlags.SAVING
        self.error: BaseException | None = None
        # a daemon: a process that ends does not wait for a lost peer
        self.thread = threading.Thread(target=self._run, name="fzero-save", daemon=True)
        self.thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the save has ended, or for so many seconds. Returns whether it has ended."""
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def _run(self) -> None:
        try:
            self.save()
        except BaseException as error:
            self.error = error
        self.flags = RankFlags(0) if self.error is None else RankFlags.FAILED
