"""measured_machine: this machine as a `fzero.hardware` file: what its cores, memory, ranks and disk reach here and now.

`fzero doctor --hardware FILE` writes it. A rank is one thread, as `OMP_NUM_THREADS=1` makes it.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from fzero.comm import pick_way, selftest
from fzero.errors import FzeroError
from fzero.hardware import Device, Drive, Hardware, NetworkLevel
from fzero.tools import disk_speed
from fzero.tools.machine_probes import memory_bytes

GIB = 1 << 30
MB = 1 << 20


def measured_machine(folder: Path, disk_bytes: int) -> Hardware:
    """Measures for some seconds: products, elementwise work, two ranks, and a file in `folder`. Raises FzeroError where
    two ranks of this machine cannot exchange anything."""
    ranks = os.cpu_count() or 1
    results = selftest.run()
    ways = {name: found for name, found in results.items() if found.right and not found.lack}
    if not ways:
        raise FzeroError("two ranks of this machine exchange nothing: `fzero doctor` says why")
    name, best = max(ways.items(), key=lambda item: item[1].mb_per_s["all-gather"])
    here = "measured by fzero doctor"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        flops = {"fp32": pick_way.product_flops(torch.float32), "bf16": pick_way.product_flops(torch.bfloat16)}
        stream = pick_way.stream_bytes()
    finally:
        torch.set_num_threads(threads)
    speed = disk_speed.of_checkpoints(folder, disk_bytes)
    device = Device(
        memory_gib=round(memory_bytes() / ranks / GIB, 2), headroom=0.1, memory_bytes=stream, flops=flops, launch_us=2.0
    )
    sources = {f"device.{figure}": here for figure in ("memory_bytes", "flops")}
    sources |= {
        "device.memory_gib": f"the machine's, divided by {ranks} cores",
        "level.loopback.bytes": f"{here}, {name}",
    }
    return Hardware(
        name=f"{platform.processor() or platform.machine()}, {ranks} ranks of one thread",
        device=device,
        levels=(NetworkLevel(name="loopback", size=ranks, bytes=best.mb_per_s["all-gather"] * MB, latency_us=50.0),),
        disk=Drive(read_bytes=speed.read * 1e6, write_bytes=speed.write * 1e6),
        sources=sources,
    )
