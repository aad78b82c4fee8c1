"""compare: the leaves of a source compared with those of a state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fzero import tree
from fzero.errors import leaf_name
from fzero.ir.records import DTYPE_NAMES
from fzero.state.source import Entry

SHOWN = 8  # leaves of each kind that a message names


@dataclass(frozen=True)
class Difference:
    """The differences between a source and a state, by leaf path. Empty, and then false, if there are none.

    missing: not in the source. extra: in the source alone. reshaped, retyped: of another shape or dtype, with both in
    words. near: for a missing path, the suggestion of the closest extra one.
    """

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    reshaped: Mapping[str, str]
    retyped: Mapping[str, str]
    near: Mapping[str, str]  # for a missing path, how the closest extra one is suggested

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.reshaped or self.retyped)

    @property
    def unfit(self) -> set[str]:
        """The paths of the state's leaves that cannot be loaded."""
        return {*self.missing, *self.reshaped, *self.retyped}

    def __str__(self) -> str:
        """One line for each kind, then one for each leaf."""
        return "\n".join(
            [
                *_lines("missing (this state has them, the checkpoint does not)", self.missing, self.near),
                *_lines("extra (the checkpoint has them, this state does not)", self.extra),
                *_lines("of another shape", self.reshaped, self.reshaped),
                *_lines("of another dtype", self.retyped, self.retyped),
            ]
        )


def difference(here: Mapping[str, Entry], there: Mapping[str, Entry]) -> Difference:
    """Returns the differences between the leaves `here`, of a state, and `there`, of a source."""
    missing = tuple(path for path in here if path not in there)
    extra = tuple(path for path in there if path not in here)
    both = [(path, ours, there[path]) for path, ours in here.items() if path in there]
    near = {path: tree.suggest(path, extra) for path in missing[:SHOWN]}
    reshaped = {
        path: f" is {_shape(theirs)} there, {_shape(ours)} here{_ranks(theirs, ours)}"
        for path, ours, theirs in both
        if (theirs.shape, theirs.per_rank) != (ours.shape, ours.per_rank)
    }
    retyped = {
        path: f" is {DTYPE_NAMES.get(theirs.dtype, theirs.dtype)} there, {DTYPE_NAMES[ours.dtype]} here"
        for path, ours, theirs in both
        if path not in reshaped and theirs.dtype is not ours.dtype
    }
    return Difference(missing, extra, reshaped, retyped, near)


def _shape(entry: Entry) -> str:
    return f"{list(entry.shape)}{' (one per rank)' if entry.per_rank else ''}"


def _ranks(theirs: Entry, ours: Entry) -> str:
    if theirs.per_rank and ours.per_rank and theirs.shape[0] != ours.shape[0]:
        spread = ", or give fzero.load(per_rank='mean')" if ours.dtype.is_floating_point else ""
        return f": what each rank keeps for itself has no meaning for other ranks; load it on {theirs.shape[0]}{spread}"
    return ""


def _lines(label: str, paths: Iterable[str], notes: Mapping[str, str] | None = None) -> Sequence[str]:
    paths = list(paths)
    if not paths:
        return []
    shown = [f"    {leaf_name('state', path)}{(notes or {}).get(path, '')}" for path in paths[:SHOWN]]
    more = [f"    and {len(paths) - SHOWN} more"] if len(paths) > SHOWN else []
    return [f"  {len(paths)} {label}:", *shown, *more]
