"""runs: a case through fzero: lowered, bound on every rank of this process, and interpreted; memory is poisoned.

Results are returned by name: the loss, and either the gradients or the state after the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fzero
from fzero import optim, tree
from fzero.compile.lowered import Lowered
from fzero.errors import FzeroError
from fzero.ir.program import Program
from fzero.runtime.executor import Executor
from fzero.runtime.handlers import spoil
from fzero.runtime.interpreter import DeadlockError, LocalComm, Mailbox, interpret
from fzero.state import storage
from fzero.training import training_of
from lab.fuzz.case import Case


@dataclass(frozen=True)
class Prepared:
    """A case's script, run: its loss, the first state, the batch of every rank, and the spec's fields."""

    names: Mapping[str, Any]
    state: Any
    batches: Sequence[Any]
    fields: Mapping[str, Any]

    @property
    def spec(self) -> fzero.Spec:
        """The spec with these fields."""
        return fzero.Spec(**self.fields)


def prepared(case: Case) -> Prepared:
    """The state of a training step is `fzero.Spec`'s; of a step that returns gradients, params and a key."""
    names = case.namespace()
    options = case.options
    batches = [names["batch"](rank) for rank in range(options.world)]
    device = torch.get_default_device()
    key = fzero.random.key(7, device=device)
    spec_fields = {name: eval(text, {"optim": optim}) for name, text in options.spec.items()} | {"device": device.type}
    if options.form == "training":
        fields = {"loss": names["loss"], "allow_unused": True, **spec_fields}
        state = training_of(fzero.Spec(**fields)).init(names["params"], key if options.keyed else None)
    else:
        fields = {"step": _gradients(names["loss"], options.keyed), "allow_unused": True, "zero": 0, **spec_fields}
        state = {"params": names["params"], **({"key": key} if options.keyed else {})}
    return Prepared(names, state, batches, fields)


def _gradients(loss: Any, keyed: bool) -> Any:
    def step(state: Any, batch: Any) -> Any:
        train, frozen = tree.partition(state["params"], lambda path, x: x.dtype.is_floating_point)

        def joined(train: Any, batch: Any) -> Any:
            return loss(tree.merge(train, frozen), batch)

        of = joined if tree.flatten(frozen)[1] else loss
        value, grads = fzero.value_and_grad(of, key=state["key"] if keyed else None)(train, batch)
        return state, {"loss": value, "grads": grads}

    return step


def joined(prepared: Sequence[Prepared], refused: set[int]) -> Prepared:
    """Returns the steps of cases that return gradients as one step on all their states.

    A metric's name begins with the index of its case and a stroke. A case that is refused while it is captured is left
    out, and its index is put into `refused`.
    """

    def step(state: Any, batch: Any) -> Any:
        metrics = {}
        for n, case in enumerate(prepared):
            try:
                metrics[str(n)] = case.fields["step"](state[n], batch[n])[1]
            except FzeroError:
                refused.add(n)
        return state, metrics

    batches = [[case.batches[0] for case in prepared]]
    fields = {"step": step, "allow_unused": True, "zero": 0, "device": prepared[0].fields["device"]}
    return Prepared({}, [case.state for case in prepared], batches, fields)


def lowered(prepared: Prepared, **changed: Any) -> Lowered:
    """Returns the case lowered."""
    spec = fzero.Spec(**{**prepared.fields, **changed})
    state, key = prepared.state, None
    if spec.step is None:
        state, key = prepared.names["params"], prepared.state["key"] if "key" in state else None
    return fzero.lower(spec, state, prepared.batches[0], world_size=len(prepared.batches), key=key)


def memory_of(prepared: Prepared, low: Lowered) -> list[dict[str, Tensor]]:
    """Returns the contents of a rank's buffers before the step, by rank."""
    program = low.program
    inputs = [name for name, b in program.buffers.items() if b.kind == "batch"]
    fixed = [name for name, b in program.buffers.items() if b.kind == "constant"]
    constants = dict(zip(fixed, low.graph.constants.values(), strict=True))
    leaves = [x if isinstance(x, Tensor) else torch.tensor(x) for x in tree.flatten(prepared.state)[1]]
    memory = []
    for rank, batch in enumerate(prepared.batches):
        own_inputs = dict(zip(inputs, (x.clone() for x in tree.flatten(batch)[1]), strict=True))
        memory.append({**storage.shards(low.plan, leaves, rank), **constants, **own_inputs})
    return memory


def results(
    low: Lowered, memory: Sequence[Mapping[str, Tensor]], metrics: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Returns the state's leaves and the metrics, by path. Raises AssertionError if ranks differ in a metric."""
    leaves = {leaf.path: storage.join(low.plan, leaf, memory) for leaf in low.plan.leaves}
    for name, value in metrics[0].items():
        assert name in low.graph.varying_metrics or all(same_bits(m[name], value) for m in metrics), (
            f"ranks differ in {name}"
        )
    return {**leaves, **metrics[0]}


def interpreted(prepared: Prepared, low: Lowered) -> dict[str, Tensor]:
    """Returns the results of the interpreter."""
    memory = memory_of(prepared, low)
    with torch.no_grad():
        ranks = interpret(dict.fromkeys(range(len(memory)), low.program), memory, poison=True)
    metrics = [{n: rank.memory[b].clone() for n, b in low.program.metrics.items()} for rank in ranks]
    return results(low, [rank.memory for rank in ranks], metrics)


def bound(prepared: Prepared, low: Lowered) -> dict[str, Tensor]:
    """Returns the results of the executor."""
    memory = memory_of(prepared, low)
    metrics = run_bound(dict.fromkeys(range(len(memory)), low.program), memory, steps=1)
    return results(low, memory, metrics)


def run_bound(
    programs: Mapping[int, Program], memory: Sequence[Mapping[str, Tensor]], steps: int
) -> list[dict[str, Tensor]]:
    """Every rank bound, in one process, one op at a time, the arena poisoned before each step; each rank's metrics."""
    world = Mailbox(programs[0].mesh)
    ranks = []
    for r, program in programs.items():
        device = next((x.device for x in memory[r].values()), None)
        arena = torch.empty(program.arena_bytes, dtype=torch.uint8, device=device)
        ranks.append(Executor(program, r, LocalComm(world, r), memory[r], arena))
    for _ in range(steps):
        for bound, own in zip(ranks, memory, strict=True):
            spoil(bound.arena)
            names = (n for n, b in bound.program.buffers.items() if b.kind == "batch")
            for name, place in zip(names, bound.batch, strict=True):
                if place is not None:
                    place.copy_(own[name])
        with torch.no_grad():
            _together(ranks)
    return [{name: bound.memory[buffer].clone() for name, buffer in bound.metrics} for bound in ranks]


def _together(ranks: Sequence[Executor]) -> None:
    """Each rank as far as it comes, in turn, until all have ended."""
    positions = [0] * len(ranks)
    while any(i < len(bound.calls) for i, bound in zip(positions, ranks, strict=True)):
        before = list(positions)
        for r, bound in enumerate(ranks):
            while positions[r] < len(bound.calls):
                op = bound.program.ops[positions[r]]
                if op.is_wait and not bound.comm.ready(op.reads[0].name):
                    break
                for call in bound.calls[positions[r]]:
                    call()
                positions[r] += 1
        if positions == before:
            raise DeadlockError(f"every rank waits for another, at ops {positions}")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits; NaN are alike."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.numel():
        return True  # with any strides: some do not allow a view as bytes
    raw = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    if torch.equal(*raw):
        return True
    return a.dtype.is_floating_point and torch.equal(a.isnan(), b.isnan()) and bool(((a == b) | a.isnan()).all())
