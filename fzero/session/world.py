"""world: the ranks that a state lives on, and the one way in which a state is made there.

`World.open` joins the process group. `World.state` plans the layout, allocates this rank's part and has a *filler*
write it: a `Recipe` (`fzero.init`), or a reader of a checkpoint (`fzero.load`). The ranks agree before memory is taken
and after it is filled. So an error on one rank is an error on all of them, and not a hang.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fzero import backend, progress, tree
from fzero._torch_compat import default_store
from fzero._version import __version__
from fzero.capture import ambient
from fzero.capture.provenance import describe
from fzero.comm import group as process_group
from fzero.comm import heartbeat
from fzero.comm.agree import Same, agree
from fzero.comm.transport import transport_for
from fzero.compile.plan_from_spec import plan_for
from fzero.compile.resolve import mesh_of
from fzero.compile.update_roles import check_update
from fzero.cost.bucket_costs import kept_bucket_costs
from fzero.disk import DiskFile
from fzero.errors import SpecError, TreeError, leaf_name
from fzero.ir.records import HOST
from fzero.plan.parallelism import AUTO
from fzero.plan.state_plan import Plan
from fzero.planner.at_init import planned_by_first
from fzero.runtime.stream_lanes import lanes_for
from fzero.session.session import Session
from fzero.spec import Spec, check_spec
from fzero.state import storage
from fzero.state.homes import Homes, file_bytes
from fzero.state.host_memory import host_memory
from fzero.state.state import Life, NoMetrics, State

SAME_PARAMS = (
    "Give every rank the same params, or make them from one key: fzero.init(fn, spec, key=fzero.random.key(0))"
)


class Filler(Protocol):
    """The leaves of a state, and the way to fill them."""

    @property
    def paths(self) -> Sequence[str]:
        """The leaves' names."""

    @property
    def values(self) -> Sequence[torch.Tensor]:
        """The leaves as fake tensors, each in the shape that one rank's step sees."""

    @property
    def per_rank(self) -> Sequence[str]:
        """The paths of the leaves of which every rank keeps its own."""

    @property
    def treedef(self) -> Any:
        """The structure of the state's pytree."""

    @property
    def step(self) -> int:
        """The number of steps that the state has done."""

    @property
    def seen(self) -> Mapping[str, str]:
        """Digests of whole leaves that `place` has stored, by what they are digests of."""

    def place(self, plan: Plan, rank: int, memory: Mapping[str, torch.Tensor]) -> tuple[str, str]:
        """Fills this rank's buffers. Returns a text that must be the same on every rank, and one that must be the same
        on every rank of its role."""


@dataclass(frozen=True)
class World:
    """This rank among the ranks of a state. Never changed after `open`.

    group: the group over which the ranks agree (None: the default group). failure: an error of this rank that the
    others do not know yet.
    """

    rank: int
    size: int
    device: torch.device
    group: Any
    failure: Exception | None = None

    @classmethod
    def open(cls, name: str, spec: Any, like: Any) -> World:
        """Returns the world of a spec. Collective: it joins the process group, or starts one under torchrun.

        like: tensors that give the state's device if the spec does not. An error of this rank is kept in `failure`, for
        `state` to raise on all ranks.
        """
        ambient.check_outside(f"fzero.{name}")
        failure: Exception | None = None
        device = torch.device(_kind_named(getattr(spec, "device", None)))
        try:
            ambient.check(name)
            check_spec(name, spec)
            device = _device(name, spec, like)
        except Exception as error:
            failure = error
        seconds = getattr(spec, "timeout", None)
        rank, size = process_group.open_world(device.type, seconds)
        group = None
        if backend.of(device).on_streams and size > 1:  # digests go over gloo: the device never waits for them
            patience = timedelta(seconds=seconds or process_group.TIMEOUT_SECONDS)
            group = dist.new_group(backend="gloo", timeout=patience)
        try:
            if failure is None and spec.mesh != AUTO:
                mesh = mesh_of(spec, size)  # raises if it does not make this world
                heartbeat.of(group).label = mesh.label
        except SpecError as error:
            failure = error
        return cls(rank, size, device, group, failure)

    def planned(self, spec: Spec, params: Any, batch_like: Any, hardware: Any) -> Spec:
        """The spec of `fzero.init` as it is, or, with `mesh="auto"`, as rank 0 plans it. Collective then. Raises
        SpecError for arguments that do not fit, and on every rank what planning raises."""
        if self.failure is not None:
            return spec  # `state` raises it on all ranks
        failure = None
        if spec.mesh != AUTO:
            if batch_like is None and hardware is None:
                return spec
            failure = SpecError(
                "fzero.init(batch_like=, hardware=) are read with Spec(mesh='auto'), which plans. Leave them out"
            )
        elif batch_like is None:
            failure = SpecError(
                "fzero.init of Spec(mesh='auto') plans, and a plan needs the shapes of a batch: give init "
                "batch_like=, the global batch (tensors on the meta device will do)"
            )
        self.agree("planning", spec_digest(spec), failure)
        found = planned_by_first(spec, params, batch_like, hardware, self.rank, self.size, self.device, self.group)
        return self.settled(found)

    def settled(self, spec: Spec) -> Spec:
        """The spec, whose mesh is known now: messages name ranks by their places in it."""
        heartbeat.of(self.group).label = mesh_of(spec, self.size).label
        return spec

    def agree(
        self,
        call: str,
        digest: str,
        failure: BaseException | None = None,
        same: Sequence[Same] = (),
        inputs: Callable[[], Sequence[Mapping[str, str]]] = tuple,
        needs: str = "",
    ) -> None:
        """Raises on every rank if a rank has a `failure`, or if calls, digests or shared values differ (see
        `fzero.comm.agree.agree`). Collective."""
        agree(self.rank, self.size, call, digest, self.group, failure, inputs=inputs, same=same, needs=needs)

    def state(self, name: str, spec: Spec, filler: Callable[[], Filler]) -> State:
        """Returns a new state, filled. Collective. An error of `filler` on one rank is raised on all ranks."""
        failure, digest, given = None, "", dict[str, str]()
        try:
            if self.failure is not None:
                raise self.failure
            filling, mesh = filler(), mesh_of(spec, self.size)
            plan = plan_for(spec, filling.paths, filling.values, filling.per_rank, mesh)  # raises if there is no layout
            check_update(spec, tree.unflatten(filling.treedef, filling.values), plan, self.device)
            given = _given(spec, filling)
            digest = hashlib.blake2b(repr(sorted(given.items())).encode(), digest_size=8).hexdigest()
        except Exception as error:  # sent to the other ranks before it is raised here
            failure = error
        self.agree(
            name, digest, failure, [_libraries()], lambda: [given], "give every rank the same spec and the same params"
        )
        here = heartbeat.of(self.group)
        with here.running():
            disk = spec.nvme_path is not None
            transport = transport_for(self.rank, mesh, self.device, spec.transfers, here, disk=disk)
        own = ""
        try:
            store = default_store() if self.size > 1 else None
            costs = kept_bucket_costs(transport.name, mesh, self.rank, transport.rates, store)
            plan = plan_for(spec, filling.paths, filling.values, filling.per_rank, mesh, costs)
            file = _file(spec, plan, self.rank, here)
            memory = storage.allocate(plan, transport.block, self.rank, {HOST: partial(host_memory, self.device)})
            homes = Homes(plan, self.rank, memory, file)
            with progress.shown("loading the state" if name == "load" else "making the first state"):
                placed = [filling.place(plan, self.rank, buffers) for buffers in homes.rounds()]
            common, own = (_one_digest(texts) for texts in zip(*placed, strict=True))
            values = f"{plan.bucket_bytes.value} {common}"
        except Exception as error:
            failure, values = error, ""
        call = f"the values of {'params' if name == 'init' else 'the checkpoint'}"
        same = Same(call, mesh.role(self.rank), own, SAME_PARAMS)
        self.agree(call, values, failure, [same], lambda: [filling.seen], f"{call} differ. {SAME_PARAMS}")
        here.leave()
        runtime = Session(
            spec, self.rank, self.size, self.device, plan, filling.treedef, homes, transport, self.group, here,
            lanes=lanes_for(self.device, file),
        )  # fmt: skip
        life = Life()
        return State(runtime.sharded(life), filling.step, NoMetrics(), runtime, life)


def _libraries() -> Same:
    """What all ranks run: with other versions the same step is another program, or has other bits, and a rank of
    another byte order reads other numbers."""
    value = f"fzero {__version__}, torch {torch.__version__}, {sys.byteorder}-endian"
    remedy = "Start all ranks from one environment, on machines of one byte order"
    return Same("what the ranks run", 0, value, remedy, shown=True)


def _one_digest(texts: Iterable[str]) -> str:
    """One digest for those of all rounds, of which a large state has more than a note to the other ranks holds."""
    return hashlib.blake2b(" ".join(sorted({*texts})).encode(), digest_size=8).hexdigest()


def _file(spec: Spec, plan: Plan, rank: int, here: heartbeat.Presence) -> DiskFile | None:
    """The rank's file for what lies on disk; None where the spec names no folder. A program whose gradients wait there
    makes it larger. Raises OffloadError."""
    if spec.nvme_path is None:
        return None
    patience = spec.timeout or process_group.TIMEOUT_SECONDS
    folder = os.fspath(spec.nvme_path).replace("{local_rank}", os.environ.get("LOCAL_RANK", "0"))
    return DiskFile(folder, file_bytes(plan, rank), timeout=patience, owner=here.label(rank))


def _kind_named(device: Any) -> str:
    """The kind of device that a spec's field begins with, which may be wrong otherwise; the CPU's where it is none."""
    return next((kind for kind in backend.BACKENDS if str(device).startswith(kind)), "cpu")


def _device(name: str, spec: Spec, like: Any) -> torch.device:
    """The state's device: the spec's, else that of the tensors in `like`, else the CPU. Raises SpecError or TreeError
    if there is none."""
    if spec.device is not None:
        device = torch.device(spec.device)
        known = backend.of(device)
        if known.on_streams and not known.calls.available():
            raise SpecError(f"Spec(device={spec.device!r}): this torch sees no CUDA device. Leave it out, or use 'cpu'")
        if known.on_streams and device.index is None:
            device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device(device.type) if known.on_host else device  # "cpu:0" too, on which tensors lie on "cpu"
    if callable(like):
        return torch.device("cpu")
    devices = {x.device for x in tree.flatten(like)[1] if isinstance(x, torch.Tensor)}
    if name == "load":  # it reads only shapes
        devices.discard(torch.device("meta"))
    if len(devices) > 1:
        raise TreeError(f"params lie on several devices: {sorted(map(str, devices))}. Move them to one")
    device = devices.pop() if devices else torch.device("cpu")
    if device == torch.device("meta"):
        raise TreeError(
            "params are on the meta device, so they have no values: pass a function of a key that makes them, or call "
            "fzero.lower"
        )
    return device


def spec_digest(spec: Spec) -> str:
    """A text that differs where ranks were given other fields, but for their functions."""
    return hashlib.blake2b(repr(_fields(spec)).encode(), digest_size=8).hexdigest()


def _given(spec: Spec, filling: Filler) -> dict[str, str]:
    """What ranks can compare before a state is made, by name: fields of the spec, and leaves, a parameter before its
    moments, whose names are longer."""
    leaves = sorted(zip(filling.paths, filling.values, strict=True), key=lambda leaf: len(leaf[0]))
    each = dict.fromkeys(filling.per_rank, " of each rank")
    shown = {leaf_name("state", path): f"{describe(value)}{each.get(path, '')}" for path, value in leaves}
    return {**_fields(spec), **shown, "the number of steps": str(filling.step)}


def _fields(spec: Spec) -> dict[str, str]:
    """The fields of a spec that ranks can compare before a trace, as texts by name: all but its functions, and what a
    rank may have of its own: its device by its number, and its drive."""
    own = ("loss", "optimizer", "step", "device", "nvme_path")
    plain = {f"Spec({f.name}=)": getattr(spec, f.name) for f in fields(spec) if f.name not in own}
    return {k: repr(sorted(v.items()) if isinstance(v, Mapping) else v) for k, v in plain.items()}
