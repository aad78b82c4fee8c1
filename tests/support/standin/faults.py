"""faults: what the stand-in must find, each made on purpose: in calls of `torch.cuda`, and in fzero."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import fzero
from fzero import optim
from fzero.comm import transfers
from fzero.kernels import flat_norms
from fzero.runtime import stream_lanes
from standin import device, order
from standin.running import HERE, batch_of, fails, logged, scenario, started, trained

# --- faults that the stand-in must find -------------------------------------------------------------------------------


changed = mock.patch.object


@scenario(2)
def a_missing_wait_is_a_race() -> None:
    def wait(self: Any, name: str) -> None:
        self.pending.pop(name).finish()

    with changed(transfers.Nccl, "wait", wait), fails(order.RaceError, "nccl"):
        trained(cuda_graph=False, optimizer=optim.sgd(0.1))
    gc.collect()
    order.VIOLATIONS.clear()  # that the memory of the transfers went back too early


@scenario(2)
def a_missing_wait_fails_a_capture() -> None:
    def wait(self: Any, name: str) -> None:
        transfer = self.pending.pop(name)
        if device.CAPTURE is None:
            transfer.requests[0].wait()
        transfer.finish()

    with logged() as said, changed(transfers.Nccl, "wait", wait):
        trained(optimizer=optim.sgd(0.1))
    assert any("would not record" in line for line in said), said
    gc.collect()
    order.VIOLATIONS.clear()


@scenario(2)
def an_op_on_another_stream_is_a_race() -> None:
    start = transfers.Nccl.start

    def elsewhere(self: Any, name: str, one: Any, tensors: Any) -> None:
        with torch.cuda.stream(torch.cuda.Stream(HERE)):
            start(self, name, one, tensors)

    with changed(transfers.Nccl, "start", elsewhere), fails(order.RaceError, "which nothing puts after"):
        trained(cuda_graph=False, optimizer=optim.sgd(0.1))
    gc.collect()
    order.VIOLATIONS.clear()


@scenario(1)
def moves_out_of_order_are_races() -> None:
    """Each wait of `StreamLanes` is needed."""
    wait, start = stream_lanes.StreamLanes.wait, stream_lanes.StreamLanes._copy

    def at_once(self: Any, after: Any, *what: Any) -> Any:
        return start(self, torch.cuda.Event(), *what)

    def deaf(self: Any, name: str) -> None:
        if self.copies.pop(name, None) is None:
            wait(self, name)

    on_device = {"offload": "optimizer+params", "update_on": "device", "cuda_graph": False}
    on_host = {"offload": "optimizer", "update_on": "cpu"}
    on_disk = {"offload": {"opt_state/**": "nvme"}, "nvme_path": tempfile.gettempdir(), "update_on": "device"}
    nothing = lambda self, *_: None  # noqa: E731
    for method, instead, text, given in (
        ("wait", deaf, "which nothing puts after", on_device),
        ("_copy", at_once, "which nothing puts after", on_device),
        ("on_host", lambda self, calls, *_: calls, "on the host", on_host),
        ("_see", nothing, "on the host", on_disk),
    ):
        with changed(stream_lanes.StreamLanes, method, instead), fails(order.RaceError, text):
            trained(**given)
    with changed(stream_lanes.StreamLanes, "finish", nothing), fails(order.RaceError, "on the host"):
        state = fzero.step(started(**on_device), batch_of(HERE, 0))
        fzero.tree.map(lambda leaf: leaf.local.sum(), state.params)
    del state
    gc.collect()
    order.VIOLATIONS.clear()  # that memory of moves went back too early


@scenario(1)
def races_between_streams() -> None:
    x, side = torch.ones(8, device=HERE), torch.cuda.Stream(HERE)
    x.add_(1)
    with fails(order.RaceError, "reads"), torch.cuda.stream(side):
        x + 1
    y = torch.ones(8, device=HERE)
    side.wait_stream(torch.cuda.current_stream(HERE))
    with torch.cuda.stream(side):
        y.add_(1)
    with fails(order.RaceError, "writes"):
        y.zero_()
    event = side.record_event()
    event.wait()
    assert y.tolist() == [2.0] * 8
    host = torch.empty(8, pin_memory=True)
    host.copy_(y, non_blocking=True)
    with fails(order.RaceError, "the host"):
        host.numpy()
    torch.cuda.synchronize()
    assert host.numpy().sum() == 16
    with torch.cuda.stream(side):
        z = y * 2
    z.data_ptr()
    side.synchronize()
    with torch.cuda.stream(side):
        part = torch.ones(8, device=HERE)
    torch.cuda.current_stream(HERE).wait_stream(side)
    part.add_(1)
    del part  # back to `side`, which has not waited for the add
    assert len(order.VIOLATIONS) == 1, order.VIOLATIONS
    order.VIOLATIONS.clear()


@scenario(1)
def wrong_calls() -> None:
    with fails(TypeError, "unexpected keyword argument"):
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_mode="thread_local")  # type: ignore[call-arg]
    with fails(TypeError, "unexpected keyword argument"):
        torch.cuda.memory_allocated(dev=0)  # type: ignore[call-arg]
    with fails(AttributeError, "memory_alocated"):
        torch.cuda.memory_alocated(0)  # type: ignore[attr-defined]
    with fails(TypeError, "can't convert cuda:0"):
        torch.ones(2, device=HERE).numpy()
    with fails(RuntimeError, "expected all tensors on one device"):
        torch.ones(2, device=HERE) + torch.ones(2)
    with fails(RuntimeError, "expected all tensors on one device"):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")
    with fails(RuntimeError, "device not ready"):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for event in events:
            event.record()
        events[0].elapsed_time(events[1])
    x = torch.ones(4, device="cuda:1")
    with fails(AssertionError, "launched on cuda:0"), changed(torch.cuda, "device", lambda _: mock.MagicMock()):
        flat_norms.sum_squares(x)


@scenario(1)
def what_a_capture_refuses() -> None:
    x = torch.ones(4, device=HERE)
    torch.cuda.synchronize()
    waits: dict[str, Callable[[], object]] = {
        "_local_scalar_dense": lambda: x.sum().item(),
        "synchronize cuda:0": torch.cuda.synchronize,
        "the host waits": lambda: x.copy_(torch.zeros(4)),
        "which is not captured": lambda: torch.ones(3, device="cuda:1"),
    }
    for text, call in waits.items():
        stream = torch.cuda.current_stream(HERE)
        with torch.cuda.stream(stream), fails(order.CaptureError, text), torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()
    stream, unjoined = torch.cuda.current_stream(HERE), fails(order.CaptureError, "nothing has joined")
    with torch.cuda.stream(stream), unjoined, torch.cuda.graph(torch.cuda.CUDAGraph()):
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            x.add_(1)
    graph = torch.cuda.CUDAGraph()
    assert x.tolist() == [1.0] * 4, "recording runs nothing"
    with torch.cuda.graph(graph):
        x.add_(x * 2)
    assert x.tolist() == [1.0] * 4
    graph.replay()
    graph.replay()
    assert x.tolist() == [9.0] * 4


@scenario(1)
def a_save_that_does_not_wait_is_a_race() -> None:
    state = trained(steps=1)[2]
    with changed(torch.cuda.streams.Stream, "synchronize", lambda self: None), fails(order.RaceError, "the host"):
        fzero.save(state, Path(tempfile.mkdtemp()) / "run")
