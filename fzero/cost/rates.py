"""rates: how fast a machine moves and computes: the figures from which `fzero.cost.step_time` predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rates:
    """Figures of a machine.

    latency (seconds) and wire_bytes (bytes a second, of the whole buffer): by kind, "all_gather" and "reduce_scatter".
    hidden: the part of a transfer that passes beside compute, 0 to 1.
    flops: operations a second of matrix products, by the bytes of an element (2 or 4).
    memory_bytes: bytes a second that other ops read and write.
    lanes: by lane (`disk→host`), the bytes a second of its moves. One that is not given takes no time.
    lane_hidden: the part of a move that passes beside compute, 0 to 1.
    host_bytes: bytes a second that updates on the host read and write beside the device; 0 where the rank itself does
    them, as on a CPU world.
    """

    latency: Mapping[str, float]
    wire_bytes: Mapping[str, float]
    hidden: float
    flops: Mapping[int, float]
    memory_bytes: float
    lanes: Mapping[str, float] = field(default_factory=dict)
    lane_hidden: float = 1.0
    host_bytes: float = 0.0

    def transfer(self, kind: str, nbytes: int) -> float:
        """Seconds of one transfer of a whole buffer of `nbytes`, with nothing beside it."""
        return self.latency[kind] + nbytes / self.wire_bytes[kind]


# One H100 (PCIe 5, 16 cores of its host), by trial: products, attention and other ops of GPT-2 large in bf16, copies of
# page-locked memory with both lanes busy, aten's fused AdamW beside them. No wire: `dataclasses.replace` adds one.
H100 = Rates(
    latency={},
    wire_bytes={},
    hidden=1.0,
    flops={2: 450e12, 4: 50e12},
    memory_bytes=2.3e12,
    lanes={"host→device": 45e9, "device→host": 45e9},
    host_bytes=85e9,
)


def fitted(seconds_by_bytes: Mapping[int, float]) -> tuple[float, float]:
    """(latency in seconds, bytes a second) of transfers, given their seconds by bytes.

    The latency is the time of the smallest. The rate is of the time that the largest took beyond it, but at least a
    tenth of the largest's time: on a busy machine the smallest may have taken as long.
    """
    small, large = min(seconds_by_bytes), max(seconds_by_bytes)
    latency = seconds_by_bytes[small]
    return latency, large / max(seconds_by_bytes[large] - latency, seconds_by_bytes[large] / 10)
