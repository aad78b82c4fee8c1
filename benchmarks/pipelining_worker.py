"""One rank of `benchmarks.pipelining`: its contenders in rounds, or the memory of one; a JSON record."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.contenders import adamw
from benchmarks.model import WEIGHT_DECAY, Batch, Size, UntiedGPT, batches, cross_entropy, make_model
from benchmarks.worker import run_steps

# Untied: torch.distributed.pipelining has no way to share a leaf between stages.
SIZES = {
    "tiny": Size(
        layers=4, width=64, heads=2, vocabulary=512, sequence=32, batch=4, inner=256, family="gpt_untied"
    ),  # for the tests
    "pipe": Size(layers=8, width=384, heads=6, vocabulary=2048, sequence=64, batch=8, inner=1536, family="gpt_untied"),
    "large": Size(
        layers=8, width=768, heads=12, vocabulary=4096, sequence=64, batch=8, inner=3072, family="gpt_untied"
    ),
    # thin layers and long microbatches: a tenth of a step is wire at 1 Gbit/s
    "wire": Size(layers=2, width=256, heads=4, vocabulary=256, sequence=64, batch=64, inner=256, family="gpt_untied"),
}
MICROBATCHES = {"tiny": 4, "pipe": 8, "large": 8, "wire": 8}
SAMPLE_S = 0.002

Step = Callable[[Batch], float | None]  # one optimizer step; the loss, where this rank knows it


@dataclass(frozen=True)
class Contender:
    """`imports` are loaded before the memory that counts as the import's is read."""

    title: str
    make: Callable[[str], Step]
    imports: tuple[str, ...]


# --- torch.distributed.pipelining -------------------------------------------------------------------------------------


def split(layers: int, roles: int) -> list[range]:
    """The layers of each role, as many for each.

    >>> split(8, 4)[1]
    range(2, 4)
    """
    each = layers // roles
    return [range(role * each, (role + 1) * each) for role in range(roles)]


class Stage(nn.Module):
    """The layers of one role, cut by hand: the embeddings on the first, norm and output on the last."""

    def __init__(self, model: UntiedGPT, role: int, roles: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(model.blocks[i] for i in split(len(model.blocks), roles)[role])
        first, last = role == 0, role == roles - 1
        self.tokens: nn.Module | None = model.tokens if first else None
        self.positions: Any = model.positions if first else None
        self.norm: nn.Module | None = model.norm if last else None
        self.output: nn.Module | None = model.output if last else None

    def forward(self, h: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            h = self.tokens(h) + self.positions.weight[: h.shape[1]]
        for block in self.blocks:
            h = block(h)
        if self.norm is not None and self.output is not None:
            h = self.output(self.norm(h))
        return h


def by_torch(size_name: str) -> Step:
    """`Schedule1F1B`. It is not asked for the outputs, which it would keep."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    size, role, roles = SIZES[size_name], dist.get_rank(), dist.get_world_size()
    model = make_model(size)
    assert isinstance(model, UntiedGPT)
    module = Stage(model, role, roles)
    del model
    stage = PipelineStage(module, role, roles, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES[size_name], loss_fn=cross_entropy)
    optimizer = adamw(size, module.parameters())

    def step(batch: Batch) -> float | None:
        found: list[Tensor] = []
        inputs = [batch["x"]] if role == 0 else []
        targets: dict[str, Any] = {"target": batch["y"], "losses": found} if role == roles - 1 else {}
        schedule.step(*inputs, **targets, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(found).detach().mean()) if found else None

    return step


# --- fzero ------------------------------------------------------------------------------------------------------------


def by_fzero(size_name: str, transfers: str, late: bool = False) -> Step:
    import fzero
    from fzero import optim
    from fzero.interop import from_module

    size, roles = SIZES[size_name], dist.get_world_size()
    params, buffers, apply = from_module(make_model(size))
    cut = [f"blocks/{layers[0]}" for layers in split(size.layers, roles)[1:]]
    spec = fzero.Spec(
        loss=lambda p, batch: apply(p, buffers, batch["x"], batch["y"]),
        optimizer=optim.adamw(size.rate, weight_decay=WEIGHT_DECAY),
        mesh={"pp": roles},
        pipeline=fzero.Pipeline("1f1b", cut=cut),
        microbatches=MICROBATCHES[size_name],
        transfers=transfers,
    )
    state = fzero.init(params, spec)
    del params
    if late:
        receive_late(state, next(batches(size, 0)))

    def step(batch: Batch) -> float:
        nonlocal state
        state = fzero.step(state, batch)
        return float(state.metrics["loss"])

    return step


def receive_late(state: Any, batch: Batch) -> None:
    """Replaces the program for such batches by one with late receives, which is verified."""
    import fzero
    from fzero.session.session import session_of

    session = session_of(state)
    lowered = session.compiled(batch)
    changed = replace(lowered, programs={role: late_receives(p) for role, p in lowered.programs.items()})
    fzero.verify(changed.roles)
    session.programs = {key: changed if one is lowered else one for key, one in session.programs.items()}


def late_receives(program: Any) -> Any:
    """The program with every receive moved to right before its wait, or that of a later message of the same sender.

    Waits for sends may stand between, for the other role posts late too and would wait for them.

    >>> from fzero.ir.op import make_op
    >>> from fzero.ir.records import Ref
    >>> @dataclass(frozen=True)
    ... class Program:
    ...     ops: tuple
    >>> recv, wait = make_op("recv", writes=[Ref("x")], axis="pp", peer=0, tag=1), make_op("wait", [Ref("x")])
    >>> [op.kind for op in late_receives(Program((recv, make_op("run", segment="s"), wait))).ops]
    ['run', 'recv', 'wait']
    """
    due = [op for op in program.ops if op.is_recv]  # messages of a sender keep their order
    ops: list[Any] = []
    for op in program.ops:
        if op.is_recv:
            continue
        awaited = next((one for one in due if op.is_wait and one.target == op.reads[0].name), None)
        if awaited is not None:
            now = [one for one in due[: due.index(awaited) + 1] if one.peer == awaited.peer]
            last = max((i for i, one in enumerate(ops) if one.kind == "run" or one.is_recv), default=-1)
            ops[last + 1 : last + 1] = now
            due = [one for one in due if one not in now]
        ops.append(op)
    return replace(program, ops=tuple(ops))


CONTENDERS = {
    "torch": Contender(
        "torch.distributed.pipelining", by_torch, ("torch.distributed.pipelining", "torch.optim", "torch._dynamo")
    ),
    "fzero_p2p": Contender("fzero, over gloo", lambda size: by_fzero(size, "p2p"), ("fzero.interop", "torch._dynamo")),
    "fzero_auto": Contender(
        "fzero, shared memory", lambda size: by_fzero(size, "auto"), ("fzero.interop", "torch._dynamo")
    ),
    "fzero_late": Contender(
        "fzero, over gloo, late receives",
        lambda size: by_fzero(size, "p2p", late=True),
        ("fzero.interop", "torch._dynamo"),
    ),
}


# --- measuring --------------------------------------------------------------------------------------------------------


def pss_bytes() -> int:
    """Proportional memory of this process: a page that n processes map counts for 1/n."""
    return int(re.findall(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)[0]) * 1024


class Peak:
    """A thread that reads the Pss every SAMPLE_S seconds.

    `most` is the highest figure since the last `restart`. The thread writes it, and `restart` does, one at a
    time: or a peak of before would be written back after a restart.
    """

    def __init__(self) -> None:
        self.most = 0
        self.one = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def restart(self) -> int:
        """Returns the peak until now; from here on it counts anew."""
        with self.one:
            most, self.most = max(self.most, pss_bytes()), 0
        return most

    def _read(self) -> None:
        stop = threading.Event()
        while not stop.wait(SAMPLE_S):
            with self.one:
                self.most = max(self.most, pss_bytes())


class Running:
    """A contender in this process, its batches, and the seconds and losses of its steps so far.

    seconds: by round. Only `run` writes.
    """

    def __init__(self, step: Step, data: Iterator[Batch]) -> None:
        self.step, self.data = step, data
        self.seconds: list[list[float]] = []
        self.losses: list[float | None] = []

    def run(self, steps: int) -> None:
        """Runs a round of steps. The ranks meet before each."""
        seconds, _ = run_steps(self._kept, self.data, steps, dist.barrier)
        self.seconds.append(seconds)

    def _kept(self, batch: Batch) -> Tensor:
        self.losses.append(self.step(batch))
        return torch.zeros(())


def running(name: str, size_name: str) -> Running:
    """A contender, with the batches that all ranks of a pipeline are given."""
    return Running(CONTENDERS[name].make(size_name), batches(SIZES[size_name], 0))


def in_rounds(running: Mapping[str, Running], warmup: int, steps: int, rounds: int) -> dict[str, Any]:
    """The record of each contender. In each round every contender runs in turn; the order rotates."""
    names = list(running)
    for one in running.values():
        one.run(warmup)
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            running[name].run(steps)
    return {
        name: {"first_step_s": one.seconds[0][0], "step_s_rounds": one.seconds[1:], "losses": one.losses}
        for name, one in running.items()
    }


def in_memory(imports: Sequence[str], make: Callable[[], Running], warmup: int, steps: int) -> dict[str, Any]:
    """The record of one contender: its peaks of proportional memory, above that after imports."""
    for module in imports:
        importlib.import_module(module)
    dist.barrier()
    gc.collect()
    at_import, peak = pss_bytes(), Peak()
    one = make()
    one.run(warmup)
    start = peak.restart()
    one.run(steps)
    in_steps = peak.restart()
    found = {"pss_import_bytes": at_import, "pss_peak_steps_bytes": in_steps - at_import}
    return {**found, "pss_peak_bytes": max(start, in_steps) - at_import, "losses": one.losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contenders", required=True, type=lambda text: text.split(","), help="commas between")
    parser.add_argument("--size", required=True, choices=SIZES)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=0, help="0: read the Pss of the one contender")
    parser.add_argument("--out", type=Path, required=True, help="a folder: the record is rankN.json in it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if args.rounds:
        made = {name: running(name, args.size) for name in args.contenders}
        record = in_rounds(made, args.warmup, args.steps, args.rounds)
    else:
        name = args.contenders[0]
        imports = CONTENDERS[name].imports
        record = {name: in_memory(imports, lambda: running(name, args.size), args.warmup, args.steps)}
    (args.out / f"rank{dist.get_rank()}.json").write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
