"""rates: how fast a machine moves and computes: the figures from which `fzero.cost.step_time` predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fzero.cost.tensor_cores import TensorCores
from fzero.ir import kinds
from fzero.ir.mesh import parts_of
from fzero.ir.wire import kind_bytes

SEND = "send"  # the kind of a message between two ranks


@dataclass(frozen=True)
class Link:
    """Figures of one kind of transfer over one axis.

    latency: seconds. wire_bytes: bytes a second, of the whole buffer. ranks: among how many it was measured; 0: not
    known, and then taken to be as many as are asked for. start: seconds of any transfer, however many ranks there are.
    """

    latency: float
    wire_bytes: float
    ranks: int = 0
    start: float = 0.0

    def seconds(self, kind: str, whole: int, ranks: int = 0) -> float:
        """Of one transfer of a whole buffer among `ranks` (0: as many as were measured), with nothing beside it.

        A ring: n - 1 hops, each of a part of the latency, and the bytes that one rank sends. An all-reduce is two.

        >>> among_4 = Link(latency=3e-5, wire_bytes=1e9, ranks=4)
        >>> [round(among_4.seconds("all_gather", 1_000_000, n) * 1e6) for n in (2, 4, 8)]
        [677, 1030, 1237]
        """
        n = ranks or self.ranks or 2
        measured = self.ranks or n
        if n < 2:
            return 0.0
        record = kinds.of(kind).collective
        hops = (2 if record is not None and record.scattered else 1) * (n - 1) / (measured - 1)
        sent = kind_bytes(kind, whole, n) / (self.wire_bytes * (measured - 1) / measured)
        return self.start + self.latency * hops + sent

    def message(self) -> Link:
        """The figures of a message between two ranks, from these of an all-gather."""
        measured = self.ranks or 2
        return Link(self.latency / (measured - 1), self.wire_bytes * (measured - 1) / measured, 2, self.start)


@dataclass(frozen=True)
class Rates:
    """Figures of a machine.

    latency (seconds) and wire_bytes (bytes a second, of the whole buffer): by kind, "all_gather" and "reduce_scatter",
    over any axis. ranks: among how many they were measured; 0: not known (`Link`). axes: by mesh axis and kind, the
    figures of axes that have their own. A kind "send" is of messages between roles, by their own bytes; without it they
    are priced by all-gathers.
    hidden: the part of a transfer that passes beside compute, 0 to 1. tax: the seconds that a second of compute takes
    while a transfer passes beside it.
    flops: operations a second of large matrix products, by the bytes of an element (2 or 4). small_side: a product
    whose least side is this long reaches half of it. attention: operations a second of attention; 0: as products.
    tensor_cores: of a device that has them: 16-bit products are then priced by their shape (`tensor_cores`).
    launch: the least seconds of a call. overhead: seconds that each kernel adds to them: its start, its last wave.
    coding: by codec, the seconds an element to encode and to decode.
    memory_bytes: bytes a second that other ops read and write.
    lanes: by lane (`disk→host`), the bytes a second of its moves. One that is not given takes no time.
    lane_hidden: the part of a move that passes beside compute, 0 to 1.
    host_bytes: bytes a second that updates on the host read and write beside the device; 0 where the rank itself does
    them, as on a CPU world.
    fuses: whether loops over elements run fused, as `Spec(compile=)` has them (`fzero.cost.fused_loops`).
    """

    latency: Mapping[str, float]
    wire_bytes: Mapping[str, float]
    hidden: float
    flops: Mapping[int, float]
    memory_bytes: float
    lanes: Mapping[str, float] = field(default_factory=dict)
    lane_hidden: float = 1.0
    host_bytes: float = 0.0
    ranks: int = 0
    tax: float = 1.0
    axes: Mapping[str, Mapping[str, Link]] = field(default_factory=dict)
    small_side: float = 0.0
    attention: float = 0.0
    launch: float = 0.0
    overhead: float = 0.0
    tensor_cores: TensorCores | None = None
    coding: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    fuses: bool = False

    def link(self, rate: str, axis: str = "") -> Link | None:
        """The figures of a measured kind over an axis; None where there are none. Of several axes taken together: those
        of the slowest of them that has its own."""
        own = [self.axes[part][rate] for part in (axis, *parts_of(axis)) if rate in self.axes.get(part, {})]
        if own:
            return own[0] if rate in self.axes.get(axis, {}) else min(own, key=lambda link: link.wire_bytes)
        if rate == SEND and (gather := self.axes.get(axis, {}).get("all_gather")):
            return gather.message()
        if rate in self.latency and rate in self.wire_bytes:
            return Link(self.latency[rate], self.wire_bytes[rate], self.ranks)
        gather = self.link("all_gather") if rate == SEND else None
        return gather.message() if gather is not None else None

    def transfer(self, kind: str, nbytes: int, axis: str = "", ranks: int = 0) -> float:
        """Seconds of one transfer with nothing beside it. kind: of an op. nbytes: of the whole buffer, or of a message.
        ranks: of the axis; 0: as many as were measured. Raises KeyError where there is no rate."""
        record = kinds.of(kind).collective
        link = self.link(SEND if record is None else record.rate, axis)
        if link is None:
            raise KeyError(f"there is no rate of {kind} over {axis or 'any axis'}")
        if kind == SEND:
            return link.start + link.latency + nbytes / link.wire_bytes
        return link.seconds(kind, nbytes, ranks)


# One H100 SXM. Measured: 798 TFLOP/s (a product of 8192 x 8192 x 8192 of random bf16 numbers), and 26.0 ms of the three
# products with a vocabulary of 50,257, which is `unaligned`. Fitted on the three recorded rows of
# benchmarks/results/gpu_gpt2_large.json: `memory_bytes`, `overhead` and `attention`. Lanes and host: by trial, copies
# of page-locked memory with both lanes busy, aten's fused AdamW beside them. No wire: `dataclasses.replace` adds one.
H100 = Rates(
    latency={},
    wire_bytes={},
    hidden=1.0,
    flops={2: 645e12, 4: 50e12},
    memory_bytes=2.7e12,
    lanes={"host→device": 45e9, "device→host": 45e9},
    host_bytes=85e9,
    attention=300e12,
    overhead=2e-6,
    tensor_cores=TensorCores(flops=798e12, processors=132, unaligned=121.6e12),
)


def fitted(seconds_by_bytes: Mapping[int, float]) -> tuple[float, float]:
    """(latency in seconds, bytes a second) of transfers, given their seconds by bytes.

    The latency is the time of the smallest. The rate is of the time that the largest took beyond it, but at least a
    tenth of the largest's time: on a busy machine the smallest may have taken as long.
    """
    small, large = min(seconds_by_bytes), max(seconds_by_bytes)
    latency = seconds_by_bytes[small]
    return latency, large / max(seconds_by_bytes[large] - latency, seconds_by_bytes[large] / 10)
