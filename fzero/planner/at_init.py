"""at_init: `Spec(mesh="auto")` in `fzero.init`: rank 0 plans, and every rank takes what it chose."""

from __future__ import annotations

import json
from typing import Any

import torch

from fzero import backend, progress
from fzero.comm.agree import from_first
from fzero.errors import FzeroError, SpecError
from fzero.hardware import Hardware, presets
from fzero.planner.choose import plan
from fzero.planner.chosen import chosen_of, with_chosen
from fzero.spec import Spec

REMEDY = "`fzero doctor --hardware machine.toml` measures this one: hardware='machine.toml'"


def planned_by_first(
    spec: Spec,
    params_like: Any,
    batch_like: Any,
    hardware: str | Hardware | None,
    rank: int,
    world_size: int,
    device: torch.device,
    group: Any,
) -> Spec:
    """The concrete spec of `mesh="auto"`, the same on every rank. Collective: rank 0 plans, and says what it chose.

    The arguments are those of `fzero.init`, then this rank among those of `group`. Raises on every rank what planning
    raises on rank 0.
    """
    told: dict[str, Any] = {}
    failure: Exception | None = None
    if rank == 0:
        try:
            machine = hardware if hardware is not None else preset_of(device)
            with progress.shown("planning"):
                found = plan(spec, params_like, batch_like, world_size=world_size, hardware=machine)
            told["chosen"] = chosen_of(found.spec)
        except Exception as error:  # of the user's functions, too: the other ranks wait for an answer
            failure = error
            told["error"] = str(error) if isinstance(error, FzeroError) else f"{type(error).__name__}: {error}"
    told = json.loads(from_first(json.dumps(told), "planning", rank, world_size, group))
    if failure is not None:
        raise failure
    if "error" in told:
        raise SpecError(f"planning failed on rank 0: {told['error']}")
    return with_chosen(spec, told["chosen"], "the plan of rank 0")


def preset_of(device: torch.device) -> str:
    """The preset of a device, by its name. Raises SpecError where there is none.

    >>> preset_of(torch.device("cpu"))
    Traceback (most recent call last):
    fzero.errors.SpecError: mesh='auto': there is no preset for cpu, ...
    """
    name = backend.of(device).calls.describe(device)
    for preset in presets():
        if all(part in name.lower().replace(" ", "") for part in preset.split("-")):
            return preset
    raise SpecError(f"mesh='auto': there is no preset for {name}. {REMEDY}; the presets are {', '.join(presets())}")
