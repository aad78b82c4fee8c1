"""no_tensor: what a leaf of a state says where it is used as a tensor, which it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from fzero.errors import leaf_name

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_OTHER = (
    "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "float", "int", "complex", "index", "array", "len",
    "getitem", "setitem",
)  # fmt: skip


class NoTensor:
    """Refuses operators, conversions and functions of torch and numpy with a remedy."""

    @property
    def path(self) -> str:
        """The leaf's name, as `params/blocks/0/w`."""
        raise NotImplementedError

    def __bool__(self) -> bool:
        """It is a leaf: what asks whether there is one reads no value."""
        return True

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"{leaf_name('state', self.path)} is sharded over ranks and is not a tensor, which {what} needs: give its "
            "full tensor, .full() on every rank, or this rank's part, .local; or let the step compute it, as a metric"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        given = [*args, *(kwargs or {}).values()]
        held = [x for xs in given for x in (xs if isinstance(xs, (list, tuple)) else [xs]) if isinstance(x, NoTensor)]
        held[0]._refuse(getattr(func, "__name__", str(func)))


def _refusing(name: str) -> Callable[..., NoReturn]:
    def method(self: NoTensor, *_: Any, **__: Any) -> NoReturn:
        self._refuse(name)

    return method


for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHER):
    setattr(NoTensor, f"__{_name}__", _refusing(f"__{_name}__"))
