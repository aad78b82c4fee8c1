"""`make bench-gpu`: tokens/s, MFU and peak memory on one device, and one rank's real share of larger worlds.

At world 1 fzero stands beside `torch.compile` with fused AdamW, FSDP2 and DeepSpeed. A row `fzero3@64` is rank 0 of a
world of 64 on the one device: it holds its real slices, gathers into buffers of the real size and reduces out of them,
so its memory and its own work are real; the wire is not there (`Filled`). Every row is a fresh process.

    python -m benchmarks.gpu                            # all sizes, bf16
    python -m benchmarks.gpu --only fsdp,fzero3,fsdp_offload,fzero3_moments,fzero3_moved,fzero3_on_cpu --out gpu_offload
    python -m benchmarks.gpu --device cpu --tiny        # whether this file works, without a device
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks import machine, summary, worker
from benchmarks.contenders import BF16, CONTENDERS, Setup, Step, fzero_spec
from benchmarks.link import free_port
from benchmarks.model import Batch, Size, make_batch
from benchmarks.run import write
from fzero.comm.transport import Transport, transport_name
from fzero.compile.plan_from_spec import plan_for
from fzero.compile.state_recipe import recipe_for
from fzero.ir.mesh import Mesh
from fzero.ir.op import Op
from fzero.session.session import Session, session_of
from fzero.state import storage
from fzero.state.homes import Homes
from fzero.state.state import Life, State

RATE = 3e-5  # ten times that, without a warmup, and the loss of a Llama jumps: torch's own rows are 1 % apart then
SIZES = {
    "gpt2_large": Size(36, width=1280, heads=20, vocabulary=50257, sequence=1024, batch=8, inner=5120, rate=RATE),
    "gpt2_xl": Size(48, width=1600, heads=25, vocabulary=50257, sequence=1024, batch=4, inner=6400, rate=RATE),
    "llama_1b": Size(
        24, 2048, heads=16, vocabulary=32000, sequence=2048, batch=4, inner=5504, family="llama", rate=RATE
    ),
    "llama_7b": Size(
        32, 4096, heads=32, vocabulary=32000, sequence=2048, batch=4, inner=11008, family="llama", rate=RATE
    ),
}
LARGE = ("llama_7b",)  # asked for by name: it fits on no device of today without offload
TINY = {
    "gpt2_tiny": Size(layers=2, width=64, heads=2, vocabulary=512, sequence=32, batch=2, inner=256),
    "llama_tiny": Size(layers=2, width=64, heads=2, vocabulary=512, sequence=32, batch=2, inner=176, family="llama"),
}
ROWS = (
    "floor", "floor_compiled", "fsdp", "fsdp_compiled", "deepspeed1", "deepspeed3", "fzero0", "fzero3",
    "fzero3_compiled",
)  # fmt: skip
OFFLOADED = ("fsdp_offload", "fzero3_moments", "fzero3_moved", "fzero3_on_cpu")
SHARES = ("fzero2@8", "fzero3@8", "fzero2@64", "fzero3@64")
PEAK_FLOPS = {  # dense bf16, by a part of the device's name; NVIDIA's data sheets
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
}
NOT_MEASURED = (
    "Time on the wire: a share's collectives are local copies of the right size, so its tokens/s are an upper bound.",
    "Losses of a share: the other ranks' slices are filled with this rank's own.",
    "Worlds of more than one device.",
)
REPEATS = 3


class Filled:
    """A comm for one rank of a world whose other ranks are taken to hold what this one does.

    A gather writes the own slice into every part of the whole; the mean or maximum of equal values is the value.
    """

    number = 0

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def ready(self, name: str) -> bool:
        return True

    def wait(self, name: str) -> None:
        """Done when it was started."""

    def settle(self, name: str) -> None:
        """Nobody else reads here."""

    def drain(self) -> None:
        """Nothing is ever in flight."""

    def start(self, name: str, op: Op, tensors: list[torch.Tensor]) -> None:
        source, dest = tensors[0].reshape(-1), tensors[len(op.reads)].view(-1)
        if op.gathers:
            parts = dest.view(self.world_size, -1)
            for others in (parts[: self.rank], parts[self.rank + 1 :]):  # the own part may be the source itself
                others.copy_(source.expand_as(others))
            if parts[self.rank].data_ptr() != source.data_ptr():
                parts[self.rank].copy_(source)
            return
        own = source.view(self.world_size, -1)[self.rank] if op.row.scatters else source
        dest.copy_(own)
        if op.reduction != "max" and op.divisor == 1:
            dest.mul_(self.world_size)  # a sum, not a mean


def share_of(setup: Setup, zero: int, world_size: int) -> State:
    """The first state of rank 0 of a world of `world_size`, without a process group: what `fzero.init` makes there."""
    params, spec = fzero_spec(setup, zero)
    device = torch.device(setup.device)
    recipe = recipe_for(spec, params, None, device)
    plan = plan_for(spec, recipe.paths, recipe.values, recipe.per_rank, Mesh((("dp", world_size),)))
    block = storage.block_of(device)
    memory = storage.allocate(plan, block, 0)
    recipe.place(plan, 0, memory)
    transport = Transport(
        Filled(0, world_size), transport_name(device, spec.transfers), block, "filled by this rank alone"
    )
    homes = Homes(plan, 0, memory, None)
    runtime = Session(spec, 0, world_size, device, plan, recipe.treedef, homes, transport, None)
    life = Life()
    return State(runtime.sharded(life), 0, {}, runtime, life)


def share(setup: Setup, zero: int, world_size: int) -> Step:
    """`fzero.step` on that state, less the agreement of ranks that are not there."""
    state = share_of(setup, zero, world_size)

    def step(batch: Batch) -> torch.Tensor:
        bound = session_of(state).bind(session_of(state).compiled(batch))
        return bound.run(list(batch.values()))["loss"]

    return step


def peak_flops(device: str, given: float | None) -> float | None:
    """FLOP/s that the device could do in bf16; None where it is not known, and then there is no MFU."""
    if given is not None:
        return given * 1e12
    if device != "cuda":
        return None
    name = torch.cuda.get_device_name()
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def measure(row: str, setup: Setup, warmup: int, steps: int, profiled: bool = False) -> dict[str, Any]:
    """Figures of one row in this process: seconds a step (median of blocks of steps), losses of the first, memory."""
    name, _, world = row.partition("@")
    cuda = setup.device == "cuda"
    if CONTENDERS[name].talks and not name.startswith("fzero"):
        backend, port = "nccl" if cuda else "gloo", free_port()
        dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    began = time.perf_counter()
    step = share(setup, int(name[-1]), int(world)) if world else CONTENDERS[name].make(setup)
    data = [make_batch(setup.size, number, 0, setup.device) for number in range(warmup)]
    losses = [float(step(data[0]))]
    first = time.perf_counter() - began
    losses += [float(step(batch)) for batch in data[1:]]
    batch, blocks = data[-1], []
    finish = torch.cuda.synchronize if cuda else lambda: None
    for _ in range(REPEATS):
        finish()
        began = time.perf_counter()
        for _ in range(steps):
            step(batch)
        finish()
        blocks.append((time.perf_counter() - began) / steps)
    record: dict[str, Any] = {"step_s": median(blocks), "step_s_blocks": blocks, "first_step_s": first}
    record |= {"losses": losses} if not world else {}
    record["tokens_per_s"] = setup.size.tokens / record["step_s"]
    record |= {"kernels": kernels_of(step, batch)} if profiled else {}
    return record | memory_of(step, batch, setup.device)


def kernels_of(step: Step, batch: Batch, steps: int = 3) -> list[dict[str, Any]]:
    """Kernels, copies and fills of a step by name, the longest first: launches and microseconds of one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step(batch)
        torch.cuda.synchronize()
    rows = [event for event in seen.key_averages() if event.self_device_time_total]
    rows.sort(key=lambda event: -event.self_device_time_total)
    return [
        {"name": event.key, "launches": event.count / steps, "us": event.self_device_time_total / steps}
        for event in rows
    ]


def memory_of(step: Step, batch: Batch, device: str) -> dict[str, int]:
    """Bytes of tensors held between steps and at the peak of one."""
    if device != "cuda":
        return worker.live_peak(lambda: step(batch))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step(batch)
    torch.cuda.synchronize()
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"held_bytes": held, "live_peak_bytes": peak, "reserved_peak_bytes": reserved}


def run_row(row: str, name: str, size: Size, args: argparse.Namespace) -> dict[str, Any]:
    """A row in a process of its own; `{"failed": why}` where it did not finish."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        command = [sys.executable, "-m", "benchmarks.gpu", "--row", row, "--size", name, "--out", str(out)]
        command += ["--device", args.device, "--dtype", args.dtype, *(["--tiny"] if args.tiny else [])]
        command += ["--steps", str(args.steps), "--warmup", str(args.warmup), *(["--profile"] if args.profile else [])]
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        env = {**os.environ, **alone, "DS_ACCELERATOR": args.device}
        done = subprocess.run(command, cwd=machine.ROOT, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"failed": "\n".join(done.stderr.splitlines()[-12:])}
        record: dict[str, Any] = json.loads(out.read_text())
    peak = peak_flops(args.device, args.peak_tflops)
    if peak is not None:
        record["mfu"] = size.flops / record["step_s"] / peak
    return record


def disagreeing(rows: dict[str, dict[str, Any]], dtype: str) -> dict[str, float]:
    """Rows whose losses are further than the tolerance from the first measured row's, and by how much."""
    curves = {row: record["losses"] for row, record in rows.items() if "losses" in record}
    reference: list[float] = next(iter(curves.values()), [])
    gaps = {row: summary.gap(losses, reference) for row, losses in curves.items()}
    return {row: far for row, far in gaps.items() if far > summary.TOLERANCE[dtype]}


def print_size(console: Console, name: str, rows: dict[str, dict[str, Any]]) -> None:
    columns = ("row", "step ms", "tokens/s", "MFU", "held GB", "peak GB", "first step s")
    table = Table(*columns, title=name)
    for row, one in rows.items():
        if "failed" in one:
            table.add_row(row, "failed", *[""] * 5)
            continue
        mfu = f"{one['mfu']:.3f}" if "mfu" in one else ""
        gb = [f"{one[key] / 1e9:.3f}" for key in ("held_bytes", "live_peak_bytes")]
        numbers = [f"{one['step_s'] * 1e3:.1f}", f"{one['tokens_per_s']:,.0f}", mfu]
        table.add_row(row, *numbers, *gb, f"{one['first_step_s']:.1f}")
    console.print(table)


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bf16", choices=tuple(summary.TOLERANCE))
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, to try this file")
    parser.add_argument("--size", help=f"of {', '.join(SIZES)}; commas between several (default: all)")
    parser.add_argument("--only", help=f"rows, commas between them, of {', '.join([*ROWS, *OFFLOADED, *SHARES])}")
    parser.add_argument("--steps", type=int, default=10, help=f"in each of {REPEATS} timed blocks")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--profile", action="store_true", help="keep each row's kernels by name, with their time")
    parser.add_argument("--peak-tflops", type=float, help="the device's dense bf16 peak, where it is not known")
    parser.add_argument("--row", help="run this one row here (what the others are started with)")
    parser.add_argument("--out", default="gpu", help="the record is benchmarks/results/<OUT>.json")
    args = parser.parse_args(argv)
    args.sizes = TINY if args.tiny else SIZES
    for asked, known in ((args.size, args.sizes), (args.only, (*ROWS, *OFFLOADED, *SHARES))):
        for one in (asked or "").split(",") if asked else ():
            if one not in known:
                parser.error(f"{one!r}: needed one of {', '.join(known)}")
    if args.steps < 1 or args.warmup < 1:
        parser.error("--steps and --warmup: needed 1 or more")
    if args.profile and args.device != "cuda":
        parser.error("--profile: of a CUDA device's kernels; give --device cuda")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("this torch sees no CUDA device; --device cpu --tiny tries the script without one")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parsed(argv)
    if args.row:
        setup = Setup(args.sizes[args.size], args.dtype, args.device)
        Path(args.out).write_text(json.dumps(measure(args.row, setup, args.warmup, args.steps, args.profile)))
        return
    console = Console()
    console.width = max(console.width, 100)
    result: dict[str, Any] = {"machine": machine.describe(), "not_measured": NOT_MEASURED, "bf16": BF16, "sizes": {}}
    for name in args.size.split(",") if args.size else [one for one in args.sizes if one not in LARGE]:
        size: Size = args.sizes[name]
        rows: dict[str, dict[str, Any]] = {}
        for row in args.only.split(",") if args.only else (*ROWS, *OFFLOADED, *SHARES):
            lack = CONTENDERS[row.partition("@")[0]].missing()
            rows[row] = {"failed": f"{lack} is not installed"} if lack else run_row(row, name, size, args)
            console.print(
                f"{name} {row}: {rows[row].get('failed') or format(rows[row]['step_s'], '.4f')}", markup=False
            )
        model = asdict(size) | {"parameters": size.num_parameters, "flops": size.flops}
        result["sizes"][name] = {"model": model, "dtype": args.dtype, "rows": rows}
        off = disagreeing(rows, args.dtype)
        if off:
            raise SystemExit(f"{name}: losses disagree, nothing is written: {off}")
        print_size(console, name, rows)
    console.print(f"written: {write(args.out, result)}")


if __name__ == "__main__":
    main()
