"""One rank of one contender: warm-up steps, timed steps, then one step under the memory profiler; a JSON record.

Started by `benchmarks.run` with the environment of a torchrun rank. Ranks meet at a barrier before every step, which is
not timed, so that contenders without communication share the machine as the others do.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders import CONTENDERS, Setup, Step
from benchmarks.model import SIZES, Batch, batches


def status_bytes(name: str) -> int:
    """A memory figure of this process from the kernel: VmRSS (resident now) or VmHWM (the most it was)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def restart_peak() -> None:
    """From here on VmHWM counts anew (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def held_bytes() -> int:
    """Bytes of all CPU tensors that Python can reach, each storage once, less the other ranks' memory that is mapped
    here. Between two steps nothing else holds any but DDP, whose step keeps views of its buckets for us."""
    from fzero.comm.peers import SharedMemoryPeers

    gc.collect()
    hosts = [found for found in gc.get_objects() if type(found) is SharedMemoryPeers]
    theirs = {arena.data_ptr() for host in hosts for peer in host.peers.values() for arena in peer.arenas.values()}
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        if (
            type(found) in (torch.Tensor, torch.nn.Parameter)
            and found.device.type == "cpu"
            and found.layout is torch.strided
        ):
            storage = found.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in theirs:
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def live_peak(step: Callable[[], Any]) -> dict[str, int]:
    """What is held between steps, and the most that lives during one, in bytes of tensors."""
    from fzero.cost.allocator import measured_peak

    held = held_bytes()
    _, extra = measured_peak(step)
    return {"held_bytes": held, "live_peak_bytes": held + extra}


def joined(parts: list[Iterator[Batch]]) -> Iterator[Batch]:
    """The batches of several ranks as one."""
    for some in zip(*parts, strict=True):
        yield {name: torch.cat([batch[name] for batch in some]) for name in some[0]}


def run_steps(step: Step, data: Iterator[Batch], num: int, meet: Callable[[], None]) -> tuple[list[float], list[float]]:
    """(seconds, losses) of `num` steps."""
    seconds, losses = [], []
    for _ in range(num):
        batch = next(data)
        meet()
        began = time.perf_counter()
        loss = step(batch)
        seconds.append(time.perf_counter() - began)
        losses.append(float(loss))
    return seconds, losses


def measure(name: str, setup: Setup, warmup: int, steps: int, *, memory: bool) -> dict[str, Any]:
    """The record of this rank. Raises ValueError for less than one step of either kind."""
    if warmup < 1 or steps < 1:
        raise ValueError(f"warmup={warmup}, steps={steps}: needed at least one of each")
    contender = CONTENDERS[name]
    for module in contender.imports:
        importlib.import_module(module)
    rank = dist.get_rank() if dist.is_initialized() else 0
    meet = dist.barrier if dist.is_initialized() else lambda: None
    at_import = status_bytes("VmRSS")
    began = time.perf_counter()
    step = contender.make(setup)
    made = time.perf_counter() - began
    data = joined([batches(setup.size, rank + part) for part in range(contender.parts)])
    first, losses = run_steps(step, data, warmup, meet)
    whole_peak = status_bytes("VmHWM")
    restart_peak()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    seconds, more = run_steps(step, data, steps, meet)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    steps_peak = status_bytes("VmHWM")
    record = {
        "init_s": made,
        "first_step_s": first[0],
        "step_s": seconds,
        "losses": [*losses, *more],
        "minor_faults_per_step": faults / steps,
        "rss_import_bytes": at_import,
        "rss_peak_bytes": max(whole_peak, steps_peak) - at_import,
        "rss_peak_steps_bytes": steps_peak - at_import,
    }
    if memory:
        batch = next(data)
        meet()
        record |= live_peak(lambda: step(batch))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", required=True, choices=CONTENDERS)
    parser.add_argument("--size", required=True, choices=SIZES)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--memory", action="store_true", help="one step more, under the profiler")
    parser.add_argument("--out", type=Path, required=True, help="a folder: the record is rankN.json in it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    setup = Setup(SIZES[args.size], args.dtype)
    record = measure(args.contender, setup, args.warmup, args.steps, memory=args.memory)
    (args.out / f"rank{rank}.json").write_text(json.dumps(record))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
