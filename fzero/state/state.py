"""State and ShardedTensor: the results of `init` and `step`.

A state is a value: a pytree of `ShardedTensor` leaves that show their logical shape. `fzero.step` donates it, as
`jax.jit(..., donate_argnums=0)` does: the new state takes its memory. A read of a leaf of the old state raises an error
that names the leaf. A failure in the middle of the writes makes a state unusable, with an error of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fzero import tree
from fzero.errors import DonatedError, FzeroError, TreeError, leaf_name
from fzero.html_table import html_table
from fzero.ir.records import DISK
from fzero.plan.state_plan import Leaf, Plan
from fzero.state import storage
from fzero.state.no_tensor import NoTensor

NO_COPY = (
    "cannot be copied or pickled: its memory belongs to its ranks, and the next step takes it. "
    "fzero.save(state, folder) keeps the state on disk and fzero.load brings it back; "
    "fzero.checkpoint.snapshot(state) copies this rank's part to the host; fzero.unshard(state.params) makes whole "
    "tensors"
)


class Spoiled(Protocol):
    """Copies of buffers (`fzero.runtime.copies.Copies`), as a leaf sees them."""

    def spoiled(self, master: str) -> None:
        """Notes that a buffer may be written by others."""


class Home(Protocol):
    """The session that a leaf lives in (`fzero.session.session.Session`), as the leaf sees it."""

    @property
    def plan(self) -> Plan:
        """The layout of the state."""

    @property
    def memory(self) -> Mapping[str, torch.Tensor]:
        """This rank's buffers, by name."""

    @property
    def arena(self) -> torch.Tensor:
        """The memory that every step works in, 1-D uint8."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def device(self) -> torch.device:
        """The device of the state."""

    @property
    def copies(self) -> Spoiled:
        """What is kept of the state between steps beside it."""

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """The bytes that this rank has sent so far, by axis of the mesh."""

    @property
    def last_program(self) -> Any:
        """The program of the last step; None before the first."""

    def whole(self, leaves: Sequence[ShardedTensor], joined: bool = True) -> list[torch.Tensor]:
        """The full tensors of leaves of one state, on every rank. Collective.

        joined: False leaves each as the part by dims that this rank holds."""


@dataclass
class Life:
    """Whether a state's memory is still its own. The state and its leaves share it.

    ended: "" while the memory is its own, else the end of a sentence about the state. `fzero.api` and `session.execute`
    write it, once. steps: whether a step runs on it, which may have written; `session` writes it.
    """

    ended: str = ""
    steps: bool = False

    def check(self, path: str) -> None:
        """Raises DonatedError, naming the leaf, if the memory is another state's by now."""
        if self.ended:
            raise DonatedError(f"state[{path!r}] {self.ended}")


@dataclass(frozen=True, eq=False)
class ShardedTensor(NoTensor):
    """A leaf of a state. `shape` and `dtype` are the logical ones: they do not depend on the part that this rank holds.

    local: this rank's part, a view of the state's memory (1-D if ZeRO slices it). full(): the whole tensor; a
    collective.
    """

    leaf: Leaf
    runtime: Home = field(repr=False)
    life: Life = field(repr=False)

    @property
    def path(self) -> str:
        """The leaf's name, as `params/blocks/0/w`."""
        return self.leaf.path

    @property
    def shape(self) -> torch.Size:
        """The logical shape; the ranks come first for a per-rank leaf."""
        lead = (self.runtime.plan.data_ranks,) if self.leaf.per_rank else ()
        return torch.Size((*lead, *self.leaf.shape))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the leaf's elements."""
        return self.leaf.dtype

    @property
    def device(self) -> torch.device:
        """The device that this rank's part lies on."""
        return self.runtime.device

    @property
    def mesh(self) -> dict[str, int]:
        """The ranks that the leaf lives on, by axis."""
        return dict(self.runtime.plan.mesh)

    @property
    def placement(self) -> str:
        """`replicate`, `flat(bucket, offset)` (in elements) or `per_rank`.

        Where an axis `tp` cuts dim 0 it is `S0 over tp`, or that and `flat(...)`."""
        return storage.placement(self.runtime.plan, self.leaf)

    @property
    def local(self) -> torch.Tensor:
        """This rank's part, a view of the state's memory: 1-D if ZeRO slices the leaf, else in the leaf's shape or
        that of its part by dims. It is empty where another role of a pipeline keeps the leaf. Raises DonatedError.

        The next step sees all that is written into it before. Ask for it again after that step: of a tensor that was
        kept, it sees only the writes that torch counts, and those of collectives or `.data` are not among them. Of a
        leaf on disk it is a copy, to read: no step sees what is written into that."""
        self.life.check(self.path)
        self.runtime.copies.spoiled(self.leaf.buffer)
        return storage.local(self.runtime.plan, self.runtime.memory, self.leaf, self.runtime.rank)

    def copy_(self, value: torch.Tensor) -> ShardedTensor:
        """Writes a whole tensor into the state, as a target network or restored weights: each rank its own part.

        value: of the leaf's shape and dtype, on any device, and the same on every rank: no rank sends anything. Raises
        TreeError for another one, for a leaf that differs by rank and for one on disk; DonatedError. Returns the leaf.

        >>> import fzero
        >>> spec = fzero.Spec(loss=lambda p, x: (p["w"] * x).sum(), optimizer=fzero.optim.sgd(0.1))
        >>> state = fzero.init({"w": torch.zeros(2)}, spec)
        >>> state.params["w"].copy_(torch.tensor([1.0, 2.0])).full().tolist()
        [1.0, 2.0]
        """
        self.life.check(self.path)
        name, plan, memory = leaf_name("state", self.path), self.runtime.plan, self.runtime.memory
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (self.shape, self.dtype):
            given = f"{list(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise TreeError(
                f"{name}.copy_: needed a tensor {list(self.shape)} {self.dtype}, the whole leaf; not {given}"
            )
        if self.leaf.per_rank:
            raise TreeError(f"{name}.copy_: the leaf differs by rank. Write this rank's part: .local.copy_(x)")
        buffer, away = self.leaf.buffer, plan.buffers[self.leaf.buffer].space == DISK
        if storage.is_on_disk(memory, buffer) if buffer in memory else away:  # ranks without the leaf refuse it too
            raise TreeError(
                f"{name}.copy_: the leaf lies on disk, which only steps and fzero.load write. Give it to fzero.init"
            )
        self.runtime.copies.spoiled(self.leaf.buffer)
        storage.put(plan, memory, self.leaf, value.detach(), self.runtime.rank)
        return self

    def full(self) -> torch.Tensor:
        """The whole tensor on every rank, a copy. Collective: every rank must call it."""
        return self.runtime.whole([self])[0]

    def to_dtensor(self) -> Any:
        """The tensor as a `torch.distributed.tensor.DTensor` over the mesh. Collective.

        Along an axis that cuts a dim of the leaf it is a `Shard` of that dim. All else, and a leaf cut in groups, which
        DTensor has no word for, is replicated, and so whole on every rank.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        axes, cuts = self.runtime.plan.mesh, self.leaf.layout.dims
        if any(place.groups > 1 for _, place in cuts):
            cuts = ()
        local = self.runtime.whole([self], joined=not cuts)[0]
        if self.runtime.world_size == 1 and not torch.distributed.is_initialized():
            raise FzeroError("to_dtensor needs a process group, which a world of one has not: use full()")
        sizes = tuple(size for _, size in axes)
        mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=axes.names)
        dim_of = {cut.axis: place.dim for cut, place in cuts}
        lies = [Shard(dim_of[name]) if name in dim_of else Replicate() for name in axes.names]
        return DTensor.from_local(local, mesh, lies)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TreeError(f"a {type(self).__name__} {NO_COPY}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(
            f"{leaf_name('state', self.path)} lies in parts over ranks and has no .{name}: ask its whole, "
            f".full().{name}, on every rank, or its part here, .local; or let the step compute it, as a metric"
        )

    def __repr__(self) -> str:
        return f"ShardedTensor({self.path!r}, {list(self.shape)}, {self.dtype}, {self.placement}, mesh={self.mesh})"


class NoMetrics(dict[str, Any]):
    """The metrics of a state that has made no step."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"{name!r}: metrics are those of a step, and none was made: state = fzero.step(state, batch) first"
        )


@dataclass(frozen=True)
class State:
    """The state of training after `step` steps. In the `loss=` form, `params` and `opt_state` are parts of `tree`."""

    tree: Any
    step: int
    metrics: Mapping[str, Any]
    runtime: Home = field(repr=False)
    life: Life = field(repr=False)

    def __repr__(self) -> str:
        """One line, as a model has hundreds of leaves: `state.tree` shows them."""
        return f"State({self._summary()})"

    def _repr_html_(self) -> str:
        """What a notebook shows: the leaves. Nothing is gathered, and no rank is waited for."""
        rows = [(x.path, list(x.shape), str(x.dtype).removeprefix("torch."), x.placement) for x in self._leaves()]
        return html_table(f"state {self._summary()}", ["leaf", "shape", "dtype", "placement"], rows)

    def _summary(self) -> str:
        steps = f"{self.step:,} step{'s' * (self.step != 1)}"
        ended = f", which {self.life.ended}" if self.life.ended else ""
        return f"after {steps}: {len(self._leaves()):,} leaves, mesh {self.runtime.plan.mesh}{ended}"

    def _leaves(self) -> list[ShardedTensor]:
        return [leaf for leaf in tree.flatten(self.tree)[1] if isinstance(leaf, ShardedTensor)]

    def check_leaves(self) -> None:
        """Raises TreeError if the leaves of `tree` are not the state's own: no step would see what was put there."""
        own = list(self.runtime.plan.leaves)
        if [self._own(x) for x in tree.leaves(self.tree)] == own:
            return
        held = {leaf.path: leaf for leaf in own}
        here = zip(*tree.flatten(self.tree)[:2], strict=True)
        changed = [path for path, x in here if (self._own(x) or 0) is not held.pop(path, None)]
        path, *_ = [*changed, *held]
        raise TreeError(
            f"{leaf_name('state', path)} was {'put into' if changed else 'removed from'} the state's tree, which no "
            "step reads: it uses the memory of the state's own leaves. Write into a leaf: a whole tensor, as "
            "state.params['w'].copy_(x), or this rank's part, as state.params['w'].local.mul_(0.5)"
        )

    def _own(self, x: Any) -> Leaf | None:
        """What a leaf of this state is of its plan; None of all else, as of an equal leaf of another state."""
        return x.leaf if isinstance(x, ShardedTensor) and x.life is self.life else None

    def become(self, after: State) -> None:
        """Makes this donated state the one that it became, which nobody else would hold (`session.interrupts`)."""
        for name in ("tree", "step", "metrics", "life"):
            object.__setattr__(self, name, getattr(after, name))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TreeError(f"a {type(self).__name__} {NO_COPY}")

    @property
    def params(self) -> Any:
        """The parameters' part of `tree`. Raises AttributeError if a state of the step= form has none."""
        return self._part("params")

    @property
    def opt_state(self) -> Any:
        """The optimizer's part of `tree`. Raises AttributeError if a state of the step= form has none."""
        return self._part("opt_state")

    def _part(self, name: str) -> Any:
        if isinstance(self.tree, Mapping) and name in self.tree:
            return self.tree[name]
        raise AttributeError(f"this state has no {name!r}: its pytree is state.tree, as the step= form was given it")

    @property
    def program(self) -> Any:
        """The program of the last step, to print; None before the first."""
        return self.runtime.last_program

    @property
    def held_bytes(self) -> dict[str, int]:
        """The bytes that this rank holds between steps: the state's by kind ("param", "optimizer", "state"), and those
        of the arena that every step works in ("arena"; 0 before the first step). What lies on disk is apart,
        "disk"."""
        totals = {"param": 0, "optimizer": 0, "state": 0, "arena": self.runtime.arena.numel()}
        for buffer in self.runtime.plan.held_by(self.runtime.rank).values():
            kind = "disk" if buffer.space == DISK else buffer.kind
            totals[kind] = totals.get(kind, 0) + buffer.nbytes
        return totals

    @property
    def sent_bytes(self) -> dict[str, int]:
        """The bytes that this rank has sent so far, by axis of the mesh: a count of what started, which a launch of a
        CUDA graph adds nothing to. Compare two readings: `init`, `full` and `save` send too."""
        return dict(self.runtime.sent_bytes)


def unshard(sharded: Any) -> Any:
    """The pytree with every `ShardedTensor` as a full tensor, on every rank. Collective: all ranks call it.

    sharded: such as `state.params`. Leaves of one bucket travel together. At any time a rank holds one bucket and the
    result. Other leaves pass through.
    """
    _, leaves, treedef = tree.flatten(sharded)
    if any(isinstance(leaf, State) for leaf in leaves):
        raise FzeroError("unshard takes a pytree of leaves, as state.tree or state.params, not a State")
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, ShardedTensor)]
    if not positions:
        return sharded
    runtimes = {id(leaves[i].runtime) for i in positions}
    if len(runtimes) > 1:
        raise FzeroError(f"unshard of leaves of {len(runtimes)} different states: call it once for each")
    full = leaves[positions[0]].runtime.whole([leaves[i] for i in positions])
    for i, value in zip(positions, full, strict=True):
        leaves[i] = value
    return tree.unflatten(treedef, leaves)
