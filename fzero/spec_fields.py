"""spec_fields: which fields of a Spec were given, and which are left to a plan.

A field that was given is pinned, also where it equals the default. "auto" opens a field by hand: a plan chooses it, and
what makes no plan refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from fzero.errors import SpecError
from fzero.plan.parallelism import AUTO

SpecT = TypeVar("SpecT")

# fields that a plan chooses, and that "auto" opens; what "auto" says of others, they say themselves
OPENED = {"zero", "microbatches", "remat", "offload", "pipeline", "reduce", "sequence"}
OPENED |= {"prefetch", "bucket_bytes", "update_on"}


def noted(spec: Any, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The values to make a Spec with, without those that open a field. What was given is noted on the spec.

    `dataclasses.replace` gives all: then those count that are not their defaults."""
    opened = {name for name in OPENED & values.keys() if isinstance(values[name], str) and values[name] == AUTO}
    names = set(values)
    if values.keys() == defaults.keys():
        names = {n for n, x in values.items() if type(x) is not type(defaults[n]) or x != defaults[n]}
    vars(spec).update(_given=names - opened, _opened=opened)
    return {name: value for name, value in values.items() if name not in opened}


def kept(spec: SpecT, before: Any, fields: Mapping[str, Any], planned: Iterable[str]) -> SpecT:
    """The spec that was made of one before by these fields, with what was given of both. planned: as in `Spec.but`."""
    opened = (opened_of(before) - fields.keys()) | opened_of(spec)
    given = (before.given | fields.keys()) - opened
    vars(spec).update(_given=given, _planned=before.planned.union(planned), _opened=opened)
    return spec


def opened_of(spec: Any) -> frozenset[str]:
    """The names of the fields that were given as "auto", and that only a plan can choose."""
    return frozenset(vars(spec).get("_opened", ()))


def refuse_opened(name: str, spec: Any) -> None:
    """Raises SpecError for a spec with opened fields, where `fzero.<name>` makes no plan."""
    if (opened := opened_of(spec)) and name != "plan" and (spec.mesh != AUTO or name == "lower"):
        one = min(opened)
        raise SpecError(
            f"Spec({one}='auto') leaves {one} to a plan, and fzero.{name} makes none: take the spec of "
            "fzero.plan(spec, ...).spec, or let fzero.init plan with mesh='auto'. Else give a value, or leave it out"
        )
