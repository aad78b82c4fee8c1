"""measured_machine: this machine as a `fzero.hardware` file: what its cores, memory, ranks and disk reach here and now.

`fzero doctor --hardware FILE` writes it. A rank is one thread, as `OMP_NUM_THREADS=1` makes it. All ranks compute at
once while they are measured, for they share memory and caches when they train.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from fzero.comm import selftest
from fzero.comm.pick_way import fastest_of
from fzero.errors import FzeroError
from fzero.hardware import Device, Drive, Hardware, NetworkLevel
from fzero.tools import disk_speed
from fzero.tools.machine_probes import memory_bytes

GIB = 1 << 30
MB = 1 << 20
SECONDS = 60.0
SIDE = 4096  # rows and columns of what loops read; products and attention are of a fraction of it
FIGURES = ("memory_bytes", "memory_efficiency", "flops", "attention", "launch_us")


def figures(side: int) -> dict[str, float]:
    """What one rank reaches, with matrices of that size: operations a second of products by dtype and of attention;
    bytes a second of an addition, and of the loops of a model on the average; seconds of a call on nothing."""
    torch.set_num_threads(1)
    found = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = torch.ones(side // 8, side // 4, dtype=dtype), torch.ones(side // 4, side // 4, dtype=dtype)
        found[name] = 2 * a.numel() * side // 4 / fastest_of(lambda a=a, b=b: torch.mm(a, b))  # type: ignore[misc]
    q = torch.randn(4, 4, side // 16, 64)
    attended = fastest_of(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    found["attention"] = 2 * q.numel() * side // 16 / attended
    x, y = torch.randn(side, side), torch.empty(side, side)
    found["stream"] = 3 * x.numel() * 4 / fastest_of(lambda: torch.add(x, y, out=y))
    loops: list[Callable[[], object]] = [
        lambda: F.gelu(x),
        lambda: F.layer_norm(x, (side,)),
        lambda: torch.softmax(x, -1),
        lambda: torch.mul(x, 2.0, out=y),
    ]
    found["loops"] = statistics.mean(2 * x.numel() * 4 / fastest_of(loop) for loop in loops)
    one = torch.zeros(1)
    found["launch"] = fastest_of(lambda: [one.add_(1) for _ in range(1000)]) / 1000
    return found


def _of_all_ranks(ranks: int) -> dict[str, float]:
    """The median of what `ranks` processes reach beside one another."""
    # frozen, Python ends without a walk over all that torch made: a third of a second
    command = [sys.executable, "-c", "import gc, json; from fzero.tools.measured_machine import figures; "
               f"print(json.dumps(figures({SIDE}))); gc.freeze()"]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    started = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(ranks)]
    try:
        told = [json.loads(process.communicate(timeout=SECONDS)[0]) for process in started]
    except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        raise FzeroError(f"{ranks} ranks of this machine could not be measured: {error}") from None
    finally:
        for process in started:
            process.kill()
    return {name: statistics.median(one[name] for one in told) for name in told[0]}


def measured_machine(folder: Path, disk_bytes: int) -> Hardware:
    """Measures for some seconds: products, loops, two ranks, and a file in `folder`. Raises FzeroError where ranks of
    this machine cannot be started, or cannot exchange anything."""
    ranks = os.cpu_count() or 1
    ways = {name: found for name, found in selftest.run().items() if found.right and not found.lack}
    if not ways:
        raise FzeroError("two ranks of this machine exchange nothing: `fzero doctor` says why")
    way, best = max(ways.items(), key=lambda item: item[1].mb_per_s["all-gather"])
    found = _of_all_ranks(ranks)
    speed = disk_speed.of_checkpoints(folder, disk_bytes)
    flops = {name: float(f"{found[name]:.3g}") for name in ("fp32", "bf16")}
    device = Device(
        memory_gib=round(memory_bytes() / ranks / GIB, 2),
        headroom=0.1,
        memory_bytes=float(f"{found['stream']:.3g}"),
        memory_efficiency=round(min(found["loops"] / found["stream"], 1.0), 3),
        flops=flops,
        attention=round(min(found["attention"] / max(flops.values()), 1.0), 4),
        launch_us=round(found["launch"] * 1e6, 2),
    )
    here = f"measured by fzero doctor, {ranks} ranks at once"
    sources = {f"device.{name}": here for name in FIGURES}
    sources["device.memory_gib"] = f"the machine's, divided by {ranks} cores"
    sources["level.loopback.bytes"] = f"measured by fzero doctor, {way}"
    loopback = float(f"{best.mb_per_s['all-gather'] * MB:.3g}")
    return Hardware(
        name=f"{platform.processor() or platform.machine()}, {ranks} ranks of one thread",
        type="cpu",
        device=device,
        levels=(NetworkLevel(name="loopback", size=ranks, bytes=loopback, latency_us=50.0),),
        disk=Drive(read_bytes=round(speed.read * 1e6), write_bytes=round(speed.write * 1e6)),
        sources=sources,
    )
