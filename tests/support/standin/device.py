"""device: what `torch.cuda` finds in `torch._C`: devices, streams, events, memory figures and graphs."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from standin.order import HOST, Agent, CaptureError, Memory, Use, check

NUM_DEVICES = 2
TOTAL_BYTES = 64 << 30
LOG: list[str] = []  # what was issued, in order: "stream 0 of cuda:0: aten.mm.out"
_here = threading.local()
STREAMS: list[list[Agent]] = [[Agent(f"stream 0 of cuda:{i}", i)] for i in range(NUM_DEVICES)]


def current_device() -> int:
    return getattr(_here, "device", 0)


def set_device(index: int) -> None:
    assert 0 <= index < NUM_DEVICES, f"cuda:{index}: there are {NUM_DEVICES} devices"
    _here.device = index


def exchange_device(index: int) -> int:
    before = current_device()
    if index >= 0:
        set_device(index)
    return before


def current_stream(device: int) -> Agent:
    number = getattr(_here, "streams", {}).get(device, 0)
    return STREAMS[device][number]


def new_stream(device: int) -> Agent:
    found = Agent(f"stream {len(STREAMS[device])} of cuda:{device}", device)
    STREAMS[device].append(found)
    return found


def _triple(stream: Agent) -> tuple[int, int, int]:
    assert stream.device is not None
    return STREAMS[stream.device].index(stream), stream.device, 1


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    assert device_type == 1
    set_device(device_index)
    _here.streams = {**getattr(_here, "streams", {}), device_index: stream_id}


def host_waits(what: str, *streams: Agent) -> None:
    """The host waits until streams have done what they were given."""
    refuse_in_capture(what)
    for stream in streams:
        HOST.learn(stream.clock)
    LOG.append(f"the host: {what}")


def use(stream: Agent, what: str, *uses: tuple[Memory, int, int, bool]) -> None:
    """A kernel or copy on a stream (or something that the host does), and the memory it uses."""
    now = stream.tick()
    LOG.append(f"{stream.name}: {what}")
    for memory, low, high, writes in uses:
        if low < high:
            ledger = memory.ledger if CAPTURE is None else CAPTURE.ledgers.setdefault(memory, [])
            check(ledger, Use(stream, now, low, high, writes, what))


# --- capture ----------------------------------------------------------------------------------------------------------

CAPTURE: Graph | None = None  # the one in progress


def refuse_in_capture(what: str) -> None:
    if CAPTURE is not None:
        CAPTURE.broken = f"{what} while a graph is captured"
        raise CaptureError(CAPTURE.broken)


def issue(stream: Agent, what: str, uses: list[tuple[Memory, int, int, bool]], run: Callable[[], None]) -> bool:
    """Runs something on a stream; while a graph is captured, records it instead. Whether it ran."""
    if CAPTURE is None:
        use(stream, what, *uses)
        run()
        return True
    if stream not in CAPTURE.streams:
        CAPTURE.broken = f"{what} on {stream.name}, which is not captured: it would run now, and in no replay"
        raise CaptureError(CAPTURE.broken)
    use(stream, what, *uses)
    CAPTURE.calls.append((what, uses, run))
    return False


class Graph:
    """`torch._C._CUDAGraph`."""

    def __new__(cls, keep_graph: bool = False) -> Graph:
        return super().__new__(cls)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        global CAPTURE
        assert capture_error_mode in ("global", "thread_local", "relaxed"), capture_error_mode
        assert CAPTURE is None, "two captures at one time"
        stream = current_stream(current_device())
        if _triple(stream)[0] == 0:
            raise CaptureError("a capture on the default stream")
        self.origin, self.streams, self.broken = stream, {stream}, ""
        self.calls: list[tuple[str, list[tuple[Memory, int, int, bool]], Callable[[], None]]] = []
        self.ledgers: dict[Memory, list[Use]] = {}
        CAPTURE = self

    def capture_end(self) -> None:
        global CAPTURE
        assert CAPTURE is self
        CAPTURE = None
        if current_stream(current_device()) is not self.origin:
            raise CaptureError("a capture must end on the stream that it began on")
        if self.broken:
            raise CaptureError(f"the capture failed: {self.broken}")
        for stream in self.streams:
            if self.origin.clock.get(stream, 0) < stream.clock.get(stream, 0):
                raise CaptureError(f"the capture ends while {stream.name} has work that nothing has joined")
        self.ledgers = {}

    def replay(self) -> None:
        refuse_in_capture("a replay")
        stream = current_stream(self.origin.device or 0)
        LOG.append(f"{stream.name}: replay of {len(self.calls)}")
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # this is the device, not the host
            for what, uses, run in self.calls:
                use(stream, f"{what} (replayed)", *uses)
                run()

    def reset(self) -> None:
        self.calls = []


# --- streams and events -----------------------------------------------------------------------------------------------


class Stream:
    """`torch._C._CudaStreamBase`."""

    def __new__(
        cls, priority: int = 0, stream_id: int = -1, device_index: int = -1, device_type: int = 1, stream_ptr: int = 0
    ) -> Stream:
        self = super().__new__(cls)
        if stream_id < 0:
            stream_id, device_index, _ = _triple(new_stream(current_device()))
        self.stream_id, self.device_index, self.device_type = stream_id, device_index, 1
        self.device = torch.device("cuda", device_index)
        self.cuda_stream = 1000 * device_index + stream_id
        return self

    @property
    def agent(self) -> Agent:
        return STREAMS[self.device_index][self.stream_id]

    def query(self) -> bool:
        refuse_in_capture("a stream's query")
        return False

    def synchronize(self) -> None:
        host_waits(f"synchronize {self.agent.name}", self.agent)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.agent is other.agent

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


class Event:
    """`torch._C._CudaEventBase`."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        self = super().__new__(cls)
        self.timing, self.stream, self.captured = enable_timing, None, None
        return self

    def record(self, stream: Stream) -> None:
        refused = self.stream is not None and self.stream.device != stream.agent.device
        assert not refused, "an event is recorded on another device than before"
        if CAPTURE is not None and self.timing:
            refuse_in_capture("an event with a time")
        self.stream, self.captured = stream.agent, CAPTURE
        self.stream.tick()
        self.clock, self.time = dict(self.stream.clock), time.perf_counter()
        LOG.append(f"{self.stream.name}: record")

    def wait(self, stream: Stream) -> None:
        joined(stream.agent, self.stream, self.captured, getattr(self, "clock", {}))

    def query(self) -> bool:
        refuse_in_capture("an event's query")
        return False

    def synchronize(self) -> None:
        refuse_in_capture("synchronize an event")
        HOST.learn(getattr(self, "clock", {}))

    def elapsed_time(self, end: Event) -> float:
        for event in (self, end):
            if event.stream is None or not event.timing:
                raise ValueError("both events must be recorded with timing enabled")
            if HOST.clock.get(event.stream, 0) < event.clock[event.stream]:
                raise RuntimeError("device not ready: the host has not waited for the event")
        return (end.time - self.time) * 1e3


def joined(stream: Agent, other: Agent | None, captured: Graph | None, clock: dict[Agent, int]) -> None:
    """`stream` waits for what an event of `other` stands for."""
    if captured is not None and CAPTURE is captured:
        CAPTURE.streams.add(stream)
    elif CAPTURE is not None and stream in CAPTURE.streams and other is not None:
        CAPTURE.broken = f"{stream.name} is captured and waits for {other.name}, which is not"
        raise CaptureError(CAPTURE.broken)
    stream.learn(clock)
    LOG.append(f"{stream.name}: wait for {other.name if other else 'nothing'}")


# --- installing -------------------------------------------------------------------------------------------------------


def _stats(device: int) -> dict[str, Any]:
    figures = {"current": Memory.num_bytes.get(device, 0), "peak": Memory.peak_bytes.get(device, 0)}
    return {"allocated_bytes": {"all": figures}}


def _reset_peak(device: int) -> None:
    Memory.peak_bytes[device] = Memory.num_bytes.get(device, 0)


def _synchronize() -> None:
    host_waits(f"synchronize cuda:{current_device()}", *STREAMS[current_device()])


def _mem_get_info(device: int) -> tuple[int, int]:
    return TOTAL_BYTES - Memory.num_bytes.get(device, 0), TOTAL_BYTES


def _properties(device: int) -> Any:
    shown = {"name": "stand-in", "major": 9, "minor": 0, "total_memory": TOTAL_BYTES, "multi_processor_count": 2}
    return SimpleNamespace(**shown)


def install() -> None:
    c = {
        "_has_cuda": True,
        "_cuda_getDeviceCount": lambda: NUM_DEVICES,
        "_cuda_getDevice": current_device,
        "_cuda_setDevice": set_device,
        "_cuda_synchronize": _synchronize,
        "_cuda_getCurrentStream": lambda device: _triple(current_stream(device)),
        "_cuda_getCurrentRawStream": lambda device: _triple(current_stream(device))[0],
        "_cuda_getDefaultStream": lambda device: _triple(STREAMS[device][0]),
        "_cuda_setStream": _set_stream,
        "_cuda_emptyCache": lambda: None,
        "_host_emptyCache": lambda: None,
        "_cuda_memoryStats": _stats,
        "_cuda_resetPeakMemoryStats": _reset_peak,
        "_cuda_isCurrentStreamCapturing": lambda: CAPTURE is not None,
        "_nccl_version": lambda: 2 << 32 | 27 << 16,
        "_nccl_version_suffix": lambda: b"",
        "_CudaStreamBase": Stream,
        "_CudaEventBase": Event,
        "_CUDAGraph": Graph,
    }
    for name, value in c.items():
        setattr(torch._C, name, value)
    for module in (torch.cuda.streams, torch.cuda.graphs):  # their classes are made again, over these bases
        importlib.reload(module)
        for name in getattr(module, "__all__", ("Stream", "Event", "ExternalStream")):
            setattr(torch.cuda, name, getattr(module, name))
    torch.cuda.Stream, torch.cuda.Event = torch.cuda.streams.Stream, torch.cuda.streams.Event
    cuda: Any = torch.cuda
    cuda._initialized, cuda._exchange_device, cuda._maybe_exchange_device = True, exchange_device, exchange_device
    cuda._get_device_properties = _properties
    cuda.default_generators = tuple(torch.Generator() for _ in range(NUM_DEVICES))  # their states are asked for
    from standin import tensors  # which needs what is above

    runtime = {"cudaMemGetInfo": _mem_get_info, "cudaHostRegister": tensors.lock, "cudaHostUnregister": tensors.unlock}
    cudart = SimpleNamespace(**runtime)
    cuda.cudart = lambda: cudart
    torch.version.cuda = "stand-in"
