"""config_calls: a value and the Python that makes it, from one record; so what is printed is what is used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fzero import optim, precision

_NAMES: dict[str, Any] = {
    "Precision": precision.Precision,
    "LossScale": precision.LossScale,
    "LossScale.of_torch": precision.LossScale.of_torch,
}


@dataclass(frozen=True)
class ConfigCall:
    """A call of a function of `fzero` or `fzero.optim`, by its public name. Immutable; arguments may be calls too.

    >>> call = ConfigCall("fzero.optim.constant", (0.5,))
    >>> print(call)
    fzero.optim.constant(0.5)
    >>> call.value()(torch.tensor(3))
    tensor(0.5000, dtype=torch.float64)
    """

    name: str
    arguments: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)

    def value(self) -> Any:
        """Calls it. Raises the errors of the function."""
        function = _function(self.name)
        return function(*map(value_of, self.arguments), **{name: value_of(v) for name, v in self.named.items()})

    def __str__(self) -> str:
        shown = [text_of(argument) for argument in self.arguments]
        return f"{self.name}({', '.join([*shown, *(f'{name}={text_of(v)}' for name, v in self.named.items())])})"


@dataclass(frozen=True)
class Name:
    """A public name of `fzero.optim` that is given as it is, not called. Immutable."""

    name: str

    def __str__(self) -> str:
        return self.name


def value_of(expression: Any) -> Any:
    """The value of a `ConfigCall`, a `Name`, a list or tuple of such, or of a plain value."""
    if isinstance(expression, ConfigCall):
        return expression.value()
    if isinstance(expression, Name):
        return _function(expression.name)
    if isinstance(expression, (list, tuple)):
        return type(expression)(value_of(item) for item in expression)
    return expression


def text_of(expression: Any) -> str:
    """The Python of an expression.

    >>> text_of([ConfigCall("fzero.optim.sgd", (0.1,)), {"dp": -1}])
    "[fzero.optim.sgd(0.1), {'dp': -1}]"
    """
    if isinstance(expression, (ConfigCall, Name)):
        return str(expression)
    if isinstance(expression, list):
        return f"[{', '.join(map(text_of, expression))}]"
    if isinstance(expression, tuple) and len(expression) > 1:
        return f"({', '.join(map(text_of, expression))})"
    return 'float("inf")' if expression == math.inf else repr(expression)


def _function(name: str) -> Any:
    own = name.removeprefix("fzero.")
    return _NAMES[own] if own in _NAMES else getattr(optim, own.removeprefix("optim."))
