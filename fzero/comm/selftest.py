"""selftest: starts two ranks on this machine and tries each transport between them, for `fzero doctor`.

Each rank is a process. Every transport gathers and reduces the same buffers a few times. The bits must be those of the
sum that is made here. The best time gives the bytes that a rank receives per second.

`along_axes` measures the axes of a mesh between the ranks of a real run.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fzero.comm import heartbeat
from fzero.comm.agree import tell
from fzero.comm.group import Line, lines, open_world
from fzero.comm.rendezvous import meet
from fzero.comm.shared_memory import Shared
from fzero.comm.transfers import P2P, gloo
from fzero.errors import FzeroError
from fzero.ir.mesh import Mesh
from fzero.ir.op import make_op
from fzero.ir.records import Ref

WORLD = 2
BUFFER_BYTES = 16 << 20
TIMES = 5
SECONDS = 60.0


class LoopbackError(FzeroError, RuntimeError):
    """Two ranks of this machine could not be started, or did not end."""


@dataclass(frozen=True)
class TransportResult:
    """The result of one transport: whether its bits were right, and its speed by kind of transfer.

    mb_per_s: MiB per second that a rank receives. lack: the reason why this transport does not work here; "" if it
    works.
    """

    right: bool
    mb_per_s: dict[str, float] = field(default_factory=dict)
    lack: str = ""


def run(seconds: float = SECONDS) -> dict[str, TransportResult]:
    """Returns the result of each transport, by name. Raises LoopbackError if two ranks cannot run within `seconds`."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    command = [sys.executable, "-c", "from fzero.comm import selftest; selftest.rank()"]
    pipe = subprocess.PIPE
    ranks = [
        subprocess.Popen(command, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=pipe, stderr=pipe)
        for r in range(WORLD)
    ]
    until = time.monotonic() + seconds
    try:
        outputs = [process.communicate(timeout=max(until - time.monotonic(), 0.1)) for process in ranks]
    except subprocess.TimeoutExpired:
        raise LoopbackError(f"two ranks did not end within {seconds:g} s") from None
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for r, process in enumerate(ranks):
        if process.returncode:
            raise LoopbackError(
                f"rank {r}: {' '.join(outputs[r][1].decode(errors='replace').strip().splitlines()[-1:])}"
            )
    return {name: TransportResult(**result) for name, result in json.loads(outputs[0][0].splitlines()[-1]).items()}


def rank() -> None:
    """Runs in each of the two processes: prints the result of each transport, as JSON."""
    number, world = open_world("cpu", SECONDS / 2)
    host, why = meet(number, world)
    plain = partial(torch.empty, dtype=torch.uint8)
    ways: dict[str, tuple[Any, Callable[[int], torch.Tensor]]] = {
        "p2p": (P2P(Line.whole(number, world)), plain),
        "gloo": (gloo(Line.whole(number, world)), plain),
    }
    if host is not None:
        ways["shared"] = (Shared(host, Line.whole(number, world)), host.allocate)
    results = {name: vars(tried(comm, memory, number, world)) for name, (comm, memory) in ways.items()}
    if host is None:
        results["shared"] = vars(TransportResult(False, lack=f"not possible: {why}"))
    dist.destroy_process_group()
    print(json.dumps(results), flush=True)
    gc.freeze()  # Python ends without a walk over all that torch made: a third of a second


def tried(comm: Any, memory: Callable[[int], torch.Tensor], number: int, world: int) -> TransportResult:
    """Returns the result of one transport, which gathers all parts and reduces that buffer, equal on all ranks."""
    part = BUFFER_BYTES // 4 // world
    own, whole, total = (memory(4 * n).view(torch.float32) for n in (part, part * world, part))
    scratch = memory(4 * part * (world - 1)).view(torch.float32).view(world - 1, part)
    gather = make_op("all_gather", [Ref("own")], [Ref("whole")])
    reduce = make_op("reduce_scatter", [Ref("whole")], [Ref("total"), Ref("scratch")], op="sum")
    values = [torch.randn(part, generator=torch.Generator().manual_seed(r), dtype=torch.float32) for r in range(world)]
    expected = values[number].clone()
    for _ in range(1, world):
        expected += values[number]
    own.copy_(values[number])
    best: dict[str, float] = {}
    right = True
    for _ in range(TIMES):
        for name, op, tensors in (
            ("all-gather", gather, [own, whole]),
            ("reduce-scatter", reduce, [whole, total, scratch]),
        ):
            dist.barrier()
            began = time.perf_counter()
            comm.start("x", op, tensors)
            comm.wait("x")
            comm.settle("x")
            best[name] = min(best.get(name, float("inf")), time.perf_counter() - began)
        right = right and torch.equal(whole, torch.cat(values)) and torch.equal(total, expected)
    moved = BUFFER_BYTES * (world - 1) / world / (1 << 20)
    return TransportResult(right, {name: moved / seconds for name, seconds in best.items()})


def along_axes(mesh: Mesh, seconds: float = SECONDS) -> dict[str, float]:
    """Returns the GB per second that a rank receives by gloo's messages, by axis with several ranks.

    All lines of an axis run at one time; the slowest rank counts. Collective over the ranks that torchrun started. It
    makes and ends their process group.
    """
    number, world = open_world("cpu", seconds)
    try:
        found = {}
        for axis, line in lines(mesh, number, torch.device("cpu"), heartbeat.of()).items():
            if axis in mesh.names:
                found[axis] = min(float(text) for text in tell(repr(_gathered(line)).encode(), world, None))
        return found
    finally:
        dist.destroy_process_group()


def _gathered(line: Line) -> float:
    """GB per second that this rank receives in an all-gather of BUFFER_BYTES; the best of TIMES."""
    part = BUFFER_BYTES // line.size
    own, whole = torch.ones(part, dtype=torch.uint8), torch.empty(part * line.size, dtype=torch.uint8)
    gather, comm, best = make_op("all_gather", [Ref("own")], [Ref("whole")]), P2P(line), float("inf")
    for _ in range(TIMES):
        dist.barrier()
        began = time.perf_counter()
        comm.start("whole", gather, [own, whole])
        comm.wait("whole")
        best = min(best, time.perf_counter() - began)
    return part * (line.size - 1) / best / 1e9
