"""parallelism: the fields of a Spec that say how a step is split over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from fzero.errors import SpecError
from fzero.field_checks import choice, needs, path_rules, positive
from fzero.ir.mesh import DATA, PIPELINE, parts_of
from fzero.pipeline import SCHEDULES, Pipeline, Schedule
from fzero.plan.stages import Columns, Stage
from fzero.shard.partition import P
from fzero.tree import suggest

OWN_AXES = (PIPELINE, *DATA)  # of a mesh; an axis of any other name cuts the dims that rules of `shard` say
NAMED_STAGES = ("hsdp", "hpz")
COLUMNS = {"params", "grads", "optimizer"}  # of the state, which `zero` may place one by one
DEFAULT_PARAMS = ("params/**",)
AUTO = "auto"  # of `mesh`: `fzero.plan` chooses it


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How a step is split over ranks; the fields are those of `fzero.Spec`.

    Raises SpecError for a field that cannot be used.
    """

    mesh: Mapping[str, int] | str | None = None
    shard: Mapping[str, P] | None = None
    sequence: str | None = None
    pipeline: str | Pipeline | None = None
    zero: int | str | Mapping[str, Any] = 3
    params: str | Sequence[str] = DEFAULT_PARAMS
    microbatches: int = 1
    reduce: str | None = None

    def __post_init__(self) -> None:
        self._check_pipeline()
        self._check_mesh()
        self._check_zero()
        self._check_shard()
        path_rules("params", self.params, "model/**")
        positive("microbatches", self.microbatches)
        choice("reduce", self.reduce, (None, "each", "end"))

    @property
    def axes(self) -> dict[str, int]:
        """The sizes that `mesh` names; none where it is left to others."""
        return dict(self.mesh) if isinstance(self.mesh, Mapping) else {}

    @property
    def param_rules(self) -> tuple[str, ...]:
        """`params` as a tuple of path rules."""
        return (self.params,) if isinstance(self.params, str) else tuple(self.params)

    @property
    def order(self) -> Pipeline:
        """The order of work; 1F1B where none is named."""
        return self.pipeline if isinstance(self.pipeline, Pipeline) else Pipeline(self.pipeline or Pipeline.schedule)

    def stages(self, data_axes: str) -> Stage | Mapping[str, Stage]:
        """`zero` as a stage, or as path rules to stages. data_axes: of the mesh, as one."""
        every = parts_of(data_axes)
        inner = every[-1:]
        if self.zero == "hsdp":
            return Columns(inner, inner, inner)
        if self.zero == "hpz":
            return Columns(every, every, every, copy=inner)
        if by_column(self.zero):
            return Columns(tuple(self.zero["params"]), tuple(self.zero["grads"]), tuple(self.zero["optimizer"]))
        stages: Stage | Mapping[str, Stage] = self.zero  # type: ignore[assignment]
        return stages

    def _check_zero(self) -> None:
        if isinstance(self.zero, str):
            needs(self.zero in NAMED_STAGES, "zero", self.zero, "a stage 0, 1, 2 or 3, 'hsdp' or 'hpz', or path rules")
            both = {"dp_out", "dp"} <= {*self.axes}
            needs(
                both, "zero", self.zero, "two data axes, as in mesh={'dp_out': 2, 'dp': 4}: nodes, and ranks of a node"
            )
            return
        if by_column(self.zero):
            self._check_columns(dict(self.zero))
            return
        rules: Mapping[Any, Any] = self.zero if isinstance(self.zero, Mapping) else {}
        alone = [] if isinstance(self.zero, Mapping) else [(self.zero, self.zero)]
        stages = [*alone, *(({rule: stage}, stage) for rule, stage in rules.items())]
        for given, stage in stages:
            fits = type(stage) is int and stage in (0, 1, 2, 3)
            named = f"; {stage!r} is of the whole state, as in zero={stage!r}" if stage in NAMED_STAGES else ""
            needs(fits, "zero", given, f"a stage 0, 1, 2 or 3, or path rules to them{named}")
        needs(bool(stages), "zero", self.zero, "at least one rule, as in {'**': 3}")
        for rule in rules:
            text = f"path rules that are text, as in {{'**': 3}}; not {rule!r}"
            needs(isinstance(rule, str), "zero", self.zero, text)

    def _check_columns(self, zero: Mapping[str, Any]) -> None:
        """Raises SpecError for columns whose axes the mesh has not, or whose slices do not lie within one another."""
        axes = [axis for axis in self.axes or ("dp",) if axis in DATA]
        needs(zero.keys() == COLUMNS, "zero", zero, "all of params, grads and optimizer")
        for name, column in zero.items():
            fits = isinstance(column, (tuple, list)) and all(axis in axes for axis in column)
            needs(fits, "zero", {name: column}, f"a tuple of axes of the mesh, of {axes}")
            needs(len(set(column)) == len(column), "zero", {name: column}, "each axis once")
            inner = not column or axes[-1] in column
            needs(inner, "zero", {name: column}, f"the inner axis {axes[-1]!r}, before one outside of it")
        smaller = {*zero["params"]} <= {*zero["grads"]} <= {*zero["optimizer"]}
        needs(smaller, "zero", zero, "params over no more axes than grads, and grads over no more than the optimizer")

    def _check_mesh(self) -> None:
        if self.mesh is None or self.mesh == AUTO:
            return
        form = "axis sizes, as in {'dp': 2}, or 'auto'"
        needs(isinstance(self.mesh, Mapping) and bool(self.mesh), "mesh", self.mesh, form)
        mesh = self.axes
        for axis, size in mesh.items():
            fits = isinstance(axis, str) and axis.isidentifier()
            needs(fits, "mesh", mesh, f"names as 'dp' and 'tp', not {axis!r}")
            if size != -1:
                positive(f"mesh[{axis!r}]", size)
        if list(mesh.values()).count(-1) > 1:
            raise SpecError(f"mesh={mesh}: one axis may be -1, the rest of the world")
        names = [*mesh]
        if {"dp_out", "dp"} <= {*names} and names.index("dp_out") > names.index("dp"):
            fixed = {**{name: mesh[name] for name in names if name != "dp"}, "dp": mesh["dp"]}
            needs(False, "mesh", mesh, f"`dp_out` before `dp`, the axis inside it: mesh={fixed}")

    def _check_shard(self) -> None:
        """Raises SpecError for rules that are none, for an axis that cuts no leaf, and for one that cuts nothing."""
        mesh, rules = self.axes, self.shard
        form = "path rules to fzero.P, as in {'blocks/*/w1': fzero.P('tp', None)}"
        if rules is not None:
            needs(isinstance(rules, Mapping) and bool(rules), "shard", rules, form)
            for rule, dims in rules.items():
                needs(isinstance(rule, str) and isinstance(dims, P), "shard", {rule: dims}, form)
                only = f"axes that cut dims: zero= cuts leaves over {' and '.join(DATA)}, pipeline= over {PIPELINE!r}"
                needs({*dims.axes}.isdisjoint(OWN_AXES), "shard", {rule: dims}, only)
        needs(
            self.sequence is None or rules is not None,
            "sequence",
            self.sequence,
            "shard=, which says what lies in parts",
        )
        named = {axis for dims in (rules or {}).values() for axis in dims.axes}
        cuts = "a rule that cuts something over an axis, as P('tp', None)"
        needs(rules is None or bool(named), "shard", dict(rules or {}), cuts)
        for axis, size in mesh.items():
            if axis not in (*OWN_AXES, *named) and size != 1:
                example = f"shard= with {axis!r} in a rule, as in shard={{'blocks/*/w1': P({axis!r}, None)}}"
                hint = suggest(axis, [name for name in (*OWN_AXES, *named) if name not in mesh])
                needs(False, "mesh", mesh, example + (f".{hint}" if hint else ""))
        for axis in sorted(named - mesh.keys()) if self.mesh != AUTO else ():
            wanted = f"an axis {axis!r} in mesh, as in mesh={{'dp': -1, {axis!r}: 2}}"
            hint = suggest(axis, [name for name in mesh if name not in OWN_AXES])
            needs(False, "shard", dict(rules or {}), wanted + (f".{hint}" if hint else ""))
        choice("sequence", self.sequence, (None, *sorted(named)))

    def _check_pipeline(self) -> None:
        if self.pipeline is None:
            return
        known = isinstance(self.pipeline, (str, Pipeline, Schedule))
        needs(known, "pipeline", self.pipeline, "a schedule's name, an fzero.Pipeline or an fzero.Schedule")
        if isinstance(self.pipeline, str):
            choice("pipeline", self.pipeline, tuple(SCHEDULES))
        shown = self.pipeline if isinstance(self.pipeline, str) else type(self.pipeline).__name__
        fits = self.mesh == AUTO or PIPELINE in self.axes
        needs(fits, "pipeline", shown, f"an axis `pp` in mesh, as in mesh={{'pp': 2, 'dp': -1}}; it is {self.mesh}")


def by_column(zero: Any) -> TypeGuard[Mapping[str, Sequence[str]]]:
    """Whether `Spec(zero=...)` names the axes of each column, and no stages.

    >>> by_column({"params": ("dp",), "grads": ("dp",), "optimizer": ("dp",)}), by_column({"params/**": 3})
    (True, False)
    """
    if not isinstance(zero, Mapping) or not zero:
        return False
    return COLUMNS.issuperset(zero) and not any(isinstance(column, int) for column in zero.values())
