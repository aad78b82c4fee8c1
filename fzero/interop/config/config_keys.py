"""config_keys: what a row of a table of configuration keys says. The tables are data: code reads them, docs print them.

A row has the path of a key, the kind of its values, its default in the other library, a verdict and a sentence. Five
verdicts:

| verdict | a value is |
|---|---|
| honoured | read: it decides something of the run |
| always   | accepted: fzero is so whatever it says |
| hint     | accepted: it changes no number, and fzero decides by itself |
| refused  | an error, unless it is the default or off: then it asks for nothing |
| removed  | as refused; the other library has removed the key too |
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, NamedTuple


class Verdict(Enum):
    """What is done with a value. `reads`: code asks for it. `off_only`: only the default and off are accepted."""

    HONOURED = "honoured"
    ALWAYS = "always"
    HINT = "hint"
    REFUSED = "refused"
    REMOVED = "removed"

    @property
    def reads(self) -> bool:
        return self is Verdict.HONOURED

    @property
    def off_only(self) -> bool:
        return self in (Verdict.REFUSED, Verdict.REMOVED)


_OFF = ("no", "none", "off", "false", "null")


def says_off(value: Any) -> bool:
    """Whether a value is a spelling of off, as files have it: false, 0, "no", "none", "off", "false" or "null".

    >>> [says_off(value) for value in (False, 0, "No", "none", None, "never", 0.5)]
    [True, True, True, True, False, False, False]
    """
    return value.strip().lower() in _OFF if isinstance(value, str) else isinstance(value, (int, float)) and value == 0


class ValueKind(NamedTuple):
    """The values that a key takes: `needed` names them in errors, `fits` knows them. whole: they are integers, which
    files also write as 2e8. off: the value that false, "no" or "none" stands for; None: as if the key were absent."""

    needed: str
    fits: Callable[[Any], bool]
    whole: bool = False
    off: Any = None

    def meant(self, value: Any) -> Any:
        """The value, or `off` where the value only says off.

        >>> FLAG.meant("no"), COUNT.meant("none"), one_of("none", "cpu").meant(False), FLAG.meant("maybe")
        (False, None, 'none', 'maybe')
        """
        counted = self.whole and _number(value)  # 0 of a count is a number
        return self.off if says_off(value) and not self.fits(value) and not counted else value


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value and abs(value) < 1e308


MOST = 1 << 40  # of anything that is counted: rows, ranks, steps between two lines


def _whole(value: Any) -> bool:
    return _number(value) and float(value).is_integer()


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(fits(item) for item in value)


def one_of(*choices: Any) -> ValueKind:
    """The kind of a key with a few values.

    >>> one_of("none", "cpu").needed
    "'none' or 'cpu'"
    """
    *first, last = [repr(choice) for choice in choices]
    whole = all(isinstance(choice, int) for choice in choices)
    off = next((choice for choice in choices if says_off(choice)), None)
    fits = lambda value: not isinstance(value, bool) and value in choices  # noqa: E731
    return ValueKind(f"{', '.join(first)} or {last}", fits, whole, off)


ANY = ValueKind("any value", lambda value: True)
FLAG = ValueKind("true or false", lambda value: isinstance(value, bool), off=False)
INT = ValueKind("a whole number >= 0", lambda value: _whole(value) and value >= 0, True, 0)
SIGNED = ValueKind("a whole number", _whole, True)
COUNT = ValueKind("a whole number from 1 to 2**40", lambda value: _whole(value) and 1 <= value <= MOST, True)
NUMBER = ValueKind("a number", _number)
POSITIVE = ValueKind("a number >= 0", lambda value: _number(value) and value >= 0)
TEXT = ValueKind("text", lambda value: isinstance(value, str))
NAME = ValueKind("a name", lambda value: isinstance(value, str) and not says_off(value))
FOLDER = ValueKind(
    "the path of a folder", lambda value: isinstance(value, str) and "\0" not in value and value.strip() != ""
)
PAIR = ValueKind("two numbers, as [0.9, 0.999]", lambda value: _list_of(_number)(value) and len(value) == 2)
NAMES = ValueKind("a list of text", _list_of(lambda item: isinstance(item, str)))
BLOCK = ValueKind("a block { }", lambda value: isinstance(value, Mapping))
_OF_DEFAULT = {bool: FLAG, int: INT, float: NUMBER, str: TEXT, list: NAMES, dict: BLOCK, type(None): ANY}


@dataclass(frozen=True)
class Key:
    """One row. Immutable.

    path: keys joined by dots. kind: its values. default: what an absent key means in the other library. verdict, says:
    what becomes of a value, or why it is refused. fix: the smallest change where it is refused. auto: "auto" may stand
    here, and is resolved.
    """

    path: str
    kind: ValueKind
    default: Any
    verdict: Verdict
    says: str
    fix: str = ""
    auto: bool = False


class Of(NamedTuple):
    """A default whose kind it does not tell by itself: `keys(..., stage=Of(one_of(0, 1, 2, 3), 0))`."""

    kind: ValueKind
    default: Any = None


def keys(prefix: str, verdict: Verdict, says: str, /, fix: str = "", auto: bool = False, **defaults: Any) -> list[Key]:
    """The rows of keys that share a sentence. Their kind follows from their default, or `Of` says it.

    >>> [key.path for key in keys("fp16", Verdict.HINT, "a hint", enabled=False, window=Of(COUNT, 1000))]
    ['fp16.enabled', 'fp16.window']
    """
    rows = []
    for name, default in defaults.items():
        kind, value = default if isinstance(default, Of) else (_OF_DEFAULT[type(default)], default)
        rows.append(Key(f"{prefix}.{name}" if prefix else name, kind, value, verdict, says, fix, auto))
    return rows


def table(*groups: list[Key]) -> dict[str, Key]:
    """The rows by path, in order. Each path once: a second row for it would never be read."""
    rows = [key for group in groups for key in group]
    by_path = {key.path: key for key in rows}
    assert len(by_path) == len(rows), [key.path for key in rows if rows.count(key) > 1]
    return by_path


def is_off(value: Any, default: Any) -> bool:
    """Whether a value asks for nothing: it is the default, or nothing, or a block that is not enabled.

    >>> is_off(0, 0), is_off(True, False), is_off({"enabled": False, "steps": 3}, None), is_off(False, True)
    (True, False, True, False)
    """
    if value == default and isinstance(value, bool) == isinstance(default, bool):
        return True
    if isinstance(value, Mapping):
        return not value or ("enabled" in value and says_off(value["enabled"]))
    counted = _number(value) and _number(default)  # 0 of a number is a number
    return value is None or value == [] or (says_off(value) and default is not True and not counted)


def leaves(document: Mapping[str, Any], blocks: Collection[str], at: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of each leaf of a document: what is no block, or lies where the table has none.

    >>> list(leaves({"fp16": {"enabled": True}, "other": {"a": 1}}, {"fp16"}))
    [('fp16.enabled', True), ('other', {'a': 1})]
    """
    for name, value in document.items():
        path = f"{at}{name}"
        if isinstance(value, Mapping) and path in blocks:
            yield from leaves(value, blocks, f"{path}.")
        else:
            yield path, value


@cache
def blocks(paths: tuple[str, ...]) -> frozenset[str]:
    """The blocks that keys lie in.

    >>> sorted(blocks(("optimizer.params.lr", "steps")))
    ['optimizer', 'optimizer.params']
    """
    return frozenset(".".join(path.split(".")[:i]) for path in paths for i in range(1, path.count(".") + 1))
