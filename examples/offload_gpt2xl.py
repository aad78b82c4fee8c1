"""Train GPT-2 XL on a machine whose memory cannot hold it: parameters and moments lie on a disk.

One command starts two local ranks. In fp32 the 1.56 billion parameters and AdamW's moments are 18.7 GB. Each rank keeps
half of them in a file of its own in `--nvme-path`, which has no name and ends with the run. A step reads each layer
when it needs it, computes, and streams parameters and moments through memory for the update. The bits are those of a
run without offload (`--offload none`, where memory allows it).

A token is a byte, as in `train_gpt.py`. The other rows of GPT-2's vocabulary are there, and learn that they do not
occur.
"""

import argparse
import contextlib
import itertools
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from torch import Tensor

import fzero
import ranks
import text
from gpt import Config, init_gpt, loss_fn

EXAMPLES = """
examples:
  python examples/offload_gpt2xl.py --nvme-path /local_nvme     GPT-2 XL, five steps
  python examples/offload_gpt2xl.py --size gpt2 --steps 20      GPT-2 small
  python examples/offload_gpt2xl.py --keep params               moments alone on disk
  torchrun --nproc-per-node 2 examples/offload_gpt2xl.py        torchrun's ranks instead of its own

results, in --out:
  rankN.log     what ranks other than 0 printed
"""

VOCABULARY = 50_257  # GPT-2's
SIZES = {
    "tiny": Config(num_layers=2, width=64, sequence=64, vocabulary=256),
    "gpt2": Config(num_layers=12, width=768, sequence=1024, vocabulary=VOCABULARY),
    "xl": Config(num_layers=48, width=1600, sequence=1024, vocabulary=VOCABULARY),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="offload_gpt2xl.py",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nvme-path", type=Path, default=Path(), metavar="DIR", help="a folder on a fast disk (this one)")
    add("--size", default="xl", choices=SIZES, help="0.1M, 124M or 1,558M parameters (xl)")
    add("--offload", default="nvme", choices=("nvme", "cpu", "none"), help="where the state is held (nvme)")
    add("--keep", default="nothing", choices=("nothing", "params"), help="what stays on the device all the same")
    add("--world", type=int, default=2, metavar="N", help="ranks to start on this machine (2)")
    add("--steps", type=int, default=5, metavar="N", help="optimizer steps (5)")
    add("--seq", type=int, default=256, metavar="N", help="bytes per sequence; each rank has one (256)")
    add("--lr", type=float, default=1e-6, help="learning rate; there is no warm-up (1e-6)")
    add(
        "--clip",
        type=float,
        metavar="NORM",
        help="clip gradients to this norm; until then they wait where the state is",
    )
    add("--data", type=Path, metavar="PATH", help="a text file or a directory of them (Python's standard library)")
    add("--out", type=Path, default=Path("runs/offload_gpt2xl"), metavar="DIR", help="for logs (runs/offload_gpt2xl)")
    add("--seed", type=int, default=0, metavar="N", help="of the parameters and the batches (0)")
    args = parser.parse_args(argv)
    args.world = (ranks.here() or (0, args.world))[1]
    return args


def spec_of(args: argparse.Namespace) -> fzero.Spec:
    """The job. Layers are computed again in the backward, so that what they keep is small too."""
    rules = {"optimizer": args.offload} if args.keep == "params" else {"**": args.offload}
    rules = rules if args.clip is None else {"grads/**": args.offload, **rules}
    away: dict[str, Any] = {"offload": rules} if args.offload != "none" else {}
    if args.offload == "nvme":
        away["nvme_path"] = str(args.nvme_path)
    return fzero.Spec(
        loss=loss_fn, optimizer=fzero.optim.adamw(args.lr, weight_decay=0.1), mesh={"dp": args.world}, zero=3,
        remat={"blocks/**": "full"}, clip_norm=args.clip, **away,
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    return ranks.run(parse(argv), __file__, argv, train)


def train(args: argparse.Namespace, rank: int) -> None:
    """The whole job, as one rank does it."""
    torch.set_num_threads(1)
    spec, config = spec_of(args), SIZES[args.size]
    corpus = text.load(args.data, args.seq)
    tokens = fzero.data.Tokens(corpus.train, sequence=args.seq, seed=args.seed)
    batches = tokens.batches(args.world, mesh={"dp": args.world})
    console = Console(quiet=rank > 0, highlight=False)

    def init(key: Tensor) -> Any:
        return init_gpt(key, config)

    first = next(tokens.batches(args.world, mesh={"dp": args.world}))
    lowered = fzero.lower(spec, init, first, world_size=args.world)
    account, waiting = lowered.memory, lowered.choices.get("gradients")
    say = partial(console.print, soft_wrap=True)
    say(f"text: {corpus.description}\n{planned(account, args.world)}" + (f"\n{waiting}" if waiting else ""))
    if rank == 0 and (lack := too_little(args.nvme_path, args.world * account.spaces["disk"])):
        sys.exit(lack)
    began = time.perf_counter()
    state = fzero.init(init, spec, key=fzero.random.key(args.seed))
    say(f"first state: {time.perf_counter() - began:.0f} s, {moved(ranks.every_rank(io()), [NOTHING])}")
    for batch in itertools.islice(batches, args.steps):
        before, began = ranks.every_rank(io()), time.perf_counter()
        with shown(console, account, state.step + 1):
            state = fzero.step(state, batch)
            loss = float(state.metrics["loss"])
        seconds = time.perf_counter() - began
        memory = sum(ranks.every_rank(resident_share()))
        say(
            f"step {state.step:>4}  loss {loss:7.4f}  {seconds:6.1f} s  {moved(ranks.every_rank(io()), before)}  "
            f"memory of all ranks {size(memory)}"
        )


# --- what is shown ----------------------------------------------------------------------------------------------------


def planned(account: fzero.compile.lowered.MemoryAccount, world: int) -> str:
    """The program's own account of a rank: where its bytes are, and what a step moves."""
    spaces = ", ".join(f"{space} {size(count)}" for space, count in account.spaces.items())
    lanes = ", ".join(f"{lane} {size(count)}" for lane, count in account.lanes.items()) or "nothing"
    return f"planned, each of {world} ranks at its peak: {spaces}\nmoved by each in a step: {lanes}"


def size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def too_little(folder: Path, needed: int) -> str:
    """Says what to do if a folder's disk has too little room; "" if it has enough.

    >>> too_little(Path(), 1)
    ''
    """
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return ""
    return (
        f"{folder.resolve()} has {size(free)} free, and the parameters and moments of all ranks take "
        f"{size(needed)}.\nName a folder on a larger disk with --nvme-path, take a smaller model with "
        "--size gpt2, or leave parameters in memory with --keep params."
    )


IO = tuple[int, int]  # bytes that the kernel has read from disks for this process, and written
NOTHING: IO = (0, 0)


def io() -> IO:
    fields = dict(re.findall(r"(\w+): (\d+)", Path("/proc/self/io").read_text()))
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def moved(after: Sequence[IO], before: Sequence[IO]) -> str:
    """What all ranks read and wrote.

    >>> moved([(3 * 10**9, 10**9), (10**9, 0)], [(10**9, 0), (0, 0)])
    'read 3.00 GB, written 1.00 GB'
    """
    read, written = (sum(rank[way] for rank in after) - sum(rank[way] for rank in before) for way in (0, 1))
    return f"read {size(read)}, written {size(written)}"


def resident_share() -> int:
    """This process's resident bytes; what ranks share counts in equal parts (PSS)."""
    return int(re.findall(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)[0]) << 10


@contextlib.contextmanager
def shown(console: Console, account: fzero.compile.lowered.MemoryAccount, step: int) -> Iterator[None]:
    """On a terminal, bars of what this rank has read and written in the step, and its seconds of compute."""
    moved = [sum(n for way, n in account.lanes.items() if way.split("→")[end] == "disk") for end in (0, 1)]
    ways = dict(zip(("read", "written"), moved, strict=True))
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = [bars.add_task(f"step {step} {way}", total=total or None) for way, total in ways.items()]
        cpu = bars.add_task("computed", total=None)
        first, began, done = io(), time.process_time(), threading.Event()

        def watch() -> None:
            while not done.wait(0.5):
                for task, now, then in zip(tasks, io(), first, strict=True):
                    bars.update(task, completed=now - then)
                bars.update(cpu, description=f"computed {time.process_time() - began:.0f} s")

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


if __name__ == "__main__":
    sys.exit(main())
