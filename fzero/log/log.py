"""log: `Log`, which reads a state's metrics every n steps on rank 0 and hands the record to a file and to trackers."""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from fzero import backend, tree
from fzero.cost.memory import account
from fzero.errors import SpecError, TreeError
from fzero.log.progress_log import Progress
from fzero.log.trackers import Tracker
from fzero.optim.schedules import Schedule
from fzero.state.state import State

PEAK_FLOPS = {  # operations a second in 16 bits without sparsity, by words in a device's name; from the vendor's sheets
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "V100": 125e12,
}  # fmt: skip


class Log:
    """Writes what a run does. Call it after every step: `log(state)`. Ranks but the first do nothing.

    path: a file of JSON lines, appended to; its folder is made. None: no file. every: steps between two records. to:
    trackers: a run of W&B, a SummaryWriter, the modules trackio and mlflow, or any object with log(dict, step=).
    tokens: tokens of a step over all ranks. flops: floating-point operations of a step over all ranks (about 6 x
    parameters x tokens); with it `mfu`, their share of what the devices can do. peak_flops: operations a second of one
    device. None: known for some devices, else no mfu. rate: the learning rate, a number or a schedule, to be shown.
    total: the run's steps, for the bar.
    show: a bar on a terminal, a line for each record elsewhere; False: neither.

    A record is read from the device at once; between two, nothing is read. What fails to be written (a tracker, a disk)
    is a warning, and the run goes on. docs/log.md has the names of a record. Raises SpecError for an argument that
    cannot be used.

    >>> import fzero, tempfile
    >>> spec = fzero.Spec(loss=lambda p, x: (x @ p["w"]).square().mean(), optimizer=fzero.optim.sgd(0.1), clip_norm=1.0)
    >>> state = fzero.init({"w": torch.ones(2, 1)}, spec)
    >>> with tempfile.TemporaryDirectory() as folder, Log(f"{folder}/log.jsonl", every=2, show=False) as log:
    ...     for step in range(4):
    ...         state = fzero.step(state, torch.ones(3, 2))
    ...         record = log(state)
    >>> record["step"], record["loss"] < 4, list(record)[:4]
    (4, True, ['step', 'grad_norm', 'loss', 'step_seconds'])
    """

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        every: int = 10,
        to: Sequence[Any] = (),
        tokens: int | None = None,
        flops: float | None = None,
        peak_flops: float | None = None,
        rate: float | Schedule | None = None,
        total: int | None = None,
        show: bool = True,
    ) -> None:
        if type(every) is not int or every < 1:
            raise SpecError(f"Log(every={every!r}): needed a positive int, the steps between two records")
        for name, value in (("tokens", tokens), ("flops", flops), ("peak_flops", peak_flops), ("total", total)):
            if value is not None and not (type(value) in (int, float) and value > 0):
                raise SpecError(f"Log({name}={value!r}): needed a number > 0, or None")
        if not (rate is None or callable(rate) or type(rate) in (int, float)):
            raise SpecError(f"Log(rate={rate!r}): needed a number, a schedule (as fzero.optim.warmup_cosine), or None")
        if not isinstance(to, Iterable):
            raise SpecError(f"Log(to=...) is {type(to).__name__}: needed a list of trackers, as to=[tracker]")
        if path is not None and Path(path).is_dir():
            raise SpecError(f"Log({str(path)!r}) is a folder: needed a file, as {str(Path(path) / 'log.jsonl')!r}")
        self.path: Path | None = None if path is None else Path(path)
        self.every: int = every
        self.rate: float | Schedule | None = rate
        self.tokens: int | None = tokens
        self.flops: float | None = flops
        self.peak_flops: float | None = peak_flops
        self.trackers: list[Tracker] = [Tracker(target) for target in to]
        self.total: int | None = total
        self.show: bool = show
        self._progress: Progress | None = None
        self._file: FileIO | None = None
        self._last: tuple[int, float] | None = None  # the step and the time of the last record
        self._planned: tuple[Any, int] = (None, 0)  # a program and its planned peak
        self._warned = False

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, state: State, **more: float) -> dict[str, Any] | None:
        """Takes notice of a step. Returns the record that it wrote, or None. `more`, numbers or 0-d tensors, joins it.
        Raises SpecError for what is no number, TreeError for what is no state."""
        if not isinstance(state, State):
            raise TreeError(f"log(state) needs the State that fzero.step returned, got {type(state).__name__}")
        if state.runtime.rank != 0:
            return None
        if self._last is None:
            self._last = (state.step, time.monotonic())  # the first step compiles: it is no measure of speed
        if state.step % self.every:
            return None
        record = self._record(state, more)
        self._write(record)
        for tracker in self.trackers:
            tracker.give({name: value for name, value in record.items() if name != "step"}, record["step"])
        if self.show:
            self._progress = self._progress or Progress(self.total)
            self._progress.show(record)
        return record

    def close(self) -> None:
        """Ends the bar and closes the file. Trackers are the caller's."""
        if self._progress is not None:
            self._progress.close()
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):  # NFS tells of a full disk here; what was to be said is said
                file.close()

    # --- pieces

    def _record(self, state: State, more: dict[str, float]) -> dict[str, Any]:
        own = {"step": state.step}  # also where a metric has that name
        record: dict[str, Any] = own | _metrics(state) | _numbers(more) | own
        now = time.monotonic()  # after the read, which waits for the device
        steps, began = self._last or (state.step, now)
        self._last = (state.step, now)
        if self.rate is not None:
            count = max(state.step - 1 - int(record.get("skipped", 0)), 0)
            record["rate"] = float(self.rate(torch.tensor(count)) if callable(self.rate) else self.rate)
        if state.step > steps:
            seconds = (now - began) / (state.step - steps)
            record["step_seconds"] = seconds
            if self.tokens is not None:
                record["tokens_per_second"] = self.tokens / seconds
            peak = self.peak_flops or _peak_flops(state.runtime.device)
            if self.flops is not None and peak is not None:
                record["mfu"] = self.flops / seconds / (peak * state.runtime.world_size)
        return record | self._memory(state)

    def _memory(self, state: State) -> dict[str, int]:
        program = state.program
        if program is not None and program is not self._planned[0]:
            self._planned = (program, account(program).peak)
        planned = {} if program is None else {"planned_peak_bytes": self._planned[1]}
        device = state.runtime.device
        if (peak := backend.of(device).calls.peak(device)) is not None:
            return {**planned, "measured_peak_bytes": peak}
        scale = 1 if sys.platform == "darwin" else 1024  # the unit of ru_maxrss
        return {**planned, "process_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale}

    def _write(self, record: dict[str, Any]) -> None:
        if self.path is None:
            return
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  # closed by close
            line = (json.dumps({**record, "time": time.time()}) + os.linesep).encode()
            end = self._file.seek(0, os.SEEK_END)
            if self._file.write(line) != len(line):  # the rest had no room, and half a record would spoil the file
                self._file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._warned:
                self._warned = True
                said = f"{self.path}: cannot be written at step {record['step']}: {error}. Training goes on"
                warnings.warn(said, RuntimeWarning, stacklevel=3)


def _metrics(state: State) -> dict[str, float]:
    """The 0-d metrics of a state by path, in one read of the device."""
    paths, leaves, _ = tree.flatten(dict(state.metrics))
    scalars = {path: leaf for path, leaf in zip(paths, leaves, strict=True) if _is_scalar(leaf)}
    if not scalars:
        return {}
    read = torch.stack([leaf.detach().to(torch.float64) for leaf in scalars.values()]).tolist()
    return dict(zip(scalars, read, strict=True))


def _numbers(given: Mapping[str, Any]) -> dict[str, float]:
    """What the caller adds, as numbers."""
    for name, value in given.items():
        if name == "step" or not (isinstance(value, (int, float)) or _is_scalar(value)):
            raise SpecError(f"log(state, {name}={value!r}): needed a number, and another name than step")
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def _is_scalar(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and not leaf.is_complex()


def _peak_flops(device: torch.device) -> float | None:
    name = backend.of(device).calls.describe(device)
    return next((flops for words, flops in PEAK_FLOPS.items() if all(w in name for w in words.split())), None)
