"""nccl: a process group "nccl" whose bytes travel over gloo.

As NCCL's does, a collective runs on a stream of the library's own, after what the current stream was given before it;
`wait` puts what the current stream is given next after it, and the host goes on. Sums are taken in rank order.

Each group is a communicator with a stream of its own, and runs what it carries in order. Messages have no tags. They
travel on a thread: a receive that was started does not keep the host from what comes before its wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from standin import device, tensors
from standin.order import Agent
from standin.tensors import Cuda, Uses

NAME = "standin"
DTYPES = {torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32}
DTYPES |= {torch.float64, torch.bool}
CALLS: list[str] = []  # what was asked for, in order
SECONDS = 60.0  # that a message may take


class Message:
    """A message on its communicator's thread: started, and ended by who waits. A replayed graph does both again."""

    def __init__(self, thread: ThreadPoolExecutor, run: Callable[[], Any]) -> None:
        self.thread, self.run = thread, run
        self.going: deque[Future[Any]] = deque()

    def start(self) -> None:
        self.going.append(self.thread.submit(self.run))

    def end(self) -> None:
        if self.going:
            self.going.popleft().result(SECONDS)


class Work(dist._Work):
    def __init__(self, stream: Agent, kept: list[Cuda], message: Message | None = None) -> None:
        super().__init__()
        self.stream, self.clock, self.captured, self.kept = stream, dict(stream.clock), device.CAPTURE, kept
        self.message = message

    def wait(self, timeout: Any = None) -> bool:
        here = device.current_stream(self.stream.device or 0)
        device.joined(here, self.stream, self.captured, self.clock)
        if self.message is not None:  # the bytes are there when a kernel that runs at once reads them
            device.issue(here, "nccl join", [], self.message.end)
        self.kept = []
        return True


class Nccl(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.streams: dict[int, Agent] = {}
        self.thread = ThreadPoolExecutor(1)

    def getBackendName(self) -> str:
        return NAME

    def _run(
        self, what: str, read: torch.Tensor, written: torch.Tensor, run: Any, message: Message | None = None
    ) -> Work:
        for x in (read, written):
            if not isinstance(x, Cuda):
                raise RuntimeError(f"No backend type associated with device type {x.device.type}")
            if not x.inner.is_contiguous():
                raise ValueError(f"{what}: tensors must be contiguous")
            if x.dtype not in DTYPES:
                raise TypeError(f"{what}: NCCL has no {x.dtype}")
        if read.dtype != written.dtype or read.device != written.device:
            raise TypeError(f"{what}: output tensor must have the same type and device as input tensor")
        index = read.device.index
        assert isinstance(index, int)
        ours, here = (
            self.streams.get(index) or self.streams.setdefault(index, device.new_stream(index)),
            device.current_stream(index),
        )
        here.tick()
        device.joined(ours, here, device.CAPTURE if _is_captured(here) else None, dict(here.clock))
        CALLS.append(f"{what} {tuple(read.shape)} to {tuple(written.shape)} {read.dtype}")
        found: Uses = [*tensors.uses(read, False), *tensors.uses(written, True)]
        device.issue(ours, f"nccl {what}", found, run)
        return Work(ours, [read, written], message)

    def _all(self, mine: torch.Tensor) -> torch.Tensor:
        self.thread.submit(int).result(SECONDS)  # after the messages before it
        flat = mine.reshape(-1).contiguous().view(torch.uint8)
        out = torch.empty(self.size() * flat.numel(), dtype=torch.uint8)
        self.gloo._allgather_base(out, flat).wait()
        return out.view(mine.dtype).view(self.size(), -1)

    def _allgather_base(self, output: Any, input: Any, opts: Any = None) -> Work:
        if output.numel() != input.numel() * self.size():
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        to, mine = tensors._inner(output), tensors._inner(input)
        return self._run("all_gather", input, output, lambda: to.view(-1).copy_(self._all(mine).view(-1)))

    def _reduce_scatter_base(self, output: Any, input: Any, opts: Any) -> Work:
        if input.numel() != output.numel() * self.size():
            raise ValueError("input tensor must be the same type and size as output tensor times world_size")
        to, mine, op = tensors._inner(output), tensors._inner(input), opts.reduceOp

        def run() -> None:
            parts = self._all(mine).view(self.size(), self.size(), -1)[:, self.rank()]
            to.view(-1).copy_(_joined(parts, op))

        return self._run("reduce_scatter", input, output, run)

    def alltoall_base(self, output: Any, input: Any, to_sizes: Any, from_sizes: Any, opts: Any = None) -> Work:
        if input.numel() != output.numel() or input.numel() % self.size() or to_sizes or from_sizes:
            raise ValueError("all_to_all_single without split sizes takes equal parts")
        to, mine = tensors._inner(output), tensors._inner(input)

        def run() -> None:
            to.view(-1).copy_(self._all(mine).view(self.size(), self.size(), -1)[:, self.rank()].reshape(-1))

        return self._run("all_to_all", input, output, run)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # their names in 2.13.0

    def send(self, given: Any, peer: int, tag: int) -> Work:
        (one,) = given
        return self._message("send", one, partial(self.gloo.send, [tensors._inner(one)], peer, 0), peer)

    def recv(self, given: Any, peer: int, tag: int) -> Work:
        (one,) = given
        return self._message("recv", one, partial(self.gloo.recv, [tensors._inner(one)], peer, 0), peer)

    def _message(self, what: str, one: torch.Tensor, begin: Callable[[], Any], peer: int) -> Work:
        message = Message(self.thread, lambda: begin().wait())
        return self._run(f"{what} {self.rank()}-{peer}", one, one, message.start, message)

    def allreduce(self, given: Any, opts: Any) -> Work:
        (one,) = given
        mine, op = tensors._inner(one), opts.reduceOp
        return self._run("all_reduce", one, one, lambda: mine.view(-1).copy_(_joined(self._all(mine), op)))


def _is_captured(stream: Agent) -> bool:
    return device.CAPTURE is not None and stream in device.CAPTURE.streams


def _joined(parts: torch.Tensor, op: Any) -> torch.Tensor:
    total, *others = parts
    for other in others:
        total = torch.maximum(total, other) if op == dist.ReduceOp.MAX else total + other
    return total


def install() -> None:
    dist.Backend.register_backend(NAME, Nccl, devices=["cuda"])
    start, new, backend = dist.init_process_group, dist.new_group, dist.get_backend

    def init_process_group(given: Any = None, *args: Any, **kwargs: Any) -> None:
        start(NAME if given == "nccl" else given, *args, **kwargs)

    def new_group(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
        return new(*args, backend=NAME if backend == "nccl" else backend, **kwargs)

    def get_backend(group: Any = None) -> str:
        found = backend(group)
        return "nccl" if found == NAME else found

    dist.init_process_group, dist.new_group, dist.get_backend = init_process_group, new_group, get_backend
    dist.is_nccl_available = c10d.is_nccl_available = lambda: True
