"""world: the ranks that a state lives on, and the one way that a state comes to them.

`World.open` joins the process group. `World.state` plans the layout, allocates this rank's part and has a *filler*
write it: a `Recipe` (`fzero.init`), or what reads a checkpoint (`fzero.load`). Before memory is taken and after it is
filled the ranks agree, so that an error on one is an error on all, and no hang.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fzero import tree
from fzero._torch_compat import default_store
from fzero.capture import ambient
from fzero.comm import group as process_group
from fzero.comm import heartbeat
from fzero.comm.agree import agree
from fzero.comm.transport import bucket_bytes, transport_for
from fzero.compile.layout import plan_for
from fzero.errors import SpecError, TreeError
from fzero.plan.layout import Plan
from fzero.session.session import Session
from fzero.spec import Spec
from fzero.state import storage
from fzero.state.state import Life, State


class Filler(Protocol):
    """The leaves of a state, each in the shape that one rank's step sees (`values`, fake), and where they come from."""

    @property
    def paths(self) -> Sequence[str]: ...
    @property
    def values(self) -> Sequence[torch.Tensor]: ...
    @property
    def per_rank(self) -> Sequence[str]: ...
    @property
    def treedef(self) -> Any: ...
    @property
    def step(self) -> int: ...

    def place(self, plan: Plan, rank: int, memory: Mapping[str, torch.Tensor]) -> str:
        """Fills this rank's buffers. Returns what must be the same on every rank."""


@dataclass(frozen=True)
class World:
    """This rank among the ranks of a state; `group` is where they agree (None: the default group), `failure` what this
    one has yet to tell the others."""

    rank: int
    size: int
    device: torch.device
    group: Any
    failure: Exception | None = None

    @classmethod
    def open(cls, name: str, spec: Any, like: Any) -> World:
        """The world of a spec: joins the process group, starting one under torchrun. Every rank must call it; `like`
        are the tensors that say where the state lives unless the spec does."""
        failure: Exception | None = None
        device = torch.device("cuda" if str(getattr(spec, "device", "")).startswith("cuda") else "cpu")
        try:
            ambient.check(name)
            check_spec(name, spec)
            device = _device(name, spec, like)
        except Exception as error:
            failure = error
        seconds = getattr(spec, "timeout", None)
        rank, size = process_group.open_world(device.type, seconds)
        group = None
        if device.type == "cuda" and size > 1:  # digests go over gloo, so that the device never waits for them
            patience = timedelta(seconds=seconds or process_group.TIMEOUT_SECONDS)
            group = dist.new_group(backend="gloo", timeout=patience)
        try:
            if failure is None:
                check_mesh(spec, size)
        except SpecError as error:
            failure = error
        return cls(rank, size, device, group, failure)

    def agree(self, what: str, digest: str, failure: BaseException | None = None) -> None:
        agree(self.rank, self.size, what, digest, self.group, failure)

    def state(self, name: str, spec: Spec, filler: Callable[[], Filler]) -> State:
        """A new state, filled. `filler` may fail on one rank alone: all are told."""
        failure, digest = None, ""
        try:
            if self.failure is not None:
                raise self.failure
            made = filler()
            plan_for(spec, made.paths, made.values, made.per_rank, self.size)  # whether it can be laid out at all
            leaves = [(path, x.shape, x.dtype) for path, x in zip(made.paths, made.values, strict=True)]
            text = f"{_spec_text(spec)}{leaves}{list(made.per_rank)}{made.step}"
            digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        except Exception as error:  # the other ranks are told before it is raised here
            failure = error
        self.agree(name, digest, failure)
        here = heartbeat.of(self.group)
        with here.running():
            transport = transport_for(self.rank, self.size, self.device, spec.transfers, here)
        try:
            store = default_store() if self.size > 1 else None
            cut = bucket_bytes(transport.via, self.size, self.rank, transport.rates, store)
            plan = plan_for(spec, made.paths, made.values, made.per_rank, self.size, cut)
            memory = storage.allocate(plan, transport.block, self.rank)
            values = f"{cut} {made.place(plan, self.rank, memory)}"
        except Exception as error:
            failure, values = error, ""
        self.agree(f"the values of {'params' if name == 'init' else 'the checkpoint'}", values, failure)
        here.leave()
        runtime = Session(
            spec, self.rank, self.size, self.device, plan, made.treedef, memory, transport, self.group, here
        )  # fmt: skip
        life = Life()
        return State(runtime.sharded(life), made.step, {}, runtime, life)


def check_spec(name: str, spec: Any) -> None:
    """Raises SpecError where `spec` is no Spec."""
    if not isinstance(spec, Spec):
        calls = {
            "init": "fzero.init(params, spec)",
            "lower": "fzero.lower(spec, params_like, batch_like)",
            "load": "fzero.load(dir, spec) or fzero.load(dir, like=state)",
        }
        raise SpecError(f"fzero.{name} needed a Spec, got {type(spec).__name__}: call {calls[name]}")


def check_mesh(spec: Spec, world_size: int) -> None:
    """Raises SpecError where the spec's mesh has another size than the world."""
    size = (spec.mesh or {}).get("dp", world_size)
    if size != world_size:
        raise SpecError(
            f"mesh={dict(spec.mesh or {})} needs {size} ranks, there are {world_size}. "
            f"Start {size} (torchrun --nproc-per-node {size}), or leave mesh out"
        )


def _device(name: str, spec: Spec, like: Any) -> torch.device:
    if spec.device is not None:
        device = torch.device(spec.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise SpecError(f"Spec(device={spec.device!r}): this torch sees no CUDA device. Leave it out, or use 'cpu'")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        return device
    if callable(like):
        return torch.device("cpu")
    found = {x.device for x in tree.flatten(like)[1] if isinstance(x, torch.Tensor)}
    if name == "load":  # which reads shapes alone
        found.discard(torch.device("meta"))
    if len(found) > 1:
        raise TreeError(f"params lie on several devices: {sorted(map(str, found))}. Move them to one")
    device = found.pop() if found else torch.device("cpu")
    if device.type == "meta":
        raise TreeError(
            "params are on the meta device, so they have no values: pass a function of a key that makes them, or call "
            "fzero.lower"
        )
    return device


def _spec_text(spec: Spec) -> str:
    """What of a spec can be compared between ranks before anything is traced: all but its functions."""
    own = ("loss", "optimizer", "step", "device")  # a rank may name its device by its number
    plain = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name not in own}
    return repr({k: sorted(v.items()) if isinstance(v, Mapping) else v for k, v in plain.items()})
