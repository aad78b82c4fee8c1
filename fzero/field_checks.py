"""field_checks: the checks of a Spec's fields. Each error gives the field, the value, and what was needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fzero.errors import SpecError
from fzero.tree import suggest

LONGEST = 200  # characters


def needs(ok: bool, name: str, value: Any, needed: str, of: str = "Spec") -> None:
    """Raises SpecError unless `ok`. of: the record whose field it is.

    >>> needs(False, "prefetch", -1, "0 or a positive int")
    Traceback (most recent call last):
    fzero.errors.SpecError: Spec(prefetch=-1): needed 0 or a positive int
    """
    if not ok:
        raise SpecError(f"{of}({name}={shown(value)}): needed {needed}")


def shown(value: Any) -> str:
    """A value in one line, as an error names it: of torch's optimizers, models and large dicts the beginning.

    >>> shown({"w": [0] * 200})
    "{'w': [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ..."
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST else f"{text[:60]} ..."


def positive(name: str, value: Any) -> None:
    """Raises SpecError unless the value is an int > 0."""
    needs(type(value) is int and value > 0, name, value, "a positive int")


def choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    """Raises SpecError unless the value is a known one; it suggests the nearest.

    >>> choice("compile", "inducto", ("none", "inductor"))
    Traceback (most recent call last):
    fzero.errors.SpecError: Spec(compile='inducto'): needed one of ['none', 'inductor']. Did you mean 'inductor'?
    """
    if value not in known:
        hint = suggest(value, [k for k in known if isinstance(k, str)]) if isinstance(value, str) else ""
        raise SpecError(f"Spec({name}={shown(value)}): needed one of {list(known)}.{hint}")


def path_rules(name: str, given: Any, example: str, of: str = "Spec") -> None:
    """Raises SpecError unless the value of a field of `of` is one path rule, or several."""
    rules = (given,) if isinstance(given, str) else given if isinstance(given, Sequence) else ()
    text = bool(rules) and all(isinstance(rule, str) and rule for rule in rules)
    needs(text, name, given, f"path rules, as in {example!r}", of)
