"""api: init, step, lower. The road from a Spec to a program, and the loop that runs it."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from fzero import capture, random, tree
from fzero._torch_compat import FakeTensorMode
from fzero.errors import DonatedError, SpecError, TreeError
from fzero.initial import Recipe
from fzero.lower import build
from fzero.passes import Options, optimise
from fzero.plan.layout import Leaf, Plan, layout
from fzero.plan.memory import Account, account
from fzero.program import Program, Ref, op
from fzero.runtime import collectives, storage
from fzero.runtime.handlers import Rank, steps
from fzero.spec import Spec
from fzero.state import Life, ShardedTensor, State
from fzero.training import initial_state, training_step
from fzero.verify import verify

log = logging.getLogger("fzero")


@dataclass(frozen=True)
class Lowered:
    """A step lowered for a world: what `fzero.lower` returns. Nothing is allocated and nothing has run."""

    graph: capture.Graph
    plan: Plan
    program: Program

    @cached_property
    def memory(self) -> Account:
        """Bytes by kind at the planned peak, and the peak: per rank."""
        return account(self.program)


@dataclass
class Runtime:
    """What the states of one `init` share: the spec, the world, the layout, the memory, and the programs by batch."""

    spec: Spec
    rank: int
    world_size: int
    device: torch.device
    plan: Plan
    treedef: Any
    memory: dict[str, torch.Tensor]
    comm: Any
    group: Any
    programs: dict[Any, Lowered] = field(default_factory=dict)
    last_key: Any = None
    last_program: Program | None = None

    @property
    def like(self) -> Any:
        """The state as one rank's step sees it, on the meta device."""
        leaves = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in self.plan.leaves]
        return tree.unflatten(self.treedef, leaves)

    def sharded(self, life: Life) -> Any:
        return tree.unflatten(self.treedef, [ShardedTensor(leaf, self, life) for leaf in self.plan.leaves])

    def compiled(self, batch: Any) -> Lowered:
        """The program for a batch of this structure, shapes, dtypes and static values."""
        key = _batch_key(batch)
        if key not in self.programs:
            if self.last_key is not None:
                log.warning("fzero: a new program is traced: %s", _difference(self.last_key, key))
            state = _on(self.like, self.device)
            self.programs[key] = _lowered(
                self.spec, state, batch, self.plan, "nccl" if self.device.type == "cuda" else "p2p"
            )
            verify(self.programs[key].program)
        self.last_key = key
        return self.programs[key]

    def gather_leaves(self, leaves: Sequence[Leaf]) -> list[torch.Tensor]:
        """Whole leaves on every rank: one gather for each sharded column among them."""
        found: dict[int, torch.Tensor] = {}
        columns: dict[str, list[int]] = {}
        for i, leaf in enumerate(leaves):
            columns.setdefault(leaf.buffer, []).append(i)
        for name, members in columns.items():
            buffer = self.plan.buffers[name]
            if buffer.shard or leaves[members[0]].per_rank:
                own = self.memory[name].reshape(-1)
                whole = own.new_empty(own.numel() * self.world_size)
                if self.world_size > 1:
                    self.comm.start("unshard", op("gather", [Ref(name)], [Ref("unshard")]), [own, whole])
                    self.comm.wait("unshard")
                else:
                    whole.copy_(own)
                for i in members:
                    found[i] = self._cut(leaves[i], whole)
            else:
                for i in members:
                    found[i] = storage.local(self.plan, self.memory, leaves[i], self.rank).clone()
        return [found[i] for i in range(len(leaves))]

    def _cut(self, leaf: Leaf, whole: torch.Tensor) -> torch.Tensor:
        if leaf.per_rank:
            return whole.view(self.world_size, *leaf.shape)
        slot = self.plan.buckets[self.plan.buffers[leaf.buffer].bucket or ""].slots[leaf.slot or 0]
        return whole[slot.start : slot.stop].view(leaf.shape).clone()


def init(params: Any, spec: Spec, *, key: torch.Tensor | None = None) -> State:
    """The first state: `params` (a pytree of tensors, or a function of a key that makes one) placed as `spec` says.

    With `Spec(step=...)` `params` is the whole state. Given a function, a rank makes only its part, and values do not
    depend on the world; `key` (default `fzero.random.key(0)`) is what it gets. Given tensors, they are copied.
    Under torchrun this starts gloo or nccl unless a default group exists. Every rank must call it.

    >>> import fzero
    >>> spec = fzero.Spec(loss=lambda p, b: ((b @ p["w"]) ** 2).mean(), optimizer=fzero.optim.sgd(0.1))
    >>> state = init({"w": torch.ones(3)}, spec)
    >>> state.params["w"].shape, state.step
    (torch.Size([3]), 0)
    """
    device = _device(spec, params)
    rank, world_size = collectives.open_world(device.type)
    group = _side_group(device, world_size)
    failure: Exception | None = None
    digest = ""
    try:
        _check_mesh(spec, world_size)
        recipe = _recipe(spec, params, key, device)
        plan = _layout(spec, recipe.paths, recipe.values, recipe.per_rank, world_size)
        digest = hashlib.blake2b(f"{_spec_text(spec)}{plan.leaves}{plan.buckets}".encode(), digest_size=8).hexdigest()
    except Exception as error:
        failure = error
    collectives.agree(rank, world_size, "init", digest, group, failure)
    memory = recipe.place(plan, rank, device)
    kind = collectives.Nccl if device.type == "cuda" else collectives.P2P
    comm = kind(rank, world_size) if world_size > 1 else collectives.Alone()
    runtime = Runtime(spec, rank, world_size, device, plan, recipe.spec, memory, comm, group)
    life = Life()
    return State(runtime.sharded(life), 0, {}, runtime, life)


def step(state: State, batch: Any) -> State:
    """One step. Donates `state`: its memory becomes the result's, and its leaves cannot be read any more.

    `batch` is a pytree of tensors, this rank's part; leaves that are no tensors are static (a new value retraces).
    `result.metrics` holds the loss (or what a `step=` returned). All checks come before the first write: an error
    before that leaves `state` as it was, one after it marks `state` unusable.

    >>> import fzero
    >>> spec = fzero.Spec(loss=lambda p, b: ((b @ p["w"]) ** 2).mean(), optimizer=fzero.optim.sgd(0.1))
    >>> state = step(init({"w": torch.ones(2)}, spec), torch.eye(2))
    >>> float(state.metrics["loss"]), state.step, state.params["w"].full().tolist()
    (1.0, 1, [0.8999999761581421, 0.8999999761581421])
    """
    if not isinstance(state, State):
        raise TreeError(f"fzero.step needs the State that fzero.init returned, got {type(state).__name__}")
    runtime = state.runtime
    failure: BaseException | None = None
    lowered: Lowered | None = None
    try:
        if state.life.ended:
            raise DonatedError(f"this state {state.life.ended}")
        _check_batch(batch, runtime.device)
        lowered = runtime.compiled(batch)
    except Exception as error:
        failure = error
    digest = lowered.program.digest if lowered else ""
    collectives.agree(runtime.rank, runtime.world_size, f"step {state.step + 1}", digest, runtime.group, failure)
    assert lowered is not None
    metrics = _execute(state, lowered, batch)
    runtime.last_program = lowered.program
    state.life.ended = (
        f"was donated to fzero.step at step {state.step + 1}: use the state that it returned "
        "(state = fzero.step(state, batch))"
    )
    life = Life()
    return State(runtime.sharded(life), state.step + 1, metrics, runtime, life)


def lower(spec: Spec, params_like: Any, batch_like: Any, *, world_size: int | None = None) -> Lowered:
    """The step's program for a world of any size, ahead of time: no device, no process group, no full tensor.

    `params_like` is a pytree of tensors (real, meta or fake: only shapes and dtypes are read) or the function of a
    key that makes them; with `Spec(step=...)` the whole state. `batch_like` is one rank's batch. `world_size`
    defaults to the spec's mesh. `lowered.program` prints; `lowered.memory` is the account per rank.

    >>> import fzero
    >>> spec = fzero.Spec(loss=lambda p, b: ((b @ p["w"]) ** 2).mean(), optimizer=fzero.optim.adamw(1e-3), zero=3)
    >>> lowered = lower(spec, {"w": torch.empty(1024, device="meta")}, torch.empty(8, 1024), world_size=64)
    >>> lowered.plan.state_bytes  # a 64th of 4096 elements (padded to 64 per rank), three times, and the count
    776
    """
    mesh = spec.mesh or {}
    size = world_size or (mesh.get("dp", 1) if mesh else 1)
    device = torch.device(spec.device or "cpu")
    recipe = _recipe(spec, params_like, None, device)
    plan = _layout(spec, recipe.paths, recipe.values, recipe.per_rank, size)
    state = tree.unflatten(recipe.spec, recipe.values)
    lowered = _lowered(spec, state, _on(batch_like, device), plan, "nccl" if device.type == "cuda" else "p2p")
    verify(lowered.program)
    return lowered


# --- pieces -----------------------------------------------------------------------------------------------------------


def _lowered(spec: Spec, state: Any, batch: Any, plan: Plan, via: str) -> Lowered:
    if spec.step is not None:
        user, fns = spec.step, (spec.step,)
    else:
        assert spec.loss is not None
        assert spec.optimizer is not None
        user, fns = training_step(spec.loss, spec.optimizer, spec.clip_norm), (spec.loss,)
    graph = capture.capture(
        user,
        state,
        batch,
        microbatches=spec.microbatches,
        allow_unused=spec.allow_unused,
        axis=plan.axis,
        per_rank=[leaf.path for leaf in plan.leaves if leaf.per_rank],
        fns=fns,
    )
    naive = build(graph, plan, reduce=spec.reduce, via=via)
    options = Options(prefetch=spec.prefetch, gather_bytes=spec.gather_bytes, overlap=spec.overlap)
    return Lowered(graph, plan, optimise(naive, options))


def _recipe(spec: Spec, params: Any, key: torch.Tensor | None, device: torch.device) -> Recipe:
    if callable(params) and not isinstance(params, torch.nn.Module):
        start = random.key(0, device=str(device)) if key is None else key
        return Recipe(lambda k: _whole(spec, params(k)), [start], device)
    if isinstance(params, torch.nn.Module):
        raise TreeError("params is a module: pass dict(module.named_parameters()), detached, and call it functionally")
    _, leaves, treedef = tree.flatten(params)
    if not leaves:
        raise TreeError("params has no leaves: pass a pytree of tensors, or a function of a key that makes one")
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(getattr(leaf, "value", leaf), torch.Tensor)]

    def whole(*xs: torch.Tensor) -> Any:
        full = list(leaves)
        for i, x in zip(tensors, xs, strict=True):
            full[i] = capture.PerRank(x) if isinstance(leaves[i], capture.PerRank) else x
        return _whole(spec, tree.unflatten(treedef, full))

    inputs = [getattr(leaves[i], "value", leaves[i]).detach() for i in tensors]
    return Recipe(whole, [x.full_tensor() if hasattr(x, "full_tensor") else x for x in inputs], device)


def _whole(spec: Spec, params: Any) -> Any:
    return params if spec.optimizer is None else initial_state(params, spec.optimizer)


def _layout(
    spec: Spec, paths: Sequence[str], values: Sequence[torch.Tensor], per_rank: Sequence[str], world_size: int
) -> Plan:
    return layout(
        paths,
        values,
        world_size=world_size,
        zero=spec.zero,
        bucket_bytes=spec.bucket_bytes,
        params=spec.param_rules,
        per_rank=per_rank,
    )


def _execute(state: State, lowered: Lowered, batch: Any) -> Any:
    runtime, program = state.runtime, lowered.program
    memory = dict(runtime.memory)
    _, leaves, _ = tree.flatten(batch)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    names = [name for name, b in program.buffers.items() if b.kind == "batch"]
    memory.update(zip(names, (x.detach().contiguous() for x in tensors), strict=True))
    names = [name for name, b in program.buffers.items() if b.kind == "constant"]
    memory.update(zip(names, lowered.graph.constants.values(), strict=True))
    rank = Rank(program, runtime.rank, runtime.comm, memory, device=runtime.device)
    try:
        with torch.no_grad():
            for _ in steps(rank):
                pass
    except BaseException as error:
        if rank.wrote_state:
            state.life.ended = (
                f"is unusable: step {state.step + 1} failed after it began to write ({type(error).__name__}: {error}). "
                "Start again from fzero.init or the last checkpoint"
            )
        raise
    found = [rank.memory[program.metrics[name]] for name in lowered.graph.metric_names]
    return tree.unflatten(lowered.graph.metrics_spec, found)


def _device(spec: Spec, params: Any) -> torch.device:
    if spec.device is not None:
        device = torch.device(spec.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        return device
    if callable(params):
        return torch.device("cpu")
    found = {x.device for x in tree.flatten(params)[1] if isinstance(x, torch.Tensor)} or {torch.device("cpu")}
    if len(found) > 1:
        raise TreeError(f"params lie on several devices: {sorted(map(str, found))}. Move them to one")
    return found.pop()


def _side_group(device: torch.device, world_size: int) -> Any:
    """On CUDA the digests go over gloo beside nccl, so that the device never waits for them."""
    return dist.new_group(backend="gloo") if device.type == "cuda" and world_size > 1 else None


def _check_mesh(spec: Spec, world_size: int) -> None:
    size = (spec.mesh or {}).get("dp", world_size)
    if size != world_size:
        raise SpecError(
            f"mesh={dict(spec.mesh or {})} needs {size} ranks, there are {world_size}. "
            f"Start {size} (torchrun --nproc-per-node {size}), or leave mesh out"
        )


def _check_batch(batch: Any, device: torch.device) -> None:
    for path, leaf in zip(*tree.flatten(batch)[:2], strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.device != device:
            raise TreeError(f"batch[{path!r}] is on {leaf.device}, the state on {device}. Move it there")
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise TreeError(f"batch[{path!r}] requires grad, which no step would use. detach() it")


def _batch_key(batch: Any) -> tuple[Any, ...]:
    paths, leaves, spec = tree.flatten(batch)
    shown: list[tuple[str, Any]] = []
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            shown.append((path, capture.describe(leaf)))
        else:
            try:
                hash(leaf)
            except TypeError:
                raise TreeError(
                    f"batch[{path!r}] is {type(leaf).__name__}: needed a tensor or a hashable value"
                ) from None
            shown.append((path, (type(leaf).__name__, leaf)))
    return (tuple(shown), str(spec))


def _difference(old: Any, new: Any) -> str:
    before, after = dict(old[0]), dict(new[0])
    changed = [f"batch[{p!r}] was {before[p]}, is {v}" for p, v in after.items() if p in before and before[p] != v]
    changed += [f"batch[{p!r}] is new" for p in after if p not in before]
    changed += [f"batch[{p!r}] is gone" for p in before if p not in after]
    return "; ".join(changed) or "the batch has another structure"


def _on(like: Any, device: torch.device) -> Any:
    """The pytree with fake tensors on a device in the place of its tensors."""

    def one(x: Any) -> Any:
        return torch.empty(x.shape, dtype=x.dtype, device=device) if isinstance(x, torch.Tensor) else x

    with FakeTensorMode():
        return tree.map(one, like)


def _spec_text(spec: Spec) -> str:
    """What of a spec can be compared between ranks before anything is traced: all but its functions."""
    plain = {f.name: getattr(spec, f.name) for f in fields(spec) if f.name not in ("loss", "optimizer", "step")}
    return repr({k: sorted(v.items()) if isinstance(v, Mapping) else v for k, v in plain.items()})
