"""chains: what a line of a function names: a name and the steps that follow it, `cfg.alpha`, `TABLE["a"][i - 1]`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ConstantKey:
    """A subscript that is written as a constant: the "a" of `TABLE["a"]`."""

    value: Any


@dataclass(frozen=True)
class Get:
    """The step of `table.get(key)`."""

    key: Key


@dataclass(frozen=True)
class Within:
    """The step of `key in table`."""

    key: Key


@dataclass(frozen=True)
class Named:
    """The step of `getattr(owner, name)`, where a chain gives the name, or a line makes it."""

    key: NameChain | Computed


@dataclass(frozen=True)
class Computed:
    """A subscript or a name that a line makes of others: `i - 1`, `len(table) - 1`, `f"w_{i}"`.

    how: the operator; the name of a function of `PURE`; "format" of one value's text; "join" of texts."""

    how: str
    parts: tuple[Key, ...]

    def __str__(self) -> str:
        texts = [str(part.value) if isinstance(part, ConstantKey) else str(part) for part in self.parts]
        if self.how == "join":
            return "".join(texts)
        if self.how in PURE:
            return f"{self.how}({', '.join(texts)})"
        return f"{{{texts[0]}}}" if self.how == "format" else f" {self.how} ".join(texts)

    def value(self, values: Sequence[Any]) -> Any:
        """What it is of the values of its parts; raises where they do not fit, or would run code of the user."""
        if not all(type(value) in _PLAIN or (self.how == "len" and type(value) in _SIZED) for value in values):
            raise TypeError
        if self.how == "join":
            return "".join(values)
        return {**PURE, **_OPERATORS, "format": format}[self.how](*values)


PURE: dict[str, Callable[..., Any]] = {"len": len, "str": str, "int": int, "min": min, "max": max, "abs": abs}
_OPERATORS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
}  # fmt: skip
_PLAIN = (int, str, float, bool)
_SIZED = (list, tuple, dict, set)
Step = str | ConstantKey | Get | Within | Named | Computed  # and NameChain


@dataclass(frozen=True)
class NameChain:
    """A name, and the steps that follow it.

    scope: "local", "free" (of a function around this one), "global", "module" of a name that is imported, "namespace"
    of `globals()`, or "result" of a call; called: then, of what.
    steps: attributes as text; subscripts as a `ConstantKey`, or as a NameChain that gives the key; and what some
    calls read.
    """

    name: str
    scope: str
    steps: tuple[Step | NameChain, ...] = ()
    called: NameChain | None = None

    def __str__(self) -> str:
        return self.name + "".join(map(_step_text, self.steps))


Key = ConstantKey | NameChain | Computed


def _step_text(step: Step | NameChain) -> str:
    if isinstance(step, str):
        return f".{step}"
    if isinstance(step, (Get, Within)):
        step = step.key
    if isinstance(step, Named):
        return f".{{{step.key}}}"
    return f"[{step.value!r}]" if isinstance(step, ConstantKey) else f"[{step}]"


@dataclass(frozen=True)
class Use:
    """What a line does with a chain. at: the offset of its instruction, if the line may run without it (`a and cfg.b`);
    else None. callee: the chain of the function that a read value is given to, if that is known. after: the line has
    written to the chain before (`n += 1; return n`). dropped: it is called, and the result is not used."""

    chain: NameChain
    at: int | None = None
    callee: NameChain | None = None
    after: bool = False
    dropped: bool = False


@dataclass(frozen=True)
class Lines:
    """What the lines of one code object name, by line.

    updates: those of `writes` that the same instruction reads (`x += 1`): such a read by itself decides nothing. seeds:
    chains that are called, with an argument, to set a generator's state. offsets: those of all uses, with their lines.
    """

    reads: Mapping[int, tuple[Use, ...]]
    writes: Mapping[int, tuple[Use, ...]]
    updates: Mapping[int, tuple[Use, ...]]
    seeds: Mapping[int, tuple[Use, ...]]
    offsets: Mapping[int, int]
