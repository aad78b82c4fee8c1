"""Train a byte-level GPT on real text, over as many ranks as you like, with every byte accounted for.

By default: two local ranks, ZeRO stage 3, a 0.8M-parameter model on the source code of Python's own standard library.
Before the run it prints where every byte of a rank will live, planned; after it the same, measured. It leaves the
step's program as text, a loss curve, and a sample of what the model writes. It saves as it goes, and a rank that dies
costs no more than the steps since: see `--kill-at`.
"""

import argparse
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

import fzero
import memory
import ranks
import text
from fzero import tree
from fzero.comm.group import open_world
from fzero.cost.allocator import measured_peak
from fzero.cost.memory import account
from gpt import Batch, Params, generate, init_gpt, loss_fn, sizes
from show import Curves, plot, progress

EXAMPLES = """
examples:
  python examples/train_gpt.py                            two ranks, zero=3
  python examples/train_gpt.py --world 1 --zero 0         one process, no process group
  python examples/train_gpt.py --data ~/my/project        your text instead of Python's
  torchrun --nproc-per-node 4 examples/train_gpt.py       torchrun's ranks instead of its own
  torchrun --nproc-per-node 8 examples/train_gpt.py --device cuda --size gpt2 --seq 1024 --batch 64
  python examples/train_gpt.py --kill-at 40               a rank dies after step 40, and training goes on from step 20
  python examples/train_gpt.py --kill-at 40 --check       the same, and once more without it: are the parameters equal?
  python examples/train_gpt.py --resume                   go on with a run that Ctrl-C or SIGTERM stopped

results, in --out:
  program.txt   the step as a program: one op per line, its bytes, the live memory after it, and why it is there
  loss.png      training and held-out loss
  sample.txt    text that the trained model wrote
  report.json   every number that was printed
  checkpoints/  the last two states that were saved
  text.bin      the text to train on, which the ranks map into memory
  rankN.log     what ranks other than 0 printed
"""

LEARNING_RATES = {"tiny": 3e-3, "small": 3e-3, "gpt2": 6e-4}
HELD_OUT_BATCHES = 4
KEPT_CHECKPOINTS = 2
NUM_EVALUATIONS = 6  # of the held-out loss, spread over the run; one before it comes on top


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
    add(
        "--checkpoint-every",
        type=int,
        metavar="N",
        help="steps between saves; 0 saves none (50, or less before a kill)",
    )
    add("--resume", action="store_true", help="go on from the last save in --out, instead of beginning anew")
    add("--restarts", type=int, metavar="N", help="times that all ranks start again after one died (1 with --kill-at)")
    add("--kill-at", type=int, metavar="N", help="the last rank kills itself after step N, the first time")
    add("--check", action="store_true", help="afterwards train again, undisturbed, and compare the parameters")
    args = parser.parse_args(argv)
    args.lr = args.lr or LEARNING_RATES[args.size]
    args.restarts = int(args.kill_at is not None) if args.restarts is None else args.restarts
    if args.checkpoint_every is None:  # a kill shows little where nothing was saved before
        args.checkpoint_every = max(1, args.kill_at // 2) if args.kill_at in range(1, 100) else 50
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
    if ranks.here() is None and (args.world > 1 or args.restarts or args.check):
        return launch(args, sys.argv[1:] if argv is None else argv)
    rank, world_size = ranks.here() or (0, 1)
    console = Console(quiet=rank != 0, highlight=False, soft_wrap=True)
    try:
        if world_size > 1:
            open_world(args.device)
        train(args, rank, console)
    except KeyboardInterrupt:
        if ranks.here() is None:
            print("\nstopped", file=sys.stderr)
        return ranks.STOPPED
    except SystemExit:  # by SIGTERM or Ctrl-C, once the state is saved
        console.print(f"\nstopped: --resume goes on from the last save in {checkpoints(args)}")
        raise
    except (fzero.FzeroError, text.TextError) as error:  # meant for the user to read: no traceback
        print(f"train_gpt.py: rank {rank}: {error}", file=sys.stderr)
        return 1
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    return 0


def launch(args: argparse.Namespace, given: Sequence[str]) -> int:
    """Train in ranks started here, and with --check once more without the kill."""
    command = [sys.executable, str(Path(__file__).resolve()), *given]
    status = ranks.launch(command, args.world, args.out, restarts=args.restarts)
    if status or not args.check:
        return status
    print("the same once more, undisturbed:", flush=True)
    again = args.out / "undisturbed"
    undisturbed = [part for part in given if part != "--resume"]
    command = [sys.executable, str(Path(__file__).resolve()), *undisturbed, "--kill-at", "-1", "--out", str(again)]
    if status := ranks.launch(command, args.world, again):
        return status
    first, second = (json.loads((out / "report.json").read_text())["digest"] for out in (args.out, again))
    same = first == second
    print(f"the parameters {'are bit for bit those' if same else 'DIFFER from those'} of the run that nobody disturbed")
    return 0 if same else 1


def train(args: argparse.Namespace, rank: int, console: Console) -> None:
    """The whole job, as one rank does it."""
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    begin(args, rank)
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

    on_disk = text.on_disk(corpus.train, args.out / "text.bin")
    tokens = fzero.data.Tokens(on_disk, dtype="uint8", sequence=args.seq, seed=args.seed)
    with fzero.Checkpointer(checkpoints(args), every=args.checkpoint_every or None, keep=KEPT_CHECKPOINTS) as saver:
        state = saver.resume(init, spec, key=key)
        state, curves, speed = fit(args, state, saver, tokens, corpus, rank, device, console)
    params = fzero.unshard(state.params)
    measured = measure(args, state, tokens, rank, device)
    planned = account(state.program)  # ranks that share memory need no receive buffers: less than was planned for any
    console.print("measured: the program that ran, the tensors held, and the allocator's events of one more step")
    console.print(memory.measured_table(planned, planned.peak, measured))
    loss = curves.held_out[-1][1]
    console.print(f"held-out loss {loss:.3f} nats per byte; {speed:,.0f} tokens/s over {args.steps} steps")
    console.print(f"digest of the parameters: {digest(params)} (with these arguments, no matter who was killed)")
    if rank == 0:
        planned_bytes = {**planned, "state": planned.state, "peak": planned.peak}
        measured_bytes = [{**asdict(one), "peak": one.peak} for one in measured]
        report = {"planned": planned_bytes, "measured": measured_bytes, "tokens_per_second": speed, **asdict(curves)}
        report["digest"] = digest(params)
        leave(args, params, curves, report, console)


def leave(args: argparse.Namespace, params: Params, curves: Curves, report: dict[str, Any], console: Console) -> None:
    """What stays after the run: a sample, the loss curve, and every number."""
    sample = generate(params, b"def ", 400, seed=args.seed).decode(errors="replace")
    console.rule("a sample")
    console.print(sample, markup=False)
    console.rule()
    (args.out / "sample.txt").write_text(sample)
    plot(curves, args.out / "loss.png", f"{args.size} GPT, {args.world} ranks, zero={args.zero}")
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    (args.out / "report.json").write_text(json.dumps({"arguments": arguments, **report}, indent=1))
    console.print(f"in {args.out}: program.txt, loss.png, sample.txt, report.json")


def checkpoints(args: argparse.Namespace) -> Path:
    return args.out / "checkpoints"


def begin(args: argparse.Namespace, rank: int) -> None:
    """A run that is no continuation removes what an earlier one saved in --out."""
    if args.resume or ranks.attempt() > 0:
        return
    if rank == 0:
        shutil.rmtree(checkpoints(args), ignore_errors=True)
    if args.world > 1:
        dist.barrier()


def digest(params: Params) -> str:
    """Of every bit of every parameter."""
    found = hashlib.sha256()
    for leaf in tree.flatten(params)[1]:
        found.update(leaf.detach().cpu().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()[:16]


def fit(
    args: argparse.Namespace,
    state: fzero.State,
    saver: fzero.Checkpointer,
    tokens: fzero.data.Tokens,
    corpus: text.Corpus,
    rank: int,
    device: torch.device,
    console: Console,
) -> tuple[fzero.State, Curves, float]:
    """The training loop: the trained state, its loss curves, and tokens a second.

    What was saved beside the state is the position in the data and the curves so far.
    """
    first = state.step
    left = max(args.steps - first, 0)
    losses = torch.empty(first + left, device=device)  # written without reading, so a step need not be waited for
    losses[:first] = torch.tensor([float(x) for x in saver.extra.get("train", [])])
    held_out = [(step, float(x)) for step, x in saver.extra.get("held_out", [])]
    if first:
        console.print(f"going on after step {first}, saved in {saver.dir}")
    else:
        held_out.append((0, held_out_loss(args, state, corpus, rank, device)))
    batches = tokens.batches(args.batch, position=saver.extra.get("position", 0))

    def so_far() -> dict[str, Any]:
        train = losses[: state.step].tolist()  # as text, for JSON has no nan
        return {
            "position": batches.position,
            "train": [repr(x) for x in train],
            "held_out": [[step, repr(x)] for step, x in held_out],
        }

    evaluate_at = {round(args.steps * (i + 1) / NUM_EVALUATIONS) for i in range(NUM_EVALUATIONS)} - {0}
    seconds = 0.0
    with progress(args, console, first) as show:
        for batch in itertools.islice(batches, left):
            start = time.perf_counter()
            state = fzero.step(state, placed(batch, device))
            losses[state.step - 1] = state.metrics["loss"]
            show(state.step, state.metrics["loss"], held_out[-1][1])
            seconds += time.perf_counter() - start
            if state.step in evaluate_at:
                held_out.append((state.step, held_out_loss(args, state, corpus, rank, device)))
            start = time.perf_counter()
            saver.after(state, so_far)
            seconds += time.perf_counter() - start
            if state.step == args.kill_at and rank == args.world - 1 and ranks.attempt() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    speed = left * args.batch * args.seq / max(seconds, 1e-9)
    return state, Curves(losses.tolist(), held_out), speed


def placed(batch: Batch, device: torch.device) -> Batch:
    return {name: x.to(device) for name, x in batch.items()}


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
    return float(torch.stack([fzero.evaluate(state, placed(batch, device), loss_fn) for batch in batches]).mean())


def measure(
    args: argparse.Namespace, state: fzero.State, tokens: fzero.data.Tokens, rank: int, device: torch.device
) -> list[memory.Measured]:
    """The bytes on every rank in one more step, whose result nobody needs."""
    batch = placed(next(tokens.batches(args.batch, position=args.steps * args.batch)), device)
    held = state.held_bytes
    _, step = measured_peak(lambda: fzero.step(state, batch), device)
    optimizer = held["optimizer"] + held["state"]  # and the key
    mine = memory.Measured(held["param"], optimizer, memory.held_bytes(batch.values()), held["arena"] + step)
    numbers = torch.tensor(astuple(mine), dtype=torch.int64, device=device)
    everyone = [torch.empty_like(numbers) for _ in range(args.world)]
    if args.world > 1:
        dist.all_gather(everyone, numbers)
    else:
        everyone = [numbers]
    return [memory.Measured(*one.tolist()) for one in everyone]


if __name__ == "__main__":
    sys.exit(main())
