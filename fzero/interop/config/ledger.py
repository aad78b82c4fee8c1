"""ledger: a document beside its table. Every leaf of the document is taken once, and the report says what became of it.

    Ledger(where, document, table, auto)      leaves by path; unknown paths are refusals
    ledger.take(path)                         the value of an honoured key, its default if the document has none
    ledger.became(path, text)                 what the report says of it, where the row's sentence is too general
    ledger.refuse(path, why, fix)             one more refusal
    ledger.close()                            hints and the rest are taken; one ConfigError for all refusals

"auto" is resolved from `auto`, a mapping of paths to values, which may also give keys that the document lacks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fzero import tree
from fzero.errors import ConfigError
from fzero.interop.config.keys import FLAG, Key, blocks, is_off, leaves

AUTO, ABSENT = "auto", object()


class Line(NamedTuple):
    """A line of the report. `value` is what the document says, or where the value comes from."""

    path: str
    value: str
    became: str


class Refusal(NamedTuple):
    """A key that is in the way: its path, and a text with its value, why, and the smallest fix."""

    path: str
    text: str


class Ledger:
    """One document. `values` are its leaves by the table's paths, `lines` the report's; only this class writes them."""

    def __init__(
        self,
        where: str,
        document: Mapping[str, Any],
        table: Mapping[str, Key],
        auto: Mapping[str, Any] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.where, self.table, self.auto = where, table, dict(auto or {})
        self.values: dict[str, Any] = {}
        self.lines: dict[str, Line] = {}
        self.refusals: list[Refusal] = []
        self._told: set[str] = set()  # paths of which more is said than the row says
        inner = blocks(tuple(table))
        for path, value in leaves(_renamed(document, aliases or {}, self), inner):
            self._enter(path, value, path in inner)
        for path in self.auto:
            self._check_auto(path)

    def has(self, path: str) -> bool:
        """Whether the document or `auto` says anything of a key."""
        return self.values.get(path) is not None or path in self.auto

    def take(self, path: str, auto: Any = ABSENT) -> Any:
        """The value of an honoured key: the document's, or what `auto=` gives for it, or the default.

        auto: the value that "auto" has where none is given; without it, that is a refusal.
        """
        key, value = self.table[path], self.values.get(path)
        assert key.verdict.reads, path
        assert path not in self.lines, path
        shown = _shown(value) if path in self.values else "(absent)"
        if (value is None or value == AUTO) and path in self.auto:
            value, shown = self.auto[path], f"{_shown(self.auto[path])} (given)"
        elif value == AUTO and auto is not ABSENT:
            value = auto
        elif value == AUTO:
            self.refuse(path, *_unresolved(key))
            value = key.default
        if value is None:
            value = key.default
        elif value is not auto and not key.kind.fits(value):
            self.refuse(path, f"needed {key.kind.needed}", _typed(key, value))
            value = key.default
        self.lines[path] = Line(path, shown, key.says)
        return int(value) if key.kind.whole and isinstance(value, float) else value

    def became(self, path: str, text: str) -> None:
        """Says in the report what became of a key that was taken, absent ones too."""
        self.lines[path] = Line(path, self.lines[path].value, text)
        self._told.add(path)

    def refuse(self, path: str, why: str, fix: str = "", value: Any = ABSENT) -> None:
        """Adds a refusal: the path and the value as the document has them, why, and the smallest fix."""
        value = self.values.get(path, self.auto.get(path, ABSENT)) if value is ABSENT else value
        said = "" if value is ABSENT else f" = {_shown(value)}"
        self.refusals.append(Refusal(path, f"{path}{said}: {why}" + (f". {_sentence(fix)}" if fix else "")))

    def close(self) -> tuple[Line, ...]:
        """The lines of the report, in the table's order, without honoured keys that the document lacks and nobody
        spoke of. Raises ConfigError for all refusals together."""
        for path, key in self.table.items():
            if path not in self.lines and path in self.values:
                assert not key.verdict.reads, f"nobody reads {path}"
                self._settle(key, self.values[path])
        if self.refusals:
            count = len(self.refusals)
            counted = "one key is in the way" if count == 1 else f"{count} keys are in the way"
            listed = "\n".join(f"  {refusal.text}" for refusal in self.refusals)
            raise ConfigError(f"{self.where}: {counted}\n{listed}", self.refusals)
        kept = (self.lines[path] for path in self.table if path in self.lines)
        return tuple(line for line in kept if line.value != "(absent)" or line.path in self._told)

    def _settle(self, key: Key, value: Any) -> None:
        """Takes a key that no code reads, by its verdict."""
        if key.verdict.off_only:
            switch = f"{key.path.rpartition('.')[0]}.enabled"
            asleep = switch != key.path and switch in self.table and self.values.get(switch) in (None, False)
            off = is_off(value, key.default) and (not isinstance(value, Mapping) or key.kind.fits(value))
            if not (asleep or off):
                return self.refuse(key.path, key.says, key.fix)
            became = "the default" if value == key.default else "the block is not enabled" if asleep else "off"
            self.lines[key.path] = Line(key.path, _shown(value), f"nothing: {became}")
            return None
        if value is not None and value != AUTO and not key.kind.fits(value):
            return self.refuse(key.path, f"needed {key.kind.needed}", _typed(key, value))
        self.lines[key.path] = Line(key.path, _shown(value), f"nothing: {key.says}")
        return None

    def _enter(self, path: str, value: Any, block: bool) -> None:
        if path in self.table:
            self.values[path] = value
        elif block:
            if value not in (None, {}):  # a block that is empty asks for nothing
                self.refuse(path, "needed a block of keys", _inside(path, self.table), value)
        else:
            self.refuse(path, "there is no such key", nearest(path, self.table), value)

    def _check_auto(self, path: str) -> None:
        if path not in self.table:
            self.refuse(path, "auto= gives it, but there is no such key", nearest(path, self.table))
        elif self.values.get(path, AUTO) not in (None, AUTO, self.auto[path]):
            why = f"auto= gives {self.auto[path]!r}, but the document says another value"
            self.refuse(path, why, 'take it out of auto=, or write "auto" in the document')
        elif not self.table[path].verdict.reads:
            self.refuse(path, "auto= gives it, but nothing reads it", "take it out of auto=")


def nearest(path: str, table: Iterable[str]) -> str:
    """`Did you mean 'x'?`, or where the last word of a path is at home, or nothing.

    Names at the same place come first, by their distance in letters; then the same name elsewhere.

    >>> nearest("zero_optimiztion", ["zero_optimization.stage", "optimizer.type"])
    "Did you mean 'zero_optimization'?"
    >>> nearest("stage", ["zero_optimization.stage"])
    "Did you mean 'zero_optimization.stage'?"
    """
    parent, _, name = path.rpartition(".")
    prefix = f"{parent}." if parent else ""
    beside = {other.removeprefix(prefix).split(".")[0] for other in table if other.startswith(prefix)}
    most = max(1, len(name) // 4)
    alike = [other for other in beside if abs(len(other) - len(name)) <= most]  # the rest is further away in any case
    by_distance = sorted((_distance(name.lower(), other.lower()), other) for other in alike)
    if by_distance and by_distance[0][0] <= most:
        return f"Did you mean {prefix + by_distance[0][1]!r}?"
    elsewhere = [other for other in table if other.rpartition(".")[2] == name]
    if elsewhere:
        return f"Did you mean {elsewhere[0]!r}?"
    return tree.suggest(name, beside).strip().replace("mean '", f"mean '{prefix}")


def _distance(a: str, b: str) -> int:
    """How many letters must be put in, taken out, changed or swapped with their neighbour to make `b` of `a`."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        two, before, row = before, row, [i]
        for j, y in enumerate(b, 1):
            swapped = two[j - 2] + 1 if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y else len(a) + len(b)
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (x != y), swapped))
    return row[-1]


def _renamed(document: Mapping[str, Any], aliases: Mapping[str, str], ledger: Ledger, at: str = "") -> dict[str, Any]:
    """The document with the table's names for keys that have two. Both names of one key are refused."""
    renamed: dict[str, Any] = {}
    for name, value in document.items():
        path = f"{at}{name}"
        known = aliases.get(path, path).rpartition(".")[2]
        if known != name and known in document:
            ledger.refuse(path, f"is another name of {known!r}, which is given too", "keep one of them", value)
            continue
        deeper = isinstance(value, Mapping) and any(other.startswith(f"{at}{known}.") for other in aliases)
        renamed[known] = _renamed(value, aliases, ledger, f"{at}{known}.") if deeper else value
    return renamed


def _inside(path: str, table: Iterable[str]) -> str:
    first = next(other for other in table if other.startswith(f"{path}.")).removeprefix(f"{path}.").split(".")[0]
    return f'write {{"{first}": ...}}'


def _unresolved(key: Key) -> tuple[str, str]:
    if key.auto:
        return "nothing says what auto is", f"give auto={{{key.path!r}: ...}}, or write the value"
    return "auto is filled by no one here, in DeepSpeed neither", f"write {key.kind.needed}, or take it out"


def _typed(key: Key, value: Any) -> str:
    """The value as it was meant, if that can be seen."""
    if isinstance(value, str):
        plain = {"true": True, "false": False}.get(value.strip().lower(), ABSENT)
        try:
            plain = float(value) if plain is ABSENT else plain
        except ValueError:
            return ""
        if key.kind.fits(plain):
            return f"write {value.strip().lower()} without quotes"
    return f"write {'true' if value else 'false'}" if key.kind is FLAG and value in (0, 1) else ""


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=repr, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # no JSON: keys that are no text, a block within itself
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
