"""ledger: a document beside its table. Every leaf of the document is taken once, and the report says what became of it.

    Ledger(where, document, table, auto)      leaves by path; unknown paths are refusals
    ledger.take(path)                         the value of an honoured key, its default if the document has none
    ledger.became(path, text)                 what the report says of it, where the row's sentence is too general
    ledger.refuse(path, why, fix)             one more refusal
    ledger.forget(block)                      takes back refusals inside of a block that is refused as a whole
    ledger.lacks(path, why)                   one more refusal, which a value in `auto` would settle
    ledger.close()                            hints and the rest are taken; one ConfigError for all refusals

"auto" is resolved from `auto`, a mapping of paths to values, which may also give keys that the document lacks. In the
blocks `dropped` the other library itself drops "auto", and the key has its default.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fzero import tree
from fzero.errors import ConfigError
from fzero.interop.config.config_keys import FLAG, Key, Verdict, blocks, is_off, leaves, says_off

AUTO, ABSENT = "auto", object()


class LedgerLine(NamedTuple):
    """A line of the report. `value` is what the document says, or where the value comes from."""

    path: str
    value: str
    became: str


def table_of(lines: Sequence[LedgerLine]) -> str:
    """The lines of a report under one another, in columns."""
    widths = [max((len(line[i]) for line in lines), default=0) for i in (0, 1)]
    return "\n".join(f"  {path:<{widths[0]}}  {value:<{widths[1]}}  {became}" for path, value, became in lines)


class Refusal(NamedTuple):
    """A key that is in the way: its path, and a text with its value, why, and the smallest fix."""

    path: str
    text: str


class Ledger:
    """One document. `said` are its leaves by the table's paths, `values` what they mean, `lines` the report's, `open`
    the paths that wait for a value; only this class writes them."""

    def __init__(
        self,
        where: str,
        document: Mapping[str, Any],
        table: Mapping[str, Key],
        auto: Mapping[str, Any] | None = None,
        aliases: Mapping[str, str] | None = None,
        dropped: Collection[str] = (),
    ) -> None:
        self.where, self.table, self.auto, self.dropped = where, table, dict(auto or {}), dropped
        self.said: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.lines: dict[str, LedgerLine] = {}
        self.refusals: list[Refusal] = []
        self.open: list[str] = []
        self._asleep: list[LedgerLine] = []  # blocks that are switched off as a whole, and comments
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
        shown = _shown(self.said[path]) if path in self.said else "(absent)"
        if (value is None or value == AUTO) and path in self.auto:
            value, shown = self.auto[path], f"{_shown(self.auto[path])} (given)"
        elif value == AUTO and auto is not ABSENT:
            value = auto
        elif value == AUTO and key.auto:
            self.lacks(path, "nothing says what auto is")
            value = None
        elif value == AUTO and not key.kind.fits(AUTO):
            self.refuse(path, "auto is filled by no one here", f"write {key.kind.needed}, or take it out")
            value = None
        if value is None:
            value = key.default
        elif value is not auto and not key.kind.fits(value):
            self.refuse(path, f"needed {key.kind.needed}", _typed(key, value))
            value = key.default
        self.lines[path] = LedgerLine(path, shown, self._became(key, value) if path in self.said else key.says)
        return int(value) if key.kind.whole and isinstance(value, float) else value

    def _became(self, key: Key, value: Any) -> str:
        """What the report says of a key that was read, by the value that it says."""
        if self._drops(key) and value == key.default:
            return f"nothing: auto is dropped here, and the default is {_shown(value)}"
        off = value is False or (value is None and self.said[key.path] != AUTO) or value in ("none", "no", "NO")
        return "nothing: off" if off and (not key.default or says_off(key.default)) else key.says

    def _drops(self, key: Key) -> bool:
        """Whether the document says "auto" where the other library drops it, and no one else fills it."""
        block, dot, _ = key.path.partition(".")
        return self.said.get(key.path) == AUTO and not key.auto and bool(dot) and block in self.dropped

    def became(self, path: str, text: str) -> None:
        """Says in the report what became of a key that was taken, absent ones too."""
        self.lines[path] = LedgerLine(path, self.lines[path].value, text)
        self._told.add(path)

    def refuse(self, path: str, why: str, fix: str = "", value: Any = ABSENT) -> None:
        """Adds a refusal: the path and the value as the document has them, why, and the smallest fix."""
        value = self.said.get(path, self.auto.get(path, ABSENT)) if value is ABSENT else value
        said = "" if value is ABSENT else f" = {_shown(value)}"
        self.refusals.append(Refusal(path, f"{path}{said}: {why}" + (f". {_sentence(fix)}" if fix else "")))

    def forget(self, block: str) -> None:
        """Takes back what was refused inside of a block that is refused as a whole."""
        self.refusals = [refusal for refusal in self.refusals if not refusal.path.startswith(f"{block}.")]

    def lacks(self, path: str, why: str, or_write: str = "the value") -> None:
        """Adds a refusal of a key that a value in `auto` would settle."""
        self.open.append(path)
        self.refuse(path, why, f"give auto={{{path!r}: ...}}, or write {or_write}")

    def close(self) -> tuple[LedgerLine, ...]:
        """The lines of the report, in the table's order, without honoured keys that the document lacks and nobody
        spoke of. Raises ConfigError for all refusals together; it has the report and the open paths too."""
        for path, key in self.table.items():
            if path not in self.lines and path in self.values:
                assert not key.verdict.reads, f"nobody reads {path}"
                self._settle(key, self.said[path])
        kept = (self.lines[path] for path in self.table if path in self.lines)
        lines = (*(line for line in kept if line.value != "(absent)" or line.path in self._told), *self._asleep)
        if self.refusals:
            count = len(self.refusals)
            counted = "one key is in the way" if count == 1 else f"{count} keys are in the way"
            listed = "\n".join(f"  {refusal.text}" for refusal in self.refusals)
            refused = {refusal.path for refusal in self.refusals}.difference(self.open)
            others = [line for line in lines if line.path not in refused]
            raise ConfigError(f"{self.where}: {counted}\n{listed}", self.refusals, others, self.open)
        return lines

    def _settle(self, key: Key, value: Any) -> None:
        """Takes a key that no code reads, by its verdict."""
        if key.verdict.off_only:
            switch = f"{key.path.rpartition('.')[0]}.enabled"
            asleep = switch != key.path and switch in self.table and self.values.get(switch) in (None, False)
            auto = self._drops(key)
            off = is_off(value, key.default) and (not isinstance(value, Mapping) or key.kind.fits(value))
            if not (asleep or off or auto):
                return self.refuse(key.path, key.says, key.fix)
            default = auto or value == key.default
            became = "the default" if default else "the block is not enabled" if asleep else "off"
            self.lines[key.path] = LedgerLine(key.path, _shown(value), f"nothing: {became}")
            return None
        meant = self.values[key.path]
        if meant not in (None, AUTO) and not key.kind.fits(meant):
            return self.refuse(key.path, f"needed {key.kind.needed}", _typed(key, value))
        always = " in any case" if key.verdict is Verdict.ALWAYS and meant is False and key.default else ""
        became = "off" if key.kind is FLAG and meant is False and not key.default else f"{key.says}{always}"
        self.lines[key.path] = LedgerLine(key.path, _shown(value), f"nothing: {became}")
        return None

    def _enter(self, path: str, value: Any, block: bool) -> None:
        if path in self.table:
            self.said[path] = value
            self.values[path] = None if self._drops(self.table[path]) else self.table[path].kind.meant(value)
        elif block and says_off(value):
            self._asleep.append(LedgerLine(path, _shown(value), "nothing: off"))
        elif block:
            if value not in (None, {}):  # a block that is empty asks for nothing
                self.refuse(path, "needed a block of keys", _inside(path, self.table), value)
        elif _is_comment(path.rpartition(".")[2]):
            self._asleep.append(LedgerLine(path, _shown(value), "nothing: a comment"))
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


def nearest(path: str, table: Iterable[str], *, close: bool = False) -> str:
    """`Did you mean 'x'?`, or where the last word of a path is at home, or nothing.

    Names at the same place come first, by their distance in letters; then the same name elsewhere. close: only what is
    a slip of few letters away, for names of which another one would be another thing.

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
    if close:
        return ""
    places = [other for path in table for other in (path, path.rpartition(".")[0])]  # keys, and the blocks around them
    elsewhere = next((other for other in places if other.rpartition(".")[2] == name), None)
    if elsewhere:
        return f"Did you mean {elsewhere!r}?"
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


def _is_comment(name: str) -> bool:
    """Whether a key is what people write where JSON has no comments: "_comment", "//", a key put aside by "_".

    >>> [_is_comment(name) for name in ("_comment", "//", "_fp16", "communication")]
    [True, True, True, False]
    """
    return name.startswith(("_", "//", "#")) or name.lower() in ("comment", "comments")


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


def _typed(key: Key, value: Any) -> str:
    """The value as it was meant, if that can be seen."""
    if isinstance(value, str):
        plain = {"true": True, "false": False}.get(value.strip().lower(), ABSENT)
        try:
            plain = float(value) if plain is ABSENT else plain
        except ValueError:
            return ""
        if key.kind.fits(plain):
            return f"write {_in_yaml_too(value.strip().lower())} without quotes"
    return f"write {'true' if value else 'false'}" if key.kind is FLAG and value in (0, 1) else ""


def _in_yaml_too(number: str) -> str:
    """A number that YAML does not take for text, as it does 1e8: it wants a point, and a sign after the e.

    >>> _in_yaml_too("1e8"), _in_yaml_too("2.5e-5"), _in_yaml_too("16")
    ('1.0e+8', '2.5e-5', '16')
    """
    parts = re.fullmatch(r"([-+]?\d+)(\.\d*)?e([-+]?)(\d+)", number)
    return f"{parts[1]}{parts[2] or '.0'}e{parts[3] or '+'}{parts[4]}" if parts else number


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=repr, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # no JSON: keys that are no text, a block within itself
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
