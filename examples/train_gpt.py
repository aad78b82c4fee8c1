"""Train a byte-level GPT on real text, over as many ranks as you like, with every byte accounted for.

By default: two local ranks, ZeRO stage 3, a 0.8M-parameter model on the source code of Python's own standard library.
Before the run it prints where every byte of a rank will live, planned; after it the same, measured. It leaves the
step's program as text, a loss curve, and a sample of what the model writes.
"""

import argparse
import contextlib
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import fzero
import memory
import ranks
import text
from fzero.plan.measured import measured_peak
from fzero.plan.memory import account
from gpt import Batch, Params, generate, init_gpt, loss_fn, sizes

EXAMPLES = """
examples:
  python examples/train_gpt.py                            two ranks, zero=3
  python examples/train_gpt.py --world 1 --zero 0         one process, no process group
  python examples/train_gpt.py --data ~/my/project        your text instead of Python's
  torchrun --nproc-per-node 4 examples/train_gpt.py       torchrun's ranks instead of its own
  torchrun --nproc-per-node 8 examples/train_gpt.py --device cuda --size gpt2 --seq 1024 --batch 64

results, in --out:
  program.txt   the step as a program: one op per line, its bytes, the live memory after it, and why it is there
  loss.png      training and held-out loss
  sample.txt    text that the trained model wrote
  report.json   every number that was printed
  rankN.log     what ranks other than 0 printed
"""

LEARNING_RATES = {"tiny": 3e-3, "small": 3e-3, "gpt2": 6e-4}
HELD_OUT_BATCHES = 4
NUM_EVALUATIONS = 6  # of the held-out loss, spread over the run; one before it comes on top


@dataclass
class Curves:
    """Loss by step: of the training batches, and of the held-out ones."""

    train: list[float]
    held_out: list[tuple[int, float]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train_gpt.py", description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--world", type=int, metavar="N", help="ranks to start on this machine (2); under torchrun its ranks are used")
    add("--zero", type=int, default=3, choices=range(4), help="ZeRO stage: the same numbers, other memory (3)")
    add("--size", default="small", choices=sizes(1), help="0.1M, 0.8M or 85M parameters (small)")
    add("--steps", type=int, default=400, metavar="N", help="optimizer steps (400)")
    add("--batch", type=int, default=24, metavar="N", help="sequences per step, over all ranks (24)")
    add("--seq", type=int, default=128, metavar="N", help="bytes per sequence (128)")
    add("--microbatches", type=int, default=1, metavar="N", help="parts that each rank cuts its batch into (1)")
    add(
        "--lr",
        type=float,
        metavar="X",
        help="peak learning rate: linear warm-up, then cosine (by size: 3e-3, 3e-3, 6e-4)",
    )
    add("--clip", type=float, default=1.0, metavar="X", help="largest global gradient norm; 0 does not clip (1.0)")
    add(
        "--precision",
        default="fp32",
        choices=("fp32", "bf16", "fp16", "bf16_params"),
        help="see docs/precision.md (fp32)",
    )
    add(
        "--remat", default="none", choices=("none", "full"), help="recompute layers in the backward: less memory (none)"
    )
    add("--device", default="cpu", choices=("cpu", "cuda"), help="cpu talks over gloo, cuda over nccl (cpu)")
    add("--data", type=Path, metavar="PATH", help="a text file or a directory of them (Python's standard library)")
    add("--out", type=Path, default=Path("runs/train_gpt"), metavar="DIR", help="where results go (runs/train_gpt)")
    add("--seed", type=int, default=0, metavar="N", help="of the parameters, the batches and the sample (0)")
    args = parser.parse_args(argv)
    args.lr = args.lr or LEARNING_RATES[args.size]
    started = ranks.here()
    if started and args.world not in (None, started[1]):
        parser.error(f"--world {args.world}, but torchrun started {started[1]} ranks: leave --world out")
    args.world = started[1] if started else 2 if args.world is None else args.world
    for name in ("world", "steps", "batch", "seq", "microbatches"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: needed a positive number")
    if args.batch % (args.world * args.microbatches):
        parts = f"{args.world} ranks x {args.microbatches} microbatches"
        parser.error(
            f"--batch {args.batch} cannot be cut into {parts}: needed a multiple of {args.world * args.microbatches}"
        )
    if args.data is not None and not args.data.exists():
        parser.error(f"--data {args.data}: there is no such file or directory")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Train, in ranks of its own unless torchrun started some; returns the exit status."""
    args = parse(argv)
    if ranks.here() is None and args.world > 1:
        command = [sys.executable, str(Path(__file__).resolve()), *(sys.argv[1:] if argv is None else argv)]
        return ranks.launch(command, args.world, args.out)
    rank = (ranks.here() or (0, 1))[0]
    console = Console(quiet=rank != 0, highlight=False, soft_wrap=True)
    try:
        train(args, rank, console)
    except KeyboardInterrupt:
        if ranks.here() is None:
            print("\nstopped", file=sys.stderr)
        return ranks.STOPPED
    except (fzero.FzeroError, text.TextError) as error:  # meant for the user to read: no traceback
        print(f"train_gpt.py: rank {rank}: {error}", file=sys.stderr)
        return 1
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    return 0


def train(args: argparse.Namespace, rank: int, console: Console) -> None:
    """The whole job, as one rank does it."""
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    config = sizes(args.seq)[args.size]
    optimizer = fzero.optim.adamw(fzero.optim.warmup_cosine(args.lr, max(1, args.steps // 20), args.steps))
    spec = fzero.Spec(
        loss=loss_fn,
        optimizer=optimizer,
        mesh={"dp": args.world},
        zero=args.zero,
        microbatches=args.microbatches,
        clip_norm=args.clip or None,
        precision=args.precision,
        remat=args.remat,
        device=args.device,
    )
    corpus = text.load(args.data, args.seq)
    console.print(f"text: {corpus.description}")

    def init(key: Tensor) -> Any:
        return init_gpt(key, config)

    # Ahead of time: the program and its memory, with no parameter allocated and no other rank asked.
    sequences = torch.empty(args.batch // args.world, args.seq, dtype=torch.int64, device=device)
    key = fzero.random.key(args.seed)
    lowered = fzero.lower(spec, init, {"x": sequences, "y": sequences}, world_size=args.world, key=key)
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "program.txt").write_text(str(lowered.program))
    console.print(f"planned: bytes per rank at the peak of a step, world size {args.world}, zero={args.zero}")
    console.print(memory.planned_table(lowered.memory, lowered.memory.peak))

    state = fzero.init(init, spec, key=key)
    state, curves, seconds = fit(args, state, corpus, rank, device, console)
    params = fzero.unshard(state.params)
    measured = measure(args, state, corpus, rank, device)
    planned = account(state.program)  # ranks that share memory need no receive buffers: less than was planned for any
    console.print("measured: the program that ran, the tensors held, and the allocator's events of one more step")
    console.print(memory.measured_table(planned, planned.peak, measured))
    speed = args.steps * args.batch * args.seq / seconds
    loss = curves.held_out[-1][1]
    console.print(f"held-out loss {loss:.3f} nats per byte; {speed:,.0f} tokens/s over {args.steps} steps")
    if rank == 0:
        planned_bytes = {**planned, "state": planned.state, "peak": planned.peak}
        measured_bytes = [{**asdict(one), "peak": one.peak} for one in measured]
        report = {"planned": planned_bytes, "measured": measured_bytes, "tokens_per_second": speed, **asdict(curves)}
        leave(args, params, curves, report, console)


def leave(args: argparse.Namespace, params: Params, curves: Curves, report: dict[str, Any], console: Console) -> None:
    """What stays after the run: a sample, the loss curve, and every number."""
    torch.set_num_threads(os.cpu_count() or 1)  # the other ranks are done
    sample = generate(params, b"def ", 400, seed=args.seed).decode(errors="replace")
    console.rule("a sample")
    console.print(sample, markup=False)
    console.rule()
    (args.out / "sample.txt").write_text(sample)
    plot(curves, args.out / "loss.png", f"{args.size} GPT, {args.world} ranks, zero={args.zero}")
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    (args.out / "report.json").write_text(json.dumps({"arguments": arguments, **report}, indent=1))
    console.print(f"in {args.out}: program.txt, loss.png, sample.txt, report.json")


def drawn(args: argparse.Namespace, corpus: text.Corpus, rank: int, device: torch.device, seed: int) -> Iterator[Batch]:
    """This rank's part of random training batches, for ever."""
    sizes = {"num_sequences": args.batch, "sequence": args.seq, "rank": rank, "world_size": args.world}
    for batch in text.batches(corpus.train, seed=seed, **sizes):
        yield {name: x.to(device) for name, x in batch.items()}


def fit(
    args: argparse.Namespace, state: fzero.State, corpus: text.Corpus, rank: int, device: torch.device, console: Console
) -> tuple[fzero.State, Curves, float]:
    """The training loop: the trained state, its loss curves, and the seconds that the steps took."""
    losses = torch.empty(args.steps, device=device)  # written without reading, so a step need not be waited for
    held_out = [(0, held_out_loss(args, state, corpus, rank, device))]
    evaluate_at = {round(args.steps * (i + 1) / NUM_EVALUATIONS) for i in range(NUM_EVALUATIONS)} - {0}
    seconds = 0.0
    with progress(args, console) as show:
        for batch in itertools.islice(drawn(args, corpus, rank, device, args.seed), args.steps):
            start = time.perf_counter()
            state = fzero.step(state, batch)
            losses[state.step - 1] = state.metrics["loss"]
            show(state.step, state.metrics["loss"], held_out[-1][1])
            seconds += time.perf_counter() - start
            if state.step in evaluate_at:
                held_out.append((state.step, held_out_loss(args, state, corpus, rank, device)))
    return state, Curves(losses.tolist(), held_out), seconds


def held_out_loss(
    args: argparse.Namespace, state: fzero.State, corpus: text.Corpus, rank: int, device: torch.device
) -> float:
    """The mean over a fixed part of the held-out text, on the state as it is placed."""
    batches = text.held_out_batches(
        corpus.held_out,
        num_batches=HELD_OUT_BATCHES,
        num_sequences=args.batch,
        sequence=args.seq,
        rank=rank,
        world_size=args.world,
    )
    placed = ({name: x.to(device) for name, x in batch.items()} for batch in batches)
    return float(torch.stack([fzero.evaluate(state, batch, loss_fn) for batch in placed]).mean())


def measure(
    args: argparse.Namespace, state: fzero.State, corpus: text.Corpus, rank: int, device: torch.device
) -> list[memory.Measured]:
    """The bytes on every rank in one more step, whose result nobody needs."""
    batch = next(drawn(args, corpus, rank, device, args.seed + 1))
    held = state.held_bytes
    _, step = measured_peak(lambda: fzero.step(state, batch), device)
    optimizer = held["optimizer"] + held["state"]  # and the key
    mine = memory.Measured(held["param"], optimizer, memory.held_bytes(batch.values()), held["arena"] + step)
    everyone = [mine] * args.world
    if args.world > 1:
        dist.all_gather_object(everyone, mine)
    return everyone


@contextlib.contextmanager
def progress(args: argparse.Namespace, console: Console) -> Iterator[Callable[[int, Tensor, float], None]]:
    """A function to call after each step. On a terminal it moves a bar, elsewhere it prints a line now and then."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  held out {task.fields[held_out]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s  {task.fields[memory]:,.0f} MB"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task("training", total=args.steps, loss=float("nan"), held_out=float("nan"), speed=0.0, memory=0.0)
    every = max(1, args.steps // 10)
    shown, shown_at = 0, time.perf_counter()

    def show(step: int, loss: Tensor, held_out: float) -> None:
        nonlocal shown, shown_at
        now = time.perf_counter()
        due = now - shown_at > 0.25 if console.is_terminal else step % every == 0
        if not (due or step == args.steps) or console.quiet:
            return
        speed = (step - shown) * args.batch * args.seq / (now - shown_at)
        shown, shown_at = step, now
        used = process_bytes(args.device) / 1e6
        bar.update(task, completed=step, loss=float(loss), held_out=held_out, speed=speed, memory=used)
        if not console.is_terminal:
            console.print(f"step {step:>5}  loss {float(loss):.3f}  {speed:,.0f} tokens/s  {used:,.0f} MB")

    with bar:
        yield show


def process_bytes(device: str) -> int:
    """What this process uses: the CUDA allocator's bytes, or on the CPU resident memory, libraries included."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux: the peak instead, which macOS counts in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def plot(curves: Curves, path: Path, title: str) -> None:
    """The loss curves as a PNG."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    window = max(1, len(curves.train) // 50)
    smooth = torch.tensor(curves.train).unfold(0, window, 1).mean(1).tolist()
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(curves.train) + 1), curves.train, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(range(window, len(curves.train) + 1), smooth, color="tab:blue", label="training")
    axes.plot(*zip(*curves.held_out, strict=True), "o-", color="tab:orange", label="held out")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
