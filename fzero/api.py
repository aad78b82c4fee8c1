"""api: init, step, evaluate. In a `torch.compile`d loop they run as they are: fzero compiles the step itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from fzero import backend, tree
from fzero._torch_compat import untraced_by_dynamo
from fzero.capture import ambient
from fzero.capture.provenance import describe
from fzero.capture.short_tracebacks import short_tracebacks
from fzero.capture.static import Static
from fzero.comm.agree import Same, agree
from fzero.compile.batch_key import check_batch
from fzero.compile.lowered import Lowered
from fzero.compile.resolve import by_flags, mesh_of
from fzero.compile.state_recipe import check_key, recipe_for
from fzero.errors import DonatedError, NonFiniteError, TreeError, leaf_name
from fzero.hardware import Hardware
from fzero.session.interrupts import keeps_state
from fzero.session.session import execute, session_of, turn_of
from fzero.session.world import World
from fzero.spec import Spec
from fzero.state.first_state import fingerprint
from fzero.state.state import Life, State


@short_tracebacks
@untraced_by_dynamo
@ambient.steady()
def init(
    params: Any,
    spec: Spec,
    *,
    key: torch.Tensor | None = None,
    batch_like: Any = None,
    hardware: str | Hardware | None = None,
) -> State:
    """The first state: `params`, sharded as `spec` says. Every rank must call it.

    params: a pytree of tensors, which are copied, or a function of a key that makes one. With a function, each rank
    materialises only its shard, and values do not depend on the world size. With `Spec(step=...)` the whole state.
    spec: the step and its sharding. With `mesh="auto"` rank 0 runs `fzero.plan` for all ranks first, and the state's
    spec has what it chose.
    batch_like, hardware: for that plan, as `fzero.plan` takes them: the *global* batch, of which only shapes are read,
    and the machine (None: the preset of a CUDA device by its name).
    key: what the function gets (default `fzero.random.key(0)`). If it is given, or the loss has a parameter `key`, the
    state holds a key: a new one for every step. Each part of the global batch gets its own key, and random draws of
    modules (dropout) are made from it.

    With a mesh axis `pp`, a rank makes and holds only the leaves of its role. Under torchrun this starts gloo or nccl
    unless a default group exists.

    >>> import fzero
    >>> spec = fzero.Spec(loss=lambda p, b: ((b @ p["w"]) ** 2).mean(), optimizer=fzero.optim.sgd(0.1))
    >>> state = init({"w": torch.ones(3)}, spec)
    >>> state.params["w"].shape, state.step
    (torch.Size([3]), 0)
    """
    spec = by_flags(spec, params) if isinstance(spec, Spec) else spec
    world = World.open("init", spec, params)
    spec = world.planned(spec, params, batch_like, hardware)
    return world.state(
        "init", spec, lambda: recipe_for(spec, params, key, world.device, mesh_of(spec, world.size).data_ranks)
    )


@keeps_state
@short_tracebacks
@untraced_by_dynamo
@ambient.steady()
def step(state: State, batch: Any) -> State:
    """One step. Donates `state`: its memory becomes the result's, and its leaves cannot be read any more.

    state: of `fzero.init`, `fzero.load` or the step before.
    batch: a pytree of tensors, this rank's shard of the global batch, by its coordinates on the data axes. Ranks
    that differ only in `pp` must pass the same batch, which is checked. Leaves that are not tensors are constants of
    the program. A number that changes becomes a scalar tensor at its first change; `fzero.static` marks values that
    stay constants. Mappings of any type, as a tokenizer's BatchEncoding, arrive at the loss as dicts. `result.metrics`
    holds the loss (or the metrics of a `step=`). All checks come before the first write: an error before it leaves
    `state` unchanged; an error after it marks `state` unusable. Ctrl-C waits for the end of the step, and `state`
    itself is then the state after the step; a second Ctrl-C does not wait.

    >>> import fzero
    >>> spec = fzero.Spec(loss=lambda p, b: ((b @ p["w"]) ** 2).mean(), optimizer=fzero.optim.sgd(0.1))
    >>> state = step(init({"w": torch.ones(2)}, spec), torch.eye(2))
    >>> float(state.metrics["loss"]), state.step, state.params["w"].full().tolist()
    (1.0, 1, [0.8999999761581421, 0.8999999761581421])
    """
    with turn_of(state):
        lowered, batch = agreed("step", f"step {state.step + 1}" if isinstance(state, State) else "", state, batch)
        return advanced(state, lowered, execute(state, lowered, batch))


def advanced(state: State, lowered: Lowered, metrics: Any) -> State:
    """The state after a step that ran. Donates `state`.

    Raises NonFiniteError, with `state` unchanged, if the spec asks for it.
    """
    runtime = session_of(state)
    runtime.last_program = lowered.on(runtime.rank)
    if runtime.spec.nonfinite == "raise" and not metrics["finite"]:
        raise NonFiniteError(
            f"the gradients of step {state.step + 1} are not finite (loss {float(metrics['loss']):g}). The state that "
            "was given is unchanged: use another batch, or Spec(nonfinite='skip')"
        )
    _check_scale(state)
    state.life.ended = (
        f"was donated to fzero.step at step {state.step + 1}: use the state that it returned "
        "(state = fzero.step(state, batch))"
    )
    life = Life()
    return State(runtime.sharded(life), state.step + 1, metrics, runtime, life)


@short_tracebacks
@untraced_by_dynamo
@ambient.steady()
def evaluate(state: State, batch: Any, fn: Callable[..., Any], *, key: torch.Tensor | None = None) -> Any:
    """`fn(params, batch)` on the state, which it neither donates nor changes; every rank must call it.

    state: of a step; it can be used afterwards. batch: this rank's shard, as in `fzero.step`.
    fn: runs without gradients, in the spec's precision; with `Spec(step=...)` it gets the whole state instead of the
    parameters. Parameters are gathered layer by layer, as in the loss. It returns a pytree of tensors and
    `fzero.Mean`s. A Mean becomes the mean over the terms of all ranks; a floating scalar is averaged over the ranks;
    any other tensor is not reduced. It is traced once: define it once, outside the loop.
    key: what randomness in `fn` is made from.

    >>> import fzero
    >>> spec = fzero.Spec(loss=lambda p, b: ((b @ p["w"]) ** 2).mean(), optimizer=fzero.optim.sgd(0.1))
    >>> state = init({"w": torch.ones(2)}, spec)
    >>> found = evaluate(state, torch.eye(2), lambda p, b: {"out": b @ p["w"], "norm": (p["w"] ** 2).sum()})
    >>> found["out"].tolist(), float(found["norm"])
    ([1.0, 1.0], 2.0)
    """
    if not callable(fn):
        raise TreeError(
            f"fzero.evaluate(state, batch, fn): fn is {type(fn).__name__}: needed a function (params, batch)"
        )
    check_key("evaluate", key)
    inputs = {"batch": batch, "key": key}
    with turn_of(state):
        lowered, inputs = agreed("evaluate", "an evaluation", state, inputs, fn)
        return execute(state, lowered, inputs)["result"]


# --- pieces -----------------------------------------------------------------------------------------------------------


def agreed(name: str, call: str, state: Any, batch: Any, fn: Callable[..., Any] | None = None) -> tuple[Lowered, Any]:
    """(the program to run, the batch as plain dicts), once every rank has the same one and no rank failed before."""
    if not isinstance(state, State):
        raise TreeError(f"fzero.{name} needs the State that fzero.init returned, got {type(state).__name__}")
    ambient.check_outside(f"fzero.{name}")
    runtime = session_of(state)
    failure: BaseException | None = None
    lowered: Lowered | None = None
    try:
        ambient.check(name, backward=fn is None)
        if state.life.ended:
            paths = [leaf.path for leaf in runtime.plan.leaves]
            more = f" and {len(paths) - 1} more leaves" if len(paths) > 1 else ""
            raise DonatedError(f"this state ({leaf_name('state', paths[0])}{more}) {state.life.ended}")
        state.check_leaves()
        batch = tree.plain(batch)
        if fn is None:
            batch = runtime.settled(batch, step=state.step)
        else:
            batch = {**batch, "batch": runtime.settled(batch["batch"], fn)}
        check_batch(batch if fn is None else batch["batch"], runtime.device)
        lowered = runtime.compiled(batch, fn, state.step)
        digest = " ".join([lowered.digest, *(x.text for x in tree.flatten(batch)[1] if isinstance(x, Static))])
        if backend.of(runtime.device).on_host:  # where a sum rounds by the number of threads
            digest += f", threads={torch.get_num_threads()}"
    except Exception as error:
        failure, digest = error, ""
    try:
        runtime.any_rank_flags = agree(
            runtime.rank,
            runtime.world_size,
            call,
            digest,
            runtime.group,
            failure,
            runtime.flags(),
            lambda: _compared(call, batch if fn is None else batch["batch"], lowered),
            _same(state, batch) if failure is None else (),
        )
    finally:
        failure = None  # an error and the frame that holds it would keep the state until Python collects garbage
    assert lowered is not None
    return lowered, batch


def _same(state: State, batch: Any) -> list[Same]:
    """What ranks must share that are not the same in all: how many transfers ranks of one role have started, and the
    batch of ranks that are given the same part of it. On CUDA the batch is compared where the host looks anyway."""
    runtime = session_of(state)
    mesh, started = runtime.plan.mesh, runtime.transport.comm.number
    same = [Same(f"the number of transfers so far ({started})", mesh.role(runtime.rank), str(started))]
    if mesh.data_ranks < mesh.world_size and state.step % backend.of(runtime.device).looks_after == 0:
        tensors = [leaf for leaf in tree.flatten(batch)[1] if isinstance(leaf, torch.Tensor)]
        value = " ".join(map(fingerprint, tensors))
        value = hashlib.blake2b(value.encode(), digest_size=8).hexdigest()
        remedy = (
            f"Ranks that differ in {' and '.join(mesh.same_batch)} alone are given the same batch: split the data by "
            f"the place in the data axes, as Tokens.batches(size, mesh=...) does"
        )
        same.append(Same("the batch", mesh.data_rank(runtime.rank), value, remedy))
    return same


def _compared(call: str, batch: Any, lowered: Lowered | None) -> list[dict[str, str]]:
    """What ranks of different programs compare, by name, in the order in which it is told: the phase, the batch's
    leaves and what was read from Python; the numbers of ops."""
    given = {leaf_name("batch", path): describe(leaf) for path, leaf in zip(*tree.flatten(batch)[:2], strict=True)}
    if lowered is None:
        return [given]
    phase = {f"the phase of {call}": lowered.phase} if lowered.phase else {}
    return [{**phase, **given, **lowered.graph.reads.numbers()}, lowered.graph.numbers()]


def _check_scale(state: State) -> None:
    """Ends a run that overflowed at the least loss scale, at the next look. All ranks hold the same scale, so all of
    them raise."""
    runtime = session_of(state)
    scaler = runtime.spec.numerics.policy.loss_scale if runtime.spec.loss is not None else None
    if scaler is None or not scaler.dynamic:
        return
    exhausted = state.tree["loss_scale"]["hysteresis"].local == 0
    runtime.exhausted = exhausted if runtime.exhausted is None else runtime.exhausted | exhausted
    if (state.step + 1) % backend.of(runtime.device).looks_after or not runtime.exhausted:
        return
    runtime.exhausted = None
    late = backend.of(runtime.device).looks_after - 1
    since = f", or one of the {late} before; the finite ones among these did update" if late else ""
    raise NonFiniteError(
        f"the gradients overflow at the least loss scale, {scaler.minimum:g} (step {state.step + 1}"
        f"{since}). No step that overflowed changed parameters or optimizer, and the state that was given can be saved "
        "and stepped again. Look for an infinity or nan in the batch or the loss, or use precision='bf16', or "
        "LossScale(minimum=...) below this one"
    )
