"""Two ranks and a slow link between them: a small GPT with and without codecs, seconds and loss side by side.

    python examples/slow_link.py                       # 100 Mbit/s between two network namespaces (needs root on Linux)
    python examples/slow_link.py --rate loopback       # without root: shows the bytes and the losses, saves no time

Each policy is a run of its own: the same parameters, the same text, the same steps. The namespaces are joined by a veth
pair whose ends send at the given rate (`tc`), as two machines on a slow network; they are gone at the end.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import fzero
import text
from fzero import Precision, optim
from fzero.ir.program import wire_bytes
from gpt import Config, init_gpt, loss_fn

POLICIES: dict[str, str | Precision] = {
    "bf16": "bf16",
    "bf16, gather=int8, reduce=int8": Precision(compute="bf16", gather="int8", reduce="int8", exact=("norm/*",)),
    "bf16, gather=int8, reduce=int4": Precision(compute="bf16", gather="int8", reduce="int4", exact=("norm/*",)),
    "bf16, gather=int4, reduce=int4": Precision(compute="bf16", gather="int4", reduce="int4", exact=("norm/*",)),
}
ADDRESSES = ("10.78.0.1", "10.78.0.2")
WARMUP = 2  # steps that are not timed

Where = tuple[Sequence[str], dict[str, str]]  # what goes before a rank's command, and into its environment


def train(args: argparse.Namespace) -> None:
    """What one rank does: prints its figures as JSON."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    config = Config(num_layers=args.layers, width=args.width, sequence=args.sequence)
    spec = fzero.Spec(
        loss=loss_fn, optimizer=optim.adamw(1e-3), zero=args.zero, precision=POLICIES[args.policy], transfers="p2p"
    )
    data = text.load(None, args.sequence).train
    state = fzero.init(lambda key: init_gpt(key, config), spec, key=fzero.random.key(0))
    draws = torch.Generator().manual_seed(rank)
    seconds, losses = [], []
    for _ in range(args.steps + WARMUP):
        starts = torch.randint(len(data) - args.sequence - 1, (args.rows,), generator=draws)
        batch = text.window(data, starts, args.sequence)
        dist.barrier()
        began = time.perf_counter()
        state = fzero.step(state, batch)
        losses.append(float(state.metrics["loss"]))
        seconds.append(time.perf_counter() - began)
    program = state.program
    found = {
        "seconds": median(seconds[WARMUP:]),
        "loss": sum(losses[-10:]) / len(losses[-10:]),
        "bytes": sum(wire_bytes(program, op) for op in program.ops),
    }
    if rank == 0:
        print(json.dumps(found), flush=True)


# --- the link ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def link(rate: str) -> Iterator[list[Where]]:
    """Where the two ranks run. Raises SystemExit with what is missing."""
    if rate == "loopback":
        yield [((), {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"})] * 2
        return
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        lack = f"no {' and no '.join(missing)} (iproute2)" if missing else "not root"
        raise SystemExit(f"--rate {rate} makes network namespaces, which needs root and iproute2: {lack}. "
                         "--rate loopback needs neither")  # fmt: skip
    names, ends = [f"slow{os.getpid()}-{rank}" for rank in range(2)], ["slow0", "slow1"]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run(
            "ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1]
        )
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", end)
            for device in (end, "lo"):
                _run("ip", "-n", name, "link", "set", device, "up")
            _run("tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", "rate", rate, "burst", "256kb",
                 "latency", "50ms")  # fmt: skip
        yield [(("ip", "netns", "exec", name), {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": end})
               for name, end in zip(names, ends, strict=True)]  # fmt: skip
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"`{' '.join(command)}` failed: {done.stderr.strip()}. --rate loopback needs no rights")


# --- the comparison ---------------------------------------------------------------------------------------------------


def measured(policy: str, places: Sequence[Where], argv: Sequence[str]) -> dict[str, Any]:
    """The figures of one policy: two processes, one a rank."""
    command = [sys.executable, str(Path(__file__).resolve()), *argv, "--policy", policy]
    started = []
    for rank, (prefix, variables) in enumerate(places):
        env = {**os.environ, **variables, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "29611",
               "OMP_NUM_THREADS": "1"}  # fmt: skip
        started.append(subprocess.Popen([*prefix, *command], env=env, stdout=subprocess.PIPE, text=True))
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{policy}: a rank ended with {[process.returncode for process in started]}")
    found: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="of the link, as tc writes it; or loopback (default 100mbit)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each policy (default 30)")
    parser.add_argument("--zero", type=int, default=3, choices=(0, 1, 2, 3), help="the ZeRO stage (default 3)")
    parser.add_argument("--layers", type=int, default=4, help="of the GPT (default 4)")
    parser.add_argument("--width", type=int, default=256, help="of the GPT, a multiple of 64 (default 256)")
    parser.add_argument("--sequence", type=int, default=128, help="bytes of a row (default 128)")
    parser.add_argument("--rows", type=int, default=4, help="of a rank's batch (default 4)")
    parser.add_argument("--policy", choices=POLICIES, help=argparse.SUPPRESS)  # of a rank
    given = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(given)
    if args.policy is not None:
        train(args)
        return 0
    console = Console()
    table = Table(title=f"two ranks, {args.rate}, zero={args.zero}, {args.steps} steps")
    for column in ("policy", "MB sent a step", "seconds a step", "times faster", "loss"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    first = 0.0
    with link(args.rate) as places:
        for policy in POLICIES:
            found = measured(policy, places, given)
            first = first or found["seconds"]
            console.print(f"{policy}: {found['seconds']:.3f} s a step")
            table.add_row(policy, f"{found['bytes'] / 1e6:.2f}", f"{found['seconds']:.3f}",
                          f"{first / found['seconds']:.2f}", f"{found['loss']:.4f}")  # fmt: skip
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
