"""strict: JSON that can be trusted after reading, or an error that names the place.

`parse` takes bytes of bounded size. It refuses the things that JSON leaves open: duplicate keys, NaN and infinities,
numbers that overflow, invalid text (lone surrogates). `Reader` then checks a value: every key known, every type exact.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

MAX_DEPTH = 200  # of containers in one another
MAX_INT = 1 << 63


class Invalid(ValueError):
    """The fault and its place; the caller names the file."""


def parse(data: bytes) -> Any:
    """Returns the value that is written in `data`. Raises Invalid."""
    try:
        text = data.decode("utf-8")
        value = json.loads(
            text, object_pairs_hook=_distinct, parse_constant=_no_constant, parse_float=_finite, parse_int=_int
        )
        if "\\ud" in text or "\\uD" in text:  # an escaped half of a pair may have made text that is none
            check_text(value)
    except Invalid:
        raise
    except RecursionError:
        raise Invalid("it is nested too deep") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError too
        raise Invalid(f"it is not JSON in UTF-8 ({error})") from None
    return value


def dump(value: Any) -> bytes:
    """Returns the one spelling of a value: no spaces, UTF-8, keys in the order given."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


def check_json(where: str, value: Any, depth: int = 0) -> None:
    """Raises Invalid, which names the place, for a value that would not come back from JSON as it is."""
    if depth > MAX_DEPTH:
        raise Invalid(f"{where} is nested deeper than {MAX_DEPTH}")
    if type(value) is dict:
        for key, inner in value.items():
            if type(key) is not str:
                raise Invalid(f"{where} has the key {key!r}: needed text")
            check_text(key, f"the key {key!r} of {where}")
            check_json(f"{where}[{key!r}]", inner, depth + 1)
    elif type(value) is list:
        for i, inner in enumerate(value):
            check_json(f"{where}[{i}]", inner, depth + 1)
    elif type(value) is float and not math.isfinite(value):
        raise Invalid(f"{where} is {value!r}, which JSON has not: write it as text or None")
    elif type(value) is int and abs(value) >= 10**4000:
        raise Invalid(f"{where} is an integer of more than 4,000 digits")
    elif type(value) is str:
        check_text(value, where)
    elif value is not None and type(value) not in (bool, int, float, str):
        raise Invalid(
            f"{where} is a {type(value).__name__}: needed dict, list, str, int, float, bool or None (tensors belong "
            "into the state; a tuple is a list, a NumPy number an int or a float in JSON)"
        )


def check_text(value: Any, where: str = "a text") -> None:
    """Raises Invalid for text with lone surrogates, which has no bytes."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise Invalid(f"{where} is no text in UTF-8: {value!r}") from None
    elif isinstance(value, dict):
        for key, inner in value.items():
            check_text(key, where)
            check_text(inner, where)
    elif isinstance(value, list):
        for inner in value:
            check_text(inner, where)


class Reader:
    """A JSON object at a place in a file. `fields` are exactly its keys.

    Each method checks one field and returns it, or raises Invalid.
    """

    def __init__(self, where: str, value: Any, fields: tuple[str, ...]) -> None:
        self.where = where
        if type(value) is not dict:
            self.fail("an object", value)
        if missing := [f for f in fields if f not in value]:
            raise Invalid(f"{where} has no {missing[0]!r}")
        if unknown := [key for key in value if key not in fields]:
            raise Invalid(f"{where} has an unknown key {unknown[0]!r:.80}")
        self.value = value

    def fail(self, needed: str, value: Any, name: str = "") -> NoReturn:
        """Raises Invalid: the place, the value, and the kind of value that was needed."""
        raise Invalid(f"{self.where}{f'.{name}' if name else ''} is {_short(value)}: needed {needed}")

    def text(self, name: str, pattern: str | None = None) -> str:
        """Returns a text; it matches all of `pattern`, if there is one."""
        field = self.value[name]
        if type(field) is not str or (pattern is not None and re.fullmatch(pattern, field) is None):
            self.fail("text" if pattern is None else f"text of the form {pattern}", field, name)
        return str(field)

    def integer(self, name: str, low: int = 0, high: int = MAX_INT - 1) -> int:
        """Returns an integer from `low` to `high`."""
        field = self.value[name]
        if type(field) is not int or not low <= field <= high:
            self.fail(f"an integer from {low} to {high}", field, name)
        return int(field)

    def boolean(self, name: str) -> bool:
        """Returns true or false."""
        field = self.value[name]
        if type(field) is not bool:
            self.fail("true or false", field, name)
        return bool(field)

    def items(self, name: str) -> list[Any]:
        """Returns a list."""
        field = self.value[name]
        if type(field) is not list:
            self.fail("a list", field, name)
        return list(field)

    def objects(self, name: str, fields: tuple[str, ...]) -> Iterator[Reader]:
        """Yields a Reader for each object of a list."""
        for i, inner in enumerate(self.items(name)):
            yield Reader(f"{self.where}.{name}[{i}]", inner, fields)

    def table(self, name: str) -> dict[str, Any]:
        """Returns an object as a dict."""
        field = self.value[name]
        if type(field) is not dict:
            self.fail("an object", field, name)
        return dict(field)


def _short(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"a {'object' if isinstance(value, dict) else 'list'} of {len(value)}"
    return repr(value)[:80]


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        keys: set[str] = set()
        twice = next(key for key, _ in pairs if key in keys or keys.add(key))  # type: ignore[func-returns-value]
        raise Invalid(f"the key {twice!r:.80} is there twice")
    return table


def _no_constant(text: str) -> NoReturn:
    raise Invalid(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Invalid(f"the number {text:.40} overflows")
    return value


def _int(text: str) -> int:
    if len(text) > 4001:
        raise Invalid("an integer has more than 4,000 digits")
    return int(text)
