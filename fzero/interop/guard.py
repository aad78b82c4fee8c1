"""guard: keeps an eager call of `apply` from changing its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from fzero._torch_compat import TorchDispatchMode
from fzero.capture.provenance import user_line
from fzero.capture.refuse import Refused
from fzero.errors import leaf_name
from fzero.ir import fx_values


class Guard(TorchDispatchMode):
    """Refuses writes to the memory of parameters before they happen, by `.data` too, which no version counts."""

    def __init__(self, name: str, params: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.name = name
        self.places = {path: place for path, value in params.items() if (place := _place(value))}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            for value in _written(func, args, kwargs or {}):
                self._check(func, value)
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any, value: Tensor) -> None:
        if (place := _place(value)) is None:
            return
        for path, (start, end) in self.places.items():
            if start < place[1] and place[0] < end:
                raise Refused(
                    f"{self.name} changes {leaf_name('params', path)} in place by {func} at {user_line()}: the "
                    "weights are "
                    "the caller's. Use a new value instead, as in F.linear(x, self.weight / 3), or change the "
                    "parameters outside of apply"
                )


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from fx_values.tensors(named.get(argument.name))


def _place(value: Tensor) -> tuple[int, int] | None:
    """Where a tensor's elements lie in memory; None where it has none of its own."""
    try:
        start = value.data_ptr()
    except RuntimeError:  # a transform's wrapper
        return None
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (start, start + (last + 1) * value.element_size()) if start and value.numel() else None
