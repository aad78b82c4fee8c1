"""ahead: a step's program before anything runs: for any world, from shapes alone (`fzero.lower`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fzero import backend, progress, tree
from fzero._torch_compat import untraced_by_dynamo
from fzero.capture import ambient
from fzero.capture.graph import Graph
from fzero.capture.short_tracebacks import short_tracebacks
from fzero.collector import collector_paused
from fzero.comm.transport import likely_names, transport_name
from fzero.compile import decide
from fzero.compile.batch_key import check_batch, key_of
from fzero.compile.captures import Captures
from fzero.compile.checked import checked_step
from fzero.compile.decide import Deciders
from fzero.compile.kept_lowerings import NOTHING, Kept
from fzero.compile.lowered import Lowered
from fzero.compile.lowering_context import LoweringContext
from fzero.compile.plan_from_spec import plan_for
from fzero.compile.resolve import by_flags, mesh_of
from fzero.compile.state_recipe import recipe_for
from fzero.compile.step import captured_step, fakes_on
from fzero.compile.traced_device import traced_device
from fzero.cost.bucket_costs import kept_bucket_costs
from fzero.errors import SpecError
from fzero.ir.decisions import Decisions
from fzero.plan.state_plan import Plan
from fzero.spec import Spec, check_spec


@short_tracebacks
def lower(
    spec: Spec,
    params_like: Any,
    batch_like: Any,
    *,
    world_size: int | None = None,
    key: torch.Tensor | None = None,
    decisions: Decisions | Deciders | None = None,
    phase: str = "",
) -> Lowered:
    """The step's program for any world size, ahead of time: no device, no process group, no full tensor.

    With `Spec(device="cuda")` it is CUDA's, with the ops that torch takes on an H100, on any machine. What the loss
    itself asks of its device is answered by the processor where there is none, and `choices["device"]` says so;
    `fzero fake-cuda SCRIPT` runs a script where CUDA answers.

    spec: the step and its sharding.
    params_like: a pytree of tensors (real, meta or fake: only shapes and dtypes are read) or the function of a key
    that makes them; with `Spec(step=...)` the whole state. batch_like: one rank's batch. world_size: by default that
    of the spec's mesh. key: as in `init`.

    `lowered.program` prints; with a mesh axis `pp` there is one for each role, `lowered.programs[role]`.
    `lowered.memory` has the planned bytes per rank; `lowered.choices` says what fzero chose. `lowered.decisions` is a
    record of all that was decided, with reasons.

    phase: of a spec with `fzero.Phases`, the name of the one to lower; "" for the first. `lowered.phase` is its name.

    decisions: such a record makes the same program again. Raises SpecError where the spec or the step contradicts it.
    It may also be the functions that decide (`fzero.compile.decide.Deciders`).

    >>> import fzero
    >>> spec = fzero.Spec(loss=lambda p, b: ((b @ p["w"]) ** 2).mean(), optimizer=fzero.optim.adamw(1e-3), zero=3)
    >>> lowered = lower(spec, {"w": torch.empty(1024, device="meta")}, torch.empty(8, 1024), world_size=64)
    >>> lowered.plan.state_bytes  # a 64th of 4096 elements (padded to 64 per rank), three times, and the count
    776
    """
    return lower_again(
        spec, params_like, batch_like, world_size=world_size, key=key, decisions=decisions, phase=phase, captures=None
    )


@untraced_by_dynamo
@ambient.steady()
@collector_paused()
def lower_again(
    spec: Spec,
    params_like: Any,
    batch_like: Any,
    *,
    world_size: int | None = None,
    key: torch.Tensor | None = None,
    decisions: Decisions | Deciders | None = None,
    phase: str = "",
    captures: Captures | None,
    verified: bool = True,
    kept: Kept = NOTHING,
) -> Lowered:
    """As `lower`, for who lowers one step many times. captures: what was captured for it before. verified, kept: as in
    `LoweringContext`."""
    spec, state, batch, plan, context, note = _prepared(spec, params_like, batch_like, world_size, key, decisions)
    context = replace(context, captures=captures, kept=kept, verified=verified)
    with progress.shown("lowering the step"):
        lowered = checked_step(spec, state, batch, plan, context, phase=phase)
    decide.check_strategies(lowered.decisions, decisions)
    return replace(lowered, choices={**lowered.choices, "device": note}) if note else lowered


@untraced_by_dynamo
@ambient.steady()
def graph_of(spec: Spec, params_like: Any, batch_like: Any, *, world_size: int, captures: Captures) -> Graph:
    """What `lower_again` captures of a spec without phases, or finds in `captures`."""
    spec, state, batch, plan, context, _ = _prepared(spec, params_like, batch_like, world_size, None, None)
    return captured_step(spec, state, batch, plan, replace(context, captures=captures))


def _prepared(
    spec: Spec,
    params_like: Any,
    batch_like: Any,
    world_size: int | None,
    key: torch.Tensor | None,
    decisions: Decisions | Deciders | None,
) -> tuple[Spec, Any, Any, Plan, LoweringContext, str]:
    """(the spec, the state and the batch as fake tensors, the plan, the context, a word on the device)."""
    ambient.check_outside("fzero.lower")
    ambient.check("lower", backward=True)
    batch_like = tree.plain(batch_like)
    check_spec("lower", spec)
    spec = by_flags(spec, params_like)
    if world_size is not None and (type(world_size) is not int or world_size < 1):
        raise SpecError(f"fzero.lower(world_size={world_size!r}): needed a positive int")
    mesh = mesh_of(spec, world_size)
    transport = transport_name(torch.device(spec.device or "cpu"), spec.transfers)
    device, note = traced_device(spec.device)
    there = device if backend.of(device).calls.available() else torch.device("cpu")
    recipe = recipe_for(spec, params_like, key, there, mesh.data_ranks)
    deciders = decide.table(spec, decisions)
    names = likely_names(torch.device(spec.device or "cpu"), spec.transfers, mesh.world_size)
    costs = next(filter(None, (kept_bucket_costs(name, mesh) for name in names)), {})
    plan = plan_for(spec, recipe.paths, recipe.values, recipe.per_rank, mesh, costs, deciders)
    state = fakes_on(tree.unflatten(recipe.treedef, recipe.values), device)
    check_batch(batch_like)
    key_of(batch_like, device)  # as `step` refuses what could change unseen
    context = LoweringContext(transport, deciders=deciders)
    return spec, state, fakes_on(batch_like, device), plan, context, note
