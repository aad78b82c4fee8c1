"""chosen: the fields that `fzero.plan` chose, as plain data: what rank 0 tells the others, and what a checkpoint holds.

A dict of JSON values by the field's name. Nothing that is read is believed: `with_chosen` checks names and types, and
the Spec that it makes checks the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fzero.errors import SpecError
from fzero.kernels.codecs import CODECS
from fzero.pipeline import Pipeline
from fzero.shard.partition import Groups, P, groups
from fzero.spec import Spec

PRECISION = ("gather", "reduce")  # what a plan may choose of it
OPEN_IF_NONE = ("prefetch", "bucket_bytes", "reduce", "update_on", "device_bytes", "pipeline")
PLAIN: dict[str, Any] = {
    "mesh": dict, "zero": (int, str), "microbatches": int, "remat": (str, dict), "offload": (str, dict, type(None)),
    "pipeline": (str, dict, type(None)), "prefetch": (int, type(None)), "bucket_bytes": int, "reduce": str,
    "update_on": str, "device_bytes": int, "sequence": (str, type(None)),
}  # fmt: skip


def chosen_of(spec: Spec) -> dict[str, Any]:
    """What a planned spec has of its plan.

    >>> from fzero import optim
    >>> spec = Spec(loss=lambda p, b: p["w"].sum(), optimizer=optim.sgd(0.1))
    >>> chosen_of(spec.but(mesh={"dp": 2}, zero=1, planned=["mesh", "zero"]))
    {'mesh': {'dp': 2}, 'zero': 1}
    """
    fields = {name: getattr(spec, name) for name in sorted(spec.planned)}
    if "precision" in fields:
        fields["precision"] = spec.numerics.policy
    return {name: _as_data(name, value) for name, value in fields.items()}


def with_chosen(spec: Spec, chosen: Any, where: str) -> Spec:
    """The spec with what a plan chose; fields that were given to it stay. where: the data is from, for messages.

    Raises SpecError for data that no plan has, and for values that do not go with what was given.
    """
    given = spec.given - {"mesh", "precision"}
    pinned = {name for name in given if name not in OPEN_IF_NONE or getattr(spec, name) is not None}
    try:
        if not isinstance(chosen, Mapping):
            raise TypeError(f"needed the fields of a plan by name, got {type(chosen).__name__}")
        values = {name: _value(spec, name, value) for name, value in chosen.items()}
        values = {name: value for name, value in values.items() if name not in pinned}
        if values.get("offload", spec.offload) is None:
            values.pop("update_on", None)  # of leaves that lie elsewhere
        return spec.but(planned=values, **values)
    except (AttributeError, KeyError, TypeError, SpecError) as error:
        raise SpecError(f"{where}: {error}") from None


def rules_as_data(shard: Mapping[str, P]) -> dict[str, Any]:
    """Rules of `shard` as plain data.

    >>> rules_as_data({"blocks/*/up": P("tp"), "blocks/*/down": P(None, "tp")})
    {'blocks/*/up': ['tp'], 'blocks/*/down': [None, 'tp']}
    """
    return {rule: [_dim(dim) for dim in dims] for rule, dims in shard.items()}


def rules_of(data: Mapping[str, Any]) -> dict[str, P]:
    """The rules that `rules_as_data` gave as data. Raises TypeError for what it did not."""
    return {rule: _rule_of(dims) for rule, dims in data.items()}


def _as_data(name: str, value: Any) -> Any:
    if name == "shard":
        return rules_as_data(value)
    if name == "precision":
        return {part: getattr(value, part) for part in PRECISION}
    if isinstance(value, Pipeline):
        return {"schedule": value.schedule, "chunks": value.chunks}
    return dict(value) if name == "mesh" else value


def _dim(dim: Any) -> Any:
    if isinstance(dim, Groups):
        return {"axis": _dim(dim.axis), "groups": dim.count}
    return list(dim) if isinstance(dim, tuple) else dim


def _value(spec: Spec, name: str, value: Any) -> Any:
    """The field's value. Raises TypeError for a field that no plan chooses, and for a value of another type."""
    policy = spec.numerics.policy
    if name == "shard":
        return rules_of(value)
    if name == "precision":
        own = policy.gather is not None or policy.reduce in CODECS
        return spec.precision if own else replace(policy, **{part: value[part] for part in PRECISION})
    sizes = name != "mesh" or (isinstance(value, Mapping) and all(type(n) is int and n > 0 for n in value.values()))
    if name not in PLAIN or not isinstance(value, PLAIN[name]) or isinstance(value, bool) or not sizes:
        raise TypeError(f"{name}={value!r}: no plan chooses that")
    return Pipeline(**value) if name == "pipeline" and isinstance(value, dict) else value


def _rule_of(dims: Any) -> P:
    if not isinstance(dims, list) or any(isinstance(d, Mapping) and {*d} != {"axis", "groups"} for d in dims):
        raise TypeError(f"shard has {dims!r}: no plan chooses that")
    return P(*map(_dim_of, dims))


def _dim_of(dim: Any) -> Any:
    if isinstance(dim, Mapping):
        return groups(_dim_of(dim["axis"]), dim["groups"])
    return tuple(dim) if isinstance(dim, list) else dim
