"""Ways to run a step on several ranks, in this process (`run`) or in real gloo processes (`gloo`), and to compare.

`run` lowers a Spec as `fzero.lower` does and interprets the program for every rank at once, with poison: what is read
too early, or after it is gone, is NaN. `gloo` starts one process per rank from a server that has imported torch
already, so that a world costs a tenth of a second, and kills them all when the time is up.
"""

import math
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import kept
import torch
from torch import Tensor

import fzero
from fzero import tree
from fzero.capture.graph import Graph, PerRank
from fzero.comm import pick_way
from fzero.compile.state_recipe import needs_key
from fzero.runtime.interpreter import interpret
from fzero.runtime.reference import reference
from fzero.state import storage
from fzero.training import training_of

GRACE_SECONDS = 40.0  # for the other ranks once one has failed: each is to raise an error of its own within 30

# --- every rank in this process ---------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a run left behind. `paths` name the leaves; per step `leaves` are the logical ones (per-rank leaves
    stacked), `metrics` those of every rank by name; `memory` is every rank's state buffers at the end."""

    lowered: fzero.Lowered
    paths: list[str]
    leaves: list[list[Tensor]] = field(default_factory=list)
    metrics: list[list[dict[str, Tensor]]] = field(default_factory=list)
    memory: list[dict[str, Tensor]] = field(default_factory=list)

    @property
    def final(self) -> dict[str, Tensor]:
        return dict(zip(self.paths, self.leaves[-1], strict=True))

    def losses(self, name: str = "loss") -> list[float]:
        """A metric that is the same on every rank, per step."""
        for step in self.metrics:
            assert all(torch.equal(m[name], step[0][name]) for m in step), f"ranks differ in {name}: {step}"
        return [float(step[0][name]) for step in self.metrics]


def start(spec: fzero.Spec, params: Any, key: Tensor | None = None, ranks: int = 1) -> tuple[list[str], list[Tensor]]:
    """Paths and whole leaves of the first state, as `fzero.init` would place them on so many data ranks."""
    state = params
    if spec.optimizer is not None:
        wants = key is not None or needs_key(spec)
        key = fzero.random.fold_in(fzero.random.key(0) if key is None else key, -2) if wants else None
        state = training_of(spec).init(params, key)
    paths, leaves, _ = tree.flatten(state)
    leaves = [leaf.on(ranks) if isinstance(leaf, PerRank) else leaf for leaf in leaves]
    return paths, [leaf if isinstance(leaf, Tensor) else torch.tensor(leaf) for leaf in leaves]


def run(
    spec: fzero.Spec,
    params: Any,
    batch: Callable[[int, int], Any],
    *,
    world: int,
    steps: int,
    every_step: bool = False,
    poison: bool = True,
    key: Tensor | None = None,
) -> Run:
    """`steps` steps on `world` ranks of this process; `batch(rank, step)` is what a rank is given.

    Keeps the leaves after the last step, or with `every_step` after each.
    """
    names = {number: "" if spec.phases is None else spec.phases.at(number) for number in range(steps)}
    by_phase = {name: kept.lower(spec, params, batch(0, 0), world, key, name) for name in {*names.values()}}
    plan, mesh = by_phase[names[0]].plan, by_phase[names[0]].plan.mesh
    paths, leaves = start(spec, params, key, plan.data_ranks)
    result = Run(by_phase[names[0]], paths, memory=[storage.shards(plan, leaves, rank) for rank in range(world)])
    for number in range(steps):
        lowered = by_phase[names[number]]
        programs = {rank: lowered.programs[mesh.coordinate(rank, "pp") if "pp" in mesh else 0] for rank in range(world)}
        program = programs[0]
        inputs = [name for name, b in program.buffers.items() if b.kind == "batch"]
        constants = [name for name, b in program.buffers.items() if b.kind == "constant"]
        fixed = dict(zip(constants, lowered.graph.constants.values(), strict=True))
        memory = []
        for rank in range(world):
            place = mesh.data_rank(rank)
            given = [x for x in tree.flatten(batch(place, number))[1] if isinstance(x, Tensor)]
            memory.append({**result.memory[rank], **fixed, **dict(zip(inputs, given, strict=True))})
        with torch.no_grad():
            ranks = interpret(programs, memory, poison=poison)
        result.memory = [{name: rank.memory[name] for name in plan.held_by(rank.rank)} for rank in ranks]
        result.metrics.append([{n: rank.memory[b].clone() for n, b in program.metrics.items()} for rank in ranks])
        if every_step or number == steps - 1:
            result.leaves.append([storage.join(plan, leaf, result.memory) for leaf in plan.leaves])
    return result


def run_reference(
    spec: fzero.Spec,
    params: Any,
    batch: Callable[[int, int], Any],
    *,
    world: int,
    steps: int,
    graph: Graph | None = None,
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The same by `fzero.runtime.reference`: rank 0's leaves at the end, and its metrics per step.

    `graph` is the step's, where a test has lowered it already. Asserts that the ranks end with equal states.
    """
    graph = graph or kept.lower(spec, params, batch(0, 0), world).graph
    paths, leaves = start(spec, params)
    states = [[leaf.clone() for leaf in leaves] for _ in range(world)]
    metrics = []
    for number in range(steps):
        given = [[x for x in tree.flatten(batch(r, number))[1] if isinstance(x, Tensor)] for r in range(world)]
        with torch.no_grad():
            states, found = reference(graph, states, given)
        metrics.append(found[0])
    for state in states[1:]:
        assert all(torch.equal(a, b) for a, b in zip(state, states[0], strict=True))
    return dict(zip(paths, states[0], strict=True)), metrics


# --- real processes ---------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What one rank returned, or its error: `Name: message`, then the traceback."""

    value: Any = None
    error: str | None = None


def gloo(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Outcome]:
    """`fn(*args)` in `world` new processes with torchrun's environment and one thread each; an outcome per rank.

    `fn` is a function at the top of a test module; it, its arguments and its result are pickled. All ranks are killed
    after `timeout` seconds, or `GRACE_SECONDS` after one of them failed.
    """
    processes, started = start_ranks(world, fn, *args)
    pipes = {pipe: rank for rank, pipe in enumerate(started)}
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + timeout
    try:
        while pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pipes), left):
                rank = pipes.pop(pipe)  # type: ignore[call-overload]
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    processes[rank].join()
                    outcomes[rank] = Outcome(error=f"Died: rank {rank} with exit status {processes[rank].exitcode}")
                if outcomes[rank].error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    finally:
        for process in processes:
            if process.is_alive() and process.pid not in _finished(processes, outcomes):
                process.kill()
            process.join()
    killed = Outcome(error="Killed: it had not ended when the time was up")
    return [outcomes.get(rank, killed) for rank in range(world)]


def server() -> Any:
    """The server that forks processes which have imported torch, with the names of `multiprocessing`."""
    context = multiprocessing.get_context("forkserver")
    # capture needs the first, test files the last: together they take two seconds, which no process has to wait for
    names = ["torch._dynamo", "fzero", "pytest", "hypothesis", "hypothesis.strategies"]
    trainer = ["transformers.trainer"] if "transformers" in sys.modules else []  # as long again, with what it imports
    context.set_forkserver_preload(names + trainer)
    return context


def start_ranks(world: int, fn: Callable[..., Any], *args: Any) -> tuple[list[Any], list[Connection]]:
    """The processes of `gloo`, and by rank the pipe on which each sends its pickled Outcome before it ends."""
    context, port = server(), free_port()
    processes, pipes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        process = context.Process(target=_rank, args=(theirs, env, fn, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    return processes, pipes


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """What every rank returned; fails with the first error there is."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.error}"
    return [outcome.value for outcome in outcomes]


def _finished(processes: Sequence[Any], outcomes: dict[int, Outcome]) -> set[int]:
    """Ranks that answered without an error end by themselves; the others may wait for a rank that is gone."""
    return {processes[rank].pid for rank, outcome in outcomes.items() if outcome.error is None}


def _rank(pipe: Connection, env: dict[str, Any], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update({name: str(value) for name, value in env.items()})
    torch.set_num_threads(1)
    pick_way.TIMES.update(zip(pick_way.SIZES, (3, 2, 2), strict=True))  # each world measures; no way changes a number
    try:
        outcome = Outcome(fn(*args))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
    except BaseException as error:
        outcome = Outcome(error=f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}")
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    os._exit(0)  # destroying a group that a peer has left would wait for it


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


# --- comparisons ------------------------------------------------------------------------------------------------------


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The leaves that are not bit for bit the same."""
    assert a.keys() == b.keys()
    return [path for path in a if not same_bits(a[path], b[path])]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits: 0.0 is not -0.0 here, and a NaN equals itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (x.reshape(-1).clone(memory_format=torch.contiguous_format) for x in (a, b))
    return not a.numel() or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b| in norm, computed in fp64; 0 for two zeros, infinite where b alone is zero."""
    gap, size = float((a.double() - b.double()).norm()), float(b.double().norm())
    return gap / size if size else (math.inf if gap else 0.0)
