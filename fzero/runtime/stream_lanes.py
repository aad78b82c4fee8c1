"""stream_lanes: the moves of one rank with a CUDA device, and its updates on the host.

Each direction between device and host has a stream. A copy starts behind what was issued before it on the current
stream, and `wait` puts what is issued later behind the copy: the host goes on. Updates on the host run in a thread, in
their order. Before memory of the host is used again, whoever uses it waits for the copies and the updates that are
still using it: that is decided by addresses, since slots are used again under other names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from fzero import backend
from fzero._torch_compat import below_autograd
from fzero.runtime.lanes import Call, Lanes, RankFile

Range = tuple[int, int]  # addresses on the host, the second behind the last


@dataclass(frozen=True)
class _Copy:
    """A copy on a stream, over a range of the host. done: the event behind it."""

    over: Range
    done: torch.cuda.Event


@dataclass(frozen=True)
class _Job:
    """Work of the thread, on ranges of the host. Of a copy the result is its event."""

    over: tuple[Range, ...]
    ended: Future[_Copy | None]


class StreamLanes(Lanes):
    """Lanes of a CUDA device.

    copies: by the buffer that they fill, the copies that the current stream has not waited for, in the order of their
    starts, or the thread's work that starts one. unseen: the copies that the host has not waited for. jobs: the
    thread's work whose end nobody has seen. Only the methods here write the three.
    """

    def __init__(self, device: torch.device, file: RankFile | None = None) -> None:
        super().__init__(file)
        self.device = device
        self.up, self.down = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.copies: dict[str, list[_Copy | _Job]] = {}
        self.unseen: list[_Copy] = []
        self.jobs: list[_Job] = []
        self.thread = ThreadPoolExecutor(1, "fzero-host")

    # --- moves

    def copy(self, name: str, source: torch.Tensor, target: torch.Tensor) -> None:
        self._reap()
        over = _range(source if target.is_cuda else target)
        start = partial(self._copy, self._mark(torch.cuda.current_stream(self.device)), source, target, over)
        if self._jobs_on(over):
            self.copies.setdefault(name, []).append(self._submit(start, (over,)))
        else:
            self.unseen.append(start())
            self.copies.setdefault(name, []).append(self.unseen[-1])

    def read(self, name: str, offset: int, into: torch.Tensor, what: str) -> None:
        self._see(_range(into))
        super().read(name, offset, into, what)

    def write(self, name: str, offset: int, source: torch.Tensor, what: str) -> None:
        self._see(_range(source))
        super().write(name, offset, source, what)

    def wait(self, name: str) -> None:
        if name not in self.copies:
            return super().wait(name)
        first = self.copies[name].pop(0)
        if not self.copies[name]:
            del self.copies[name]
        copy = first.ended.result() if isinstance(first, _Job) else first
        if isinstance(first, _Job):
            self._reap()
        assert copy is not None
        return torch.cuda.current_stream(self.device).wait_event(copy.done)

    # --- the host

    def on_host(self, calls: list[Call], tensors: Sequence[torch.Tensor], what: str) -> list[Call]:
        over = tuple(_range(tensor) for tensor in tensors)

        def run() -> None:
            try:
                for call in calls:
                    call()
            except Exception as error:
                error.add_note(f"in {what}")
                raise

        def submit() -> None:
            self._reap()
            self.unseen = [copy for copy in self.unseen if not copy.done.query()]
            copies: list[_Copy | _Job] = [copy for copy in self.unseen if any(_meet(copy.over, used) for used in over)]
            self._submit(partial(_after, [*copies, *self._jobs_on(*over)], run), over)

        return [submit]

    def finish(self) -> None:
        self._end_jobs()
        self.unseen.clear()
        torch.cuda.current_stream(self.device).synchronize()

    def drain(self) -> None:
        super().drain()
        if self.jobs or self.unseen or self.copies:  # the step before did not finish
            for job in self.jobs:
                job.ended.exception()
            self.up.synchronize()
            self.down.synchronize()
            for left in (self.jobs, self.unseen, self.copies):
                left.clear()

    def _reap(self) -> None:
        """Forgets the thread's work that has ended; a copy that it started is one that the host has not seen."""
        while self.jobs and self.jobs[0].ended.done():
            copy = self.jobs.pop(0).ended.result()
            if copy is not None:
                self.unseen.append(copy)

    def _see(self, over: Range) -> None:
        """Waits for the work and the copies that use a range of the host."""
        if self._jobs_on(over):
            self._end_jobs()
        for copy in [c for c in self.unseen if _meet(c.over, over)]:
            copy.done.synchronize()
            self.unseen.remove(copy)

    def _jobs_on(self, *ranges: Range) -> list[_Job]:
        """The thread's work that uses one of these ranges and has not been seen to end."""
        return [job for job in self.jobs if any(_meet(used, over) for used in job.over for over in ranges)]

    def _end_jobs(self) -> None:
        """Waits for all of the thread's work. Raises the first error."""
        while self.jobs:
            self.jobs[-1].ended.exception()
            self._reap()

    def _submit(self, call: Callable[[], _Copy | None], over: tuple[Range, ...]) -> _Job:
        before = self.jobs[-1].ended if self.jobs else None

        def run() -> _Copy | None:
            if before is not None:
                before.result()  # nothing runs behind work that failed
            with torch.no_grad(), torch.cuda.device(self.device), below_autograd():
                return call()

        job = _Job(over, self.thread.submit(run))
        self.jobs.append(job)
        return job

    def _copy(self, after: torch.cuda.Event, source: torch.Tensor, target: torch.Tensor, over: Range) -> _Copy:
        """Copies on the stream of its direction, behind an event."""
        stream = self.up if target.is_cuda else self.down
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source.view(target.shape), non_blocking=True)
        return _Copy(over, self._mark(stream))

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event behind what a stream was given."""
        event = torch.cuda.Event(blocking=True)  # a thread that waits for it sleeps
        event.record(stream)
        return event


def _after(work: Sequence[_Copy | _Job], run: Call) -> None:
    """Calls `run` when copies are done. Of the thread's own work, which has ended, a copy may still be under way."""
    for one in work:
        copy = one.ended.result() if isinstance(one, _Job) else one
        if copy is not None:
            copy.done.synchronize()
    run()


def _range(tensor: torch.Tensor) -> Range:
    """The addresses that a tensor lies in."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (last + 1) * tensor.element_size() if tensor.numel() else first


def _meet(one: Range, other: Range) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def lanes_for(device: torch.device, file: RankFile | None = None) -> Lanes:
    """Returns the lanes of a rank whose device this is. file: its file, if something of its state lies on disk."""
    return StreamLanes(device, file) if backend.of(device).on_streams else Lanes(file)
