"""load: a state from a checkpoint, at any world size and under any layout.

1. Rank 0 chooses the step: the newest committed one of a run. All ranks read its manifest.
2. The leaves of the state (those of `spec` and `like`, laid out for this world) are compared with those of the
   checkpoint. Every difference is in one MismatchError, and nothing has been touched.
3. Each rank asks the checkpoint for the ranges of elements that it holds. These are read, verified and written straight
   into the state's buffers (`fzero.checkpoint.reader`). No leaf is whole anywhere unless the plan keeps it whole, and
   nothing travels between ranks.

The ranks agree before memory is taken and after it is filled: an error on one is an error on all.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fzero import progress, tree
from fzero._torch_compat import untraced_by_dynamo
from fzero.capture import ambient
from fzero.capture.graph import PerRank
from fzero.capture.short_tracebacks import short_tracebacks
from fzero.checkpoint import other_ranks
from fzero.checkpoint.commit import locate
from fzero.checkpoint.compare import Difference, difference
from fzero.checkpoint.manifest import LeafRecord, read
from fzero.checkpoint.other_ranks import KEEP, MEAN
from fzero.checkpoint.reader import Checkpoint
from fzero.comm.agree import from_first, tell
from fzero.compile.resolve import by_flags, mesh_of
from fzero.compile.state_recipe import recipe_for
from fzero.disk.calls import Disk
from fzero.errors import (
    CheckpointError,
    CorruptError,
    DisagreementError,
    DonatedError,
    MismatchError,
    SpecError,
    leaf_name,
    named,
)
from fzero.plan.parallelism import AUTO
from fzero.plan.state_plan import Plan
from fzero.planner.chosen import with_chosen
from fzero.random import key as first_key
from fzero.session.session import session_of
from fzero.session.world import World, spec_digest
from fzero.spec import Spec
from fzero.state import storage
from fzero.state.first_state import Recipe
from fzero.state.source import Entry, Want
from fzero.state.state import Life, NoMetrics, ShardedTensor, State

log = logging.getLogger("fzero")


@short_tracebacks
@untraced_by_dynamo
@ambient.steady()
def load(
    dir: str | Path,
    spec: Spec | None = None,
    *,
    like: Any = None,
    key: torch.Tensor | None = None,
    strict: bool = True,
    per_rank: str = KEEP,
    disk: Disk | None = None,
) -> State:
    """Returns the state that `fzero.save` wrote.

    dir: a run's directory (its newest committed step) or one step's. spec: the spec to train with from here on. World,
    ZeRO stage, buckets and microbatches may differ from those of the save. `mesh="auto"`: as its plan has them.

    like: a State, or the params that `fzero.init` would get. A State is donated: its spec and its memory are used. Of
    params only the shapes are read. Without `like` the tree is made from the checkpoint, which knows dicts, lists,
    tuples and None.
    key: as in `init`, for a state whose checkpoint holds none. A key in the checkpoint is loaded like every leaf.

    strict: any difference between the leaves is a MismatchError that shows all of it, and nothing is loaded. With
    False, the leaves that fit are loaded. Other leaves keep the values from `init` (or from the state `like`), and the
    log names them. If no leaf fits, it is an error too.

    per_rank: what becomes of leaves of `fzero.per_rank` that another number of ranks has saved: "refuse", or "mean",
    which gives every rank the mean of a floating one. So what is owed (`fzero.coded_error`) is kept. Not for a State.
    disk: the calls that read files, for tests.

    Every rank must call it. Raises CheckpointError: CorruptError for damaged files, MismatchError for other leaves. A
    state given as `like` stays usable unless reading fails after writing began; then it is marked unusable.

    >>> import tempfile, fzero
    >>> spec = fzero.Spec(loss=lambda p, b: ((b @ p["w"]) ** 2).mean(), optimizer=fzero.optim.sgd(0.1))
    >>> state = fzero.step(fzero.init({"w": torch.ones(2)}, spec), torch.eye(2))
    >>> with tempfile.TemporaryDirectory() as run:
    ...     _ = fzero.save(state, run)
    ...     again = fzero.load(run, spec)
    >>> again.step, again.params["w"].full().tolist()
    (1, [0.8999999761581421, 0.8999999761581421])
    """
    _check_given(spec, like, per_rank)
    if isinstance(like, State):
        return _into(like, Path(dir), strict, disk or Disk())
    spec, like = _shapes(spec, like)
    world = World.open("load", spec, like)
    with _typed(dir):
        chosen = _chosen(Path(dir), world, disk or Disk())
        spec = _settled(chosen, spec, world, disk or Disk())

        def filler() -> Filling:
            saved = Checkpoint(chosen, disk)
            params_like = _tree(saved, spec) if like is None else like
            wanted = first_key(0) if key is None and spec.loss is not None and "key" in saved.leaves else key
            ranks = mesh_of(spec, world.size).data_ranks
            recipe = recipe_for(spec, params_like, wanted, world.device, ranks)
            return Filling(saved, recipe, ranks, strict, per_rank == MEAN)

        state = world.state("load", spec, filler)
    log.info("fzero: loaded step %d from %s", state.step, chosen)
    return state


class Filling:
    """A `fzero.session.world.Filler`: the leaves of a recipe, with the values of a checkpoint.

    Nothing changes after it is made. keep: the paths of leaves that keep the recipe's value. respread: those of leaves
    per rank that another number of ranks has saved.
    """

    def __init__(self, saved: Checkpoint, recipe: Recipe, data_ranks: int, strict: bool, spreads: bool = False) -> None:
        """Compares the recipe's leaves with the checkpoint's. spreads: leaves per rank may be of another number of
        ranks. Raises MismatchError."""
        self.paths, self.values, self.per_rank, self.treedef = (
            recipe.paths,
            recipe.values,
            recipe.per_rank,
            recipe.treedef,
        )
        self.saved, self.recipe, self.step = saved, recipe, saved.step
        self.seen = {"the digest of the checkpoint's manifest": saved.digest}
        here = {
            path: entry(tuple(value.shape), value.dtype, path in recipe.per_rank, data_ranks)
            for path, value in zip(recipe.paths, recipe.values, strict=True)
        }
        self.respread = other_ranks.respread(here, saved.leaves, recipe.sliced) if spreads else set()
        self.keep = _compared({**here, **{path: saved.leaves[path] for path in self.respread}}, saved, strict).unfit

    def place(self, plan: Plan, rank: int, memory: Mapping[str, torch.Tensor]) -> tuple[str, str]:
        """Fills this rank's buffers; returns the checkpoint's digest. Raises MismatchError and CorruptError."""
        wants = wanted(plan, rank, memory, self.keep | self.respread)
        others = [want for want in wanted(plan, rank, memory, self.keep) if want.path in self.respread]
        self.saved.check(wants)
        try:
            self.recipe.place(plan, rank, memory, only=self.keep)
        except NotImplementedError:  # of a meta tensor
            raise MismatchError(
                self.saved.directory,
                f"does not have {min(self.keep)!r}, whose first value depends on values that are not there. "
                "Give load tensors that have some, as fzero.init would be given: like=params",
            ) from None
        self.saved.fill(wants)
        other_ranks.fill(self.saved, others, self.recipe.sliced)
        return self.saved.digest, ""


def entry(shape: tuple[int, ...], dtype: torch.dtype, per_rank: bool, data_ranks: int) -> Entry:
    """Returns a state's leaf of this shape on one rank, as a source describes it."""
    return Entry((data_ranks, *shape) if per_rank else shape, dtype, per_rank)


def wanted(plan: Plan, rank: int, memory: Mapping[str, torch.Tensor], keep: set[str]) -> list[Want]:
    """Returns the ranges that a rank's buffers hold of every leaf, in its order, without the leaves in `keep`."""
    wants = []
    for leaf in plan.leaves:
        out, start = storage.flat(plan, memory, leaf, rank)
        if len(out) and leaf.path not in keep:
            wants.append(Want(leaf.path, start, out, storage.order(plan, leaf)))
    return wants


# --- pieces -----------------------------------------------------------------------------------------------------------


def _check_given(spec: Spec | None, like: Any, per_rank: str) -> None:
    """Raises SpecError for arguments that say two things, or none that is known."""
    ambient.check_outside("fzero.load")
    if per_rank not in (KEEP, MEAN):
        raise SpecError(f"fzero.load(per_rank={per_rank!r}): needed {KEEP!r} or {MEAN!r}")
    if isinstance(like, State) and per_rank != KEEP:
        raise SpecError("fzero.load(like=state, per_rank=...): give it a spec and params instead of the state")
    if isinstance(like, State) and spec is not None:
        raise SpecError("fzero.load(dir, spec, like=state): a state has its spec: leave spec out, or give shapes")


def _into(state: State, dir: Path, strict: bool, disk: Disk) -> State:
    """Loads a checkpoint into the memory of a state."""
    runtime = session_of(state)
    plan = runtime.plan
    world = World(runtime.rank, runtime.world_size, runtime.device, runtime.group)
    with _typed(dir):
        chosen = _chosen(dir, world, disk)
        failure: BaseException | None = None
        digest = ""
        try:
            if state.life.ended:
                raise DonatedError(f"fzero.load(like=state): this state {state.life.ended}")
            saved = Checkpoint(chosen, disk)
            here = {x.path: entry(x.shape, x.dtype, x.per_rank, plan.data_ranks) for x in plan.leaves}
            keep = _compared(here, saved, strict).unfit
            saved.check(wanted(plan, world.rank, runtime.memory.shapes(), keep))
            digest = saved.digest
        except Exception as error:
            failure = error
        world.agree("load", digest, failure)
        try:
            with progress.shown("loading the state"):
                for buffers in runtime.memory.rounds(kept=bool(keep)):
                    saved.fill(wanted(plan, world.rank, buffers, keep))
        except BaseException as error:
            failure = error
        try:
            world.agree("the values of the checkpoint", digest, failure)
        except BaseException as error:
            state.life.ended = (
                f"is unusable: fzero.load failed after it began to write ({named(error)}). "
                "Load another checkpoint, or start again from fzero.init"
            )
            raise
    state.life.ended = "was donated to fzero.load: use the state that it returned (state = fzero.load(dir, like=state))"
    life = Life()
    log.info("fzero: loaded step %d from %s", saved.step, chosen)
    return State(runtime.sharded(life), saved.step, NoMetrics(), runtime, life)


def _chosen(dir: Path, world: World, disk: Disk) -> Path:
    """Returns the directory of a step: `dir`, or the newest committed step of the run in `dir`.

    Rank 0 looks it up, since another rank may see an older or a newer list.
    """
    failure, name = world.failure, b""
    try:
        if failure is None and world.rank == 0 and (step := locate(dir, disk)) != dir:
            name = step.name.encode()
    except Exception as error:
        failure = error
    world.agree("load", "", failure)
    if world.size > 1:
        name = tell(name, world.size, world.group)[0]
    return dir / name.decode() if name else dir


def _shapes(spec: Spec | None, like: Any) -> tuple[Spec | None, Any]:
    """(the spec, of parameters that say by flags which of them train, what like has without its values)."""
    if like is None or callable(like):
        return spec, like
    return by_flags(spec, like) if isinstance(spec, Spec) else spec, tree.map(_shape_of, like)


def _settled(directory: Path, spec: Spec | None, world: World, disk: Disk) -> Spec:
    """The spec as it is, or, with `mesh="auto"`, with what the checkpoint's plan chose, which rank 0 reads. Collective
    then. Raises SpecError where it has none, or one for another number of ranks."""
    assert spec is not None  # or it would have been refused
    if world.failure is not None or spec.mesh != AUTO:
        return spec
    failure, told = None, ""
    try:
        if world.rank == 0:
            saved = read(directory, disk)
            told = json.dumps(saved.plan and {"mesh": dict(saved.mesh), **saved.plan})
    except Exception as error:
        failure = error
    world.agree("load", spec_digest(spec), failure)
    plan = json.loads(from_first(told, "load", world.rank, world.size, world.group))
    if plan is None:
        raise SpecError(
            f"mesh='auto': {directory} holds no plan, for its state was not planned. Give mesh=, or the spec of "
            "fzero.plan(spec, params, batch, world_size=..., hardware=...)"
        )
    found = with_chosen(spec, plan, f"the plan in {directory}")
    ranks = math.prod(found.mesh.values()) if isinstance(found.mesh, Mapping) else 0
    if ranks != world.size:
        raise SpecError(
            f"mesh='auto': the plan in {directory} is for {ranks} ranks, and here are {world.size}. Plan for these: "
            f"fzero.plan(spec, params, batch, world_size={world.size}, hardware=...).spec"
        )
    return world.settled(found)


def _compared(here: Mapping[str, Entry], saved: Checkpoint, strict: bool) -> Difference:
    """The difference between a state's leaves and a checkpoint's. Raises MismatchError if the load cannot go on with
    it."""
    differences = difference(here, saved.leaves)
    if differences and strict:
        raise MismatchError(
            saved.directory,
            f"does not have the leaves of this state. Nothing was loaded.\n{differences}\n"
            "Give fzero.load the spec and tree that were saved, or strict=False, which loads what fits",
        )
    sized = {path for path, entry in here.items() if entry.shape}  # a count alone fits any state
    if (sized or here.keys()) <= differences.unfit:
        raise MismatchError(
            saved.directory, f"has no leaf of this state that fits: strict=False would load nothing.\n{differences}"
        )
    if differences:
        log.warning("fzero: strict=False: of %s these leaves were not loaded:\n%s", saved.directory, differences)
    return differences


def _tree(saved: Checkpoint, spec: Spec) -> Any:
    """Returns the params that `fzero.init` would get, with shapes alone, from the containers in the manifest."""

    def leaf(record: LeafRecord) -> Any:
        value = torch.empty(record.shape[1:] if record.per_rank else record.shape, dtype=record.dtype, device="meta")
        return PerRank(value) if record.per_rank else value

    manifest = saved.manifest
    whole, structure = manifest.tree([leaf(record) for record in manifest.leaves]), manifest.structure
    where = "state"
    if spec.loss is not None:
        if not isinstance(whole, dict) or "params" not in whole:
            raise MismatchError(
                saved.directory, "has no 'params': it was saved with Spec(step=...). Load it with such a spec"
            )
        inner = structure["dict"] if "dict" in structure else structure["other"][1]
        whole, structure, where = whole["params"], next(child for name, child in inner if name == "params"), "params"
    for path, name in _foreign(structure):
        raise MismatchError(
            saved.directory,
            f"has {name} at {leaf_name(where, path)}, which no file can make. Give load the {where} that fzero.init "
            f"was given, or one with the same containers (only its shapes are read): like={where}",
        )
    return whole


def _foreign(structure: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields (path, type's name) of the containers that are not dict, list, tuple or None."""
    if not isinstance(structure, dict):
        return
    ((kind, inner),) = structure.items()
    if kind == "other":
        yield path, inner[0]
        return
    for name, child in inner if kind == "dict" else enumerate(inner):
        yield from _foreign(child, f"{path}/{name}" if path else str(name))


def _shape_of(leaf: Any) -> Any:
    """Leaves of another state stand for their shapes."""
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, ShardedTensor) else leaf


@contextmanager
def _typed(dir: object) -> Iterator[None]:
    """If another rank found a checkpoint damaged, raises the same error here."""
    try:
        yield
    except DisagreementError as error:
        for kind in (CorruptError, MismatchError, CheckpointError):
            if f": {kind.__name__}: " in str(error):
                raise kind(dir, str(error)) from None
        raise
