"""machine: the records of a machine, and the rates of a mesh that is laid over it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fzero import backend
from fzero.cost.rates import SEND, Link, Rates
from fzero.errors import SpecError
from fzero.ir.mesh import Mesh
from fzero.tree import suggest

GIB = 1 << 30
TYPES = ("cpu", "cuda")
TABLES = ("flops", "efficiency")  # of a device: figures by dtype
DTYPES = ("bf16", "fp16", "fp32", "fp8")
POSITIVE = (
    "memory_gib", "memory_bytes", "bytes", "flops", "read_bytes", "write_bytes", "to_device_bytes", "from_device_bytes",
    "adam_bytes",
)  # fmt: skip
SLOWER = 1.09  # compute beside a transfer, where a level says nothing else


def _needed(name: str, value: Any) -> str:
    """What a figure of that name has to be; "" for one that is.

    >>> _needed("headroom", 0.1), _needed("headroom", 3), _needed("tax", 0.5)
    ('', 'a part of 1, and not all of it', '1 or more')
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
    if name == "size":
        return "" if number and isinstance(value, int) and value else "a positive int"
    if name == "headroom":
        return "" if number and value < 1 else "a part of 1, and not all of it"
    if name == "attention":
        return "" if number and value <= 1 else "a part of 1"
    if name in ("efficiency", "memory_efficiency"):
        return "" if number and 0 < value <= 1 else "a part of 1, more than 0"
    if name == "tax":
        return "" if number and value >= 1 else "1 or more"
    if name in POSITIVE:
        return "" if number and value else "a number, more than 0"
    return "" if number else "a number, 0 or more"


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or the cores of one rank.

    memory_gib, reserved_gib: its memory, and what a context and the communicators take of it. headroom: the part of the
    rest that is kept free, for an allocator's holes. flops: by dtype ("bf16", "fp16", "fp32", "fp8"), the peak
    operations a second of dense products. efficiency: the part of it that large products reach. small_side: a product
    whose least side is this long reaches half of that. attention: what attention reaches, as a part of the faster of
    16 bits and fp32. memory_bytes: bytes a second. memory_efficiency: the part of it that elementwise work reaches.
    launch_us: microseconds that a call takes at least.
    """

    memory_gib: float
    memory_bytes: float
    flops: Mapping[str, float]
    reserved_gib: float = 0.0
    headroom: float = 0.0
    efficiency: Mapping[str, float] = field(default_factory=dict)
    small_side: float = 0.0
    attention: float = 0.0
    memory_efficiency: float = 1.0
    launch_us: float = 0.0

    def reached(self, dtype: str) -> float:
        """Operations a second that large products of a dtype reach; of one that is not listed, those of fp32."""
        known = dtype if dtype in self.flops else "fp32"
        return self.flops[known] * self.efficiency.get(dtype, 1.0)


@dataclass(frozen=True, kw_only=True)
class NetworkLevel:
    """A level of the network: groups of `size` devices that reach one another through it.

    bytes: a second, of each device and direction. efficiency: the part that long transfers reach. latency_us: of a hop.
    start_us: of any transfer over it. tax: the seconds that a second of compute takes while the level is busy.
    """

    name: str
    size: int
    bytes: float
    efficiency: float = 1.0
    latency_us: float = 0.0
    start_us: float = 0.0
    tax: float = SLOWER


@dataclass(frozen=True, kw_only=True)
class Host:
    """The memory beside one device: its share of a node's, the bytes a second each way, and of an update there. A
    machine of which these are not known has no host, and nothing is offloaded to it unless that is pinned.

    A plan for fewer ranks than a node has devices shares the node's memory among these (`Hardware.for_ranks`).
    """

    memory_gib: float
    to_device_bytes: float
    from_device_bytes: float
    adam_bytes: float


@dataclass(frozen=True, kw_only=True)
class Drive:
    """The drive of one device: bytes a second, and how much it holds."""

    read_bytes: float
    write_bytes: float
    size_gib: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A machine. type: of its devices, as torch names it ("cuda", "cpu"); "" where nothing is said. levels: the
    innermost first, each larger than the one before. sources: where figures are from, by their name as in
    "device.flops". compile: `Spec(compile=)` of what runs there, which no file says; None: the default of the type.

    >>> machine = Hardware(
    ...     name="two cards",
    ...     device=Device(memory_gib=24, memory_bytes=1e12, flops={"fp32": 80e12}, headroom=0.1),
    ...     levels=(NetworkLevel(name="pcie", size=2, bytes=25e9, latency_us=10),),
    ... )
    >>> round(machine.budget / 2**30, 1), machine.devices
    (21.6, 2)
    """

    name: str
    device: Device
    levels: tuple[NetworkLevel, ...] = ()
    host: Host | None = None
    disk: Drive | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    type: str = ""
    compile: str | None = None

    def __post_init__(self) -> None:
        """Raises SpecError for a type and for figures that no machine has."""
        if self.type not in ("", *TYPES):
            raise SpecError(f"hardware {self.name!r}: type = {self.type!r}: needed one of {', '.join(TYPES)}")
        parts = {"device": self.device, "host": self.host, "disk": self.disk}
        for part, record in [*parts.items(), *((f"level.{level.name}", level) for level in self.levels)]:
            self._check_figures(part, record)
        if "fp32" not in self.device.flops:
            raise SpecError(
                f"hardware {self.name!r}: device.flops has no fp32, by which dtypes that it lacks are reckoned: "
                "add fp32 = its operations a second"
            )
        inner = 1
        for level in self.levels:
            if level.size < inner or level.size % inner:
                raise SpecError(
                    f"hardware {self.name!r}: level {level.name!r} joins {level.size} devices, which is no multiple of "
                    f"the {inner} of the level within it. List the innermost level first"
                )
            inner = level.size
        if self.budget < 1:
            raise SpecError(
                f"hardware {self.name!r}: reserved_gib = {self.device.reserved_gib:g} and headroom = "
                f"{self.device.headroom:g} leave nothing of memory_gib = {self.device.memory_gib:g}"
            )

    def _check_figures(self, part: str, record: Device | NetworkLevel | Host | Drive | None) -> None:
        for name in [f.name for f in fields(record) if f.name != "name"] if record is not None else []:
            value = getattr(record, name)
            for key, figure in value.items() if record is self.device and name in TABLES else [("", value)]:
                place = f"hardware {self.name!r}: {part}.{name}" + (f".{key}" if key else "")
                if key and key not in DTYPES:
                    raise SpecError(f"{place}: no such dtype.{suggest(key, DTYPES)} Known are {', '.join(DTYPES)}")
                if needed := _needed(name, figure):
                    raise SpecError(f"{place} = {figure!r}: needed {needed}")

    @property
    def budget(self) -> int:
        """Bytes of the device that a plan may use."""
        return int((self.device.memory_gib - self.device.reserved_gib) * (1 - self.device.headroom) * GIB)

    @property
    def host_budget(self) -> int:
        """Bytes of the host that a rank may use."""
        return int(self.host.memory_gib * GIB) if self.host is not None else 0

    def for_ranks(self, ranks: int) -> Hardware:
        """The machine as so many ranks find it: fewer than a node's devices share its host among themselves.

        >>> from fzero.hardware import load
        >>> [load("v100-32gb").for_ranks(n).host.memory_gib for n in (1, 2, 16, 64)]
        [1536.0, 768.0, 96, 96]
        """
        node = self.levels[0].size if self.levels else 1
        share = node / min(ranks, node)
        if self.host is None or share == 1:
            return self
        host = replace(self.host, memory_gib=self.host.memory_gib * share, adam_bytes=self.host.adam_bytes * share)
        return replace(self, host=host)

    @property
    def devices(self) -> int:
        """How many devices it joins at most."""
        return self.levels[-1].size if self.levels else 1

    def link(self, ranks: Sequence[int]) -> Link:
        """The figures of a ring among these ranks, numbered along the levels. Raises SpecError for more than it has.

        A ring crosses each level on which its ranks are apart. Members that are together on the level within share the
        hop across: as many of their ports carry it. The slowest level is the ring's. Its latency is the mean of its
        hops: of 64 ranks in nodes of 8, 56 hops are within a node and 7 between nodes.
        """
        if max(ranks) >= self.devices:
            raise SpecError(
                f"hardware {self.name!r} joins {self.devices} devices, and the mesh needs {max(ranks) + 1}: add a "
                "[[level]] to its file, or take fewer ranks"
            )
        slowest, latency, start, within, apart = math.inf, 0.0, 0.0, 1, len(ranks)
        for level in self.levels:
            groups = len({rank // level.size for rank in ranks})
            if apart > 1:
                ports = sum(rank // within == ranks[0] // within for rank in ranks)
                slowest = min(slowest, level.bytes * level.efficiency * ports)
                start = max(start, level.start_us * 1e-6) if apart > groups else start
                latency += level.latency_us * 1e-6 * (apart - groups) / (len(ranks) - 1)
            within, apart = level.size, groups
        return Link(latency, 2 * slowest, 2, start)  # among two, half of a buffer is sent

    def rates(self, mesh: Mesh) -> Rates:
        """The figures of a step over a mesh whose ranks are numbered along the levels."""
        device, axes, tax = self.device, {}, SLOWER
        for name in [*mesh.names, *([mesh.data_axes] if "." in mesh.data_axes else [])]:
            if mesh.size(name) > 1:
                ring = self.link(mesh.peers(0, name))
                axes[name] = {"all_gather": ring, "reduce_scatter": ring, "all_to_all": ring, SEND: ring.message()}
                tax = max(level.tax for level in self.levels)
        lanes: dict[str, float] = {}
        if self.host is not None:
            lanes |= {"host→device": self.host.to_device_bytes, "device→host": self.host.from_device_bytes}
        if self.disk is not None:
            for space in ("host", "device"):  # of a CPU's rank the two are one memory
                lanes |= {f"disk→{space}": self.disk.read_bytes, f"{space}→disk": self.disk.write_bytes}
        low = "bf16" if "bf16" in device.flops else "fp16"
        there = backend.of(self.type) if self.type else backend.UNKNOWN
        beside = not there.on_host  # a processor's rank updates itself
        return Rates(
            latency={},
            wire_bytes={},
            hidden=1.0,
            tax=tax,
            flops={2: device.reached(low), 4: device.reached("fp32")},
            memory_bytes=device.memory_bytes * device.memory_efficiency,
            lanes=lanes,
            host_bytes=self.host.adam_bytes if self.host is not None and beside else 0.0,
            axes=axes,
            small_side=device.small_side,
            attention=device.attention * max(device.flops.get(low, 0.0), device.flops["fp32"]),
            launch=device.launch_us * 1e-6,
            fuses=(self.compile or there.compiles) != "none",
        )
