"""session: the memory, layout and programs that the states of one `init` share, and the loop that runs a step on this
rank.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from fzero import progress, tree
from fzero._torch_compat import default_store, forget_fakes
from fzero.capture import ambient
from fzero.capture.reads.noted import own_changes_forgotten
from fzero.collector import return_freed
from fzero.comm.agree import agree
from fzero.comm.heartbeat import ALONE, Presence
from fzero.comm.launcher import crowded, first_here
from fzero.comm.transport import Transport
from fzero.compile import fault_report
from fzero.compile.batch_key import Called, changed, check_strings, difference, has_plain, key_of, with_tensors
from fzero.compile.checked import checked_step
from fzero.compile.kept_lowerings import Kept
from fzero.compile.lowered import Lowered
from fzero.compile.lowering_context import LoweringContext
from fzero.compile.step import fakes_on
from fzero.cost.kept_costs import Costs
from fzero.errors import CaptureError, DonatedError, VerifyError, leaf_name, named
from fzero.ir.program import Program
from fzero.ir.records import DISK, HOST
from fzero.plan.state_plan import Plan
from fzero.runtime import compile_segments
from fzero.runtime.copies import Copies
from fzero.runtime.executor import Executor
from fzero.runtime.lanes import Lanes
from fzero.session import closed_over
from fzero.session.leaf_gathers import LeafGathers
from fzero.spec import Spec
from fzero.state.homes import Homes
from fzero.state.host_memory import host_memory
from fzero.state.state import Life, ShardedTensor, State

log = logging.getLogger("fzero")
MAX_PROGRAMS = 32  # steps and evaluations kept: every length of a batch has a program of its own, of half a MB or more
MAX_FAKES = 4096  # results of ops on fake tensors that torch keeps: 1 KB each, some thousands for a large model
MAX_EVALUATIONS = 16  # evaluations kept: a function that is made anew for every call must not fill the memory


@dataclass
class Session:
    """The spec, world, layout, memory and programs that the states of one `init` share.

    memory: the state's buffers by name, in memory and on disk. programs: the lowered steps by batch key. evaluations:
    the lowered evaluations; in both the last used is at the end. inputs: the paths of numbers in a batch that have
    changed, by the function that is evaluated (None: the step). bound: executors by the id of their `Lowered`.
    compiled_segments: by the digest of a program, the last used at the end. lanes: what runs moves, with the rank's
    file.

    Invariants: all executors share `arena` and `host_arena`, which are as large as the largest program needs.
    `programs` and `compiled_segments` gain an entry on all ranks or on none. So do they lose one: the program that was
    not used for the longest time goes when all ranks have agreed on one more than MAX_PROGRAMS.

    Only the methods here and `fzero.api` write the fields. Two exceptions: a `Checkpointer` sets `flags`, and adds to
    `any_rank_flags`.
    """

    spec: Spec
    rank: int
    world_size: int
    device: torch.device
    plan: Plan
    treedef: Any
    memory: Homes
    transport: Transport
    group: Any
    presence: Presence = ALONE
    programs: dict[Any, Lowered] = field(default_factory=dict)
    evaluations: dict[Any, Lowered] = field(default_factory=dict)
    bound: dict[int, Executor] = field(default_factory=dict)
    compiled_segments: dict[str, Any] = field(default_factory=dict)
    arena: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))  # the programs' buffers
    flags: Callable[[], int] = lambda: 0  # bits that this rank sends to the others with every step
    any_rank_flags: int = 0  # the bits that any rank sent with the last step
    host_arena: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))  # of moves
    lanes: Lanes = field(default_factory=Lanes)
    exhausted: torch.Tensor | None = None  # 0-d bool: whether the loss scale reached its end since the last look
    inputs: dict[Any, frozenset[str]] = field(default_factory=dict)
    last_key: Any = None
    last_program: Program | None = None
    turn: threading.RLock = field(default_factory=threading.RLock, repr=False)  # of the thread whose call runs

    @cached_property
    def costs(self) -> Costs:
        """The measured costs of matrix products, the same on every rank."""
        return Costs("products", rank=self.rank, store=default_store() if self.world_size > 1 else None)

    @cached_property
    def copies(self) -> Copies:  # of parameters, between steps
        return Copies(self.memory.in_memory, self.transport.block)

    @property
    def like(self) -> Any:
        """The state as one rank's step sees it, on the meta device."""
        leaves = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in self.plan.leaves]
        return tree.unflatten(self.treedef, leaves)

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """The bytes that this rank has sent so far, by axis of the mesh."""
        sent: Mapping[str, int] = self.transport.comm.sent_bytes
        return sent

    def sharded(self, life: Life) -> Any:
        """The state's pytree, with a `ShardedTensor` for each leaf."""
        return tree.unflatten(self.treedef, [ShardedTensor(leaf, self, life) for leaf in self.plan.leaves])

    def compiled(self, batch: Any, fn: Callable[..., Any] | None = None, step: int = 0) -> Lowered:
        """The program for a batch of this structure, shapes, dtypes and static values: that of the step after `step`
        steps, or of the evaluation of `fn`. The last MAX_EVALUATIONS evaluations are kept."""
        if fn is not None:
            return self._evaluation(fn, batch, (_called(fn), key_of(batch["batch"], self.device), batch["key"] is None))
        phase = self.phase(step)
        key = key_of(batch, self.device, phase)
        self._drop_changed(self.programs, [key] if key in self.programs else [*self.programs])
        if key not in self.programs and self.last_key not in (None, key):
            log.warning("fzero: a new program is traced: %s", difference(self.last_key, key))
        for name in self._phases_from(phase) if key not in self.programs else (phase,):  # the others before their turn
            own = key if name == phase else key_of(batch, self.device, name)
            lowered = self.programs[own] if own in self.programs else self._lowered(batch, None, name)
            self.programs = _with_last(self.programs, own, lowered)
        self.last_key = key
        for oldest in [*self.programs][:-MAX_PROGRAMS]:  # of one text, with other constants
            self._drop(self.programs, oldest)
        return lowered

    def phase(self, step: int) -> str:
        """The phase of the run that comes after so many steps; "" without phases."""
        return "" if self.spec.phases is None else self.spec.phases.at(step)

    def _phases_from(self, phase: str) -> list[str]:
        """All phases of the run, this one last."""
        names = [""] if self.spec.phases is None else [*self.spec.phases.each]
        return [*(name for name in names if name != phase), phase]

    def settled(self, batch: Any, fn: Callable[..., Any] | None = None, step: int = 0) -> Any:
        """The batch of the step after `step` steps, or of the evaluation of `fn`, with the numbers that change as
        tensors.

        Raises TreeError for a string that changes.
        """
        if not has_plain(batch):
            return batch
        inputs = self.inputs.get(_called(fn), frozenset())
        batch = with_tensors(batch, inputs, self.device)
        keys = self.programs if fn is None else [key[1] for key in self.evaluations if key[0] == _called(fn)]
        changes = [*changed(key_of(batch, self.device, self.phase(step) if fn is None else ""), keys)]
        check_strings(changes)
        for path, before, now in changes:
            log.warning(
                "fzero: %s was %s, is %s: a Python number that changes is a 0-d tensor of the batch from here on, one "
                "program for all its values. Give torch.tensor(x) from the first step, or fzero.static(x) where its "
                "few values decide the program", leaf_name("batch", path), before.text, now.text,
            )  # fmt: skip
            self.last_key = None
            self.inputs[_called(fn)] = inputs = inputs | {path}
        return with_tensors(batch, inputs, self.device)

    def _evaluation(self, fn: Callable[..., Any], batch: Any, key: Any) -> Lowered:
        of_fn = [other for other in self.evaluations if other[0] == key[0]]
        self._drop_changed(self.evaluations, [key] if key in self.evaluations else of_fn)
        lowered = self.evaluations[key] if key in self.evaluations else self._lowered(batch, fn)
        self.evaluations = _with_last(self.evaluations, key, lowered)
        for oldest in [*self.evaluations][:-MAX_EVALUATIONS]:
            self._drop(self.evaluations, oldest)
        return lowered

    def _drop_changed(self, programs: dict[Any, Lowered], keys: Sequence[Any]) -> None:
        """Raises CaptureError if a value that these programs have read from Python is another now. With
        `Spec(on_change="retrace")` the programs are dropped instead."""
        for key in keys:
            change = programs[key].graph.change()
            if change is None:
                continue
            if self.spec.on_change == "error":
                raise CaptureError(". ".join(change))
            log.warning("fzero: a new program is traced: %s", change[0])
            self._drop(programs, key)

    def _drop(self, programs: dict[Any, Lowered], key: Any) -> None:
        self.bound.pop(id(programs.pop(key)), None)

    def _lowered(self, batch: Any, fn: Callable[..., Any] | None, phase: str = "") -> Lowered:
        context = _context(self.transport, self.rank, self.world_size)
        if self.spec.matmul == "fastest":
            context = replace(context, costs=self.costs)
        with progress.shown(f"lowering the {'step' if fn is None else 'evaluation'}"):
            others = [program.graph.reads for program in (*self.programs.values(), *self.evaluations.values())]
            with own_changes_forgotten(others), _numbers_named(self.inputs.get(_called(fn), frozenset())):
                like = fakes_on(self.like, self.device)
                lowered = checked_step(self.spec, like, batch, self.plan, context, fn, phase)
        forget_fakes(MAX_FAKES)
        return_freed()
        _tell(lowered)
        return lowered

    def bind(self, lowered: Lowered) -> Executor:
        """The program's executor on this rank's memory. All programs of a session share one arena, since they never run
        at the same time. It has room for those of later phases: a run must not end for want of memory at its switch."""
        program = lowered.on(self.rank)
        known = [program, *(other.on(self.rank) for other in self.programs.values())]
        if (room := max(one.arena_bytes for one in known)) > self.arena.numel():
            self.bound.clear()  # they hold the old arena
            self.arena = self.arena.new_empty(0)
            self.arena = self.transport.block(room)
        if (room := max(one.arenas[HOST] for one in known)) > self.host_arena.numel():
            self.bound.clear()
            self.host_arena = self.host_arena.new_empty(0)
            self.host_arena = host_memory(self.device, room)
        if self.memory.file is not None:
            self.memory.file.grow(max(one.arenas[DISK] for one in known))
        if id(lowered) not in self.bound:
            names = (name for name, b in program.buffers.items() if b.kind == "constant")
            constants = dict(zip(names, lowered.graph.constants.values(), strict=True))
            memory = {**self.memory.in_memory, **self.copies.of(program), **constants}
            compiled = self.compiled_segments.get(lowered.program_digest, {})
            self.bound[id(lowered)] = Executor(
                program, self.rank, self.transport.comm, memory, self.arena, compiled, cuda_graph=self.spec.cuda_graph,
                host_arena=self.host_arena, lanes=self.lanes,
            )  # fmt: skip
        return self.bound[id(lowered)]

    def ready(self, lowered: Lowered) -> Executor:
        """The program's executor, ready to run. Collective if the program is new, which is so on all ranks or on none:
        then the segments are compiled, and the ranks agree that all of them can go on."""
        digest = lowered.program_digest
        if digest in self.compiled_segments:
            self.compiled_segments = _with_last(self.compiled_segments, digest, self.compiled_segments[digest])
            return self.bind(lowered)
        failure: Exception | None = None
        call = self.presence.call_name
        try:
            self.compiled_segments[digest] = compile_segments.compiled(
                lowered.on(self.rank),
                how=self.spec.compile,
                device=self.device,
                rank=self.rank,
                world_size=self.world_size,
                group=self.group,
            )
            self.bind(lowered)
        except VerifyError as error:
            own = {self.rank: lowered.on(self.rank)}
            failure = fault_report.explained(error, self.spec, self.plan, {}, own, lowered.reduce)
        except Exception as error:
            failure = error
        try:
            agree(self.rank, self.world_size, "a new program's memory", digest, self.group, failure)
            closed_over.compare(lowered.graph, self.plan.mesh, self.group, self.presence.label)
        except Exception:
            self.compiled_segments.pop(digest, None)  # on every rank: it is new again to all of them
            failure = None  # as in `api.agreed`
            raise
        self.presence.rename(call)
        for oldest in [*self.compiled_segments][:-MAX_PROGRAMS]:
            self._forget(oldest)
        return self.bind(lowered)

    def _forget(self, digest: str) -> None:
        """Drops all there is of a program."""
        del self.compiled_segments[digest]
        for table in (self.programs, self.evaluations):
            for key in [key for key, lowered in table.items() if lowered.program_digest == digest]:
                self._drop(table, key)
        log.warning(
            "fzero: more than %d programs: the one that was not used for the longest time is dropped, and traced again "
            "when it is needed. Batches of fewer shapes need fewer: pad them to some lengths", MAX_PROGRAMS,
        )  # fmt: skip

    def whole(self, leaves: Sequence[ShardedTensor], joined: bool = True) -> list[torch.Tensor]:
        """Whole leaves of one state, on every rank. Collective: the ranks agree first that they ask for the same
        leaves. joined: see `LeafGathers.gathered`."""
        ambient.check_outside("fzero.unshard or .full()")
        with self.turn:
            failure: Exception | None = None
            try:
                for leaf in leaves:
                    leaf.life.check(leaf.path)
            except DonatedError as error:
                failure = error
            asked = hashlib.blake2b(repr([leaf.path for leaf in leaves]).encode(), digest_size=8).hexdigest()
            part = "whole" if joined else "part by dims"
            request = (
                f"the {part} of {leaves[0].path!r}{f' and {len(leaves) - 1} more leaves' if len(leaves) > 1 else ''}"
            )
            agree(self.rank, self.world_size, request, asked, self.group, failure)
            with self.presence.running(where=lambda: "gathering it"), progress.shown(f"gathering {request}"):
                gathers = LeafGathers(self.plan, self.memory, self.transport.comm, self.device, self.rank)
                return gathers.gathered([leaf.leaf for leaf in leaves], joined)


def _called(fn: Callable[..., Any] | None) -> Called | None:
    """A function of an evaluation as part of a key; None of the step."""
    return None if fn is None else Called(fn)


def _tell(lowered: Lowered) -> None:
    """Logs what was decided, and as a warning what was asked for and changes nothing."""
    of_phase = f"phase {lowered.phase!r}: " if lowered.phase else ""
    for name, chosen in lowered.choices.items():
        log.log(logging.WARNING if name == "idle" else logging.INFO, "fzero: %s%s", of_phase, chosen)


def _with_last(table: Mapping[Any, Any], key: Any, value: Any) -> dict[Any, Any]:
    """The table with an entry at its end. A new one, so that Ctrl-C at any line finds the entry in the old or the new.

    >>> list(_with_last({"a": 1, "b": 2}, "a", 1))
    ['b', 'a']
    """
    return {**{other: held for other, held in table.items() if other != key}, key: value}


def _context(wires: Transport, rank: int, world_size: int) -> LoweringContext:
    """What a rank lowers with. Where this machine has more ranks than cores, one of them lowers and the others wait:
    together they would take as long as one after the other."""
    kept = Kept(turns=crowded(world_size, os.environ), writes=first_here(rank, os.environ))
    return LoweringContext(wires.name, rates=wires.rates, kept=kept)


@contextmanager
def _numbers_named(paths: frozenset[str]) -> Iterator[None]:
    """Adds to an error of a trace which of its tensors are Python numbers: those of the batch at these paths."""
    try:
        yield
    except (CaptureError, TypeError, ValueError) as error:
        if not paths:
            raise
        names = " and ".join(leaf_name("batch", path) for path in sorted(paths))
        raise CaptureError(
            f"{error}. {names}: a Python number that changed, and so a tensor here. Where its value decides the "
            "program, mark it in the batch: fzero.static(x)"
        ) from error


def session_of(state: State) -> Session:
    """The session that a state belongs to."""
    assert isinstance(state.runtime, Session)
    return state.runtime


def turn_of(state: Any) -> AbstractContextManager[object]:
    """For a call that runs on a state's memory: it waits for those of other threads, which use the same memory."""
    return session_of(state).turn if isinstance(state, State) else nullcontext()


def execute(state: State, lowered: Lowered, batch: Any, watch: Callable[[int], None] | None = None) -> Any:
    """Runs the program of a step or an evaluation on the state's memory. Returns its metrics.

    An error after the first write of the state makes the state unusable, and its `life` says so.
    """
    bound = session_of(state).ready(lowered)
    tensors = [x.detach() for x in tree.flatten(batch)[1] if isinstance(x, torch.Tensor)]
    state.life.steps = True
    try:
        with session_of(state).presence.running(lambda: bound.position, bound.where):
            session_of(state).copies.refresh(bound.program)
            for tensor in lowered.graph.closed:
                tensor.refresh()
            metrics = bound.run(tensors, watch)
        session_of(state).copies.wrote(bound.program)
    except BaseException as error:
        if bound.wrote_state:
            state.life.ended = (
                f"is unusable: step {state.step + 1} failed after it began to write "
                f"({named(error).partition(chr(10))[0]}). "
                "Start again from fzero.init or the last checkpoint"
            )
        raise
    return tree.unflatten(lowered.graph.metrics_treedef, [metrics[name] for name in lowered.graph.metric_names])
