"""The dtypes in which an optimizer keeps its moments: the parameter's, float32, or bfloat16 rounded at random.

| `moments=`   | moments are              | a step computes in, and gives updates in |
|--------------|--------------------------|------------------------------------------|
| `None`       | of the parameter's dtype | the parameter's dtype                    |
| `"float32"`  | float32                  | float32, or the parameter's if wider     |
| `"bfloat16"` | bfloat16                 | float32, or the parameter's if wider     |

bfloat16 moments are widened, stepped and rounded up or down at random (`fzero.optim.stochastic_round`). With rounding
to nearest, an average with a long memory would stand still. The seed is the step's number and a constant for each
moment. So no key is needed, and equal runs have equal bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fzero.errors import SpecError
from fzero.optim import _check
from fzero.optim._round import rounded

FIRST, SECOND = 0x6D75 << 32, 0x6E75 << 32  # added to the count: no two moments and no count alone draw alike
_DTYPES = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Moments(NamedTuple):
    """The dtype in which moments are kept; None: that of their parameter. Immutable.

    >>> moments("adamw", "bfloat16").zeros(torch.ones(2))
    tensor([0., 0.], dtype=torch.bfloat16)
    """

    dtype: torch.dtype | None

    def zeros(self, param: Tensor) -> Tensor:
        """Returns the first moment of a parameter: zeros of its shape, in the kept dtype."""
        return torch.zeros_like(param, dtype=self.dtype)

    def work(self, param: Tensor) -> torch.dtype:
        """Returns the dtype in which a step of this parameter computes."""
        return param.dtype if self.dtype is None else torch.promote_types(param.dtype, torch.float32)

    def wide(self, tensors: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        """Returns moments or gradients in the dtypes in which their parameters' steps compute."""
        return [t.to(self.work(p)) for t, p in zip(tensors, params, strict=True)]

    def held(self, where: str, name: str, moment_tree: Any, params: Any) -> list[Tensor]:
        """Returns the leaves of a moment's pytree, as they are kept. Raises `TreeError` if they are unlike `params`."""
        return _check.alike(where, name, moment_tree, params, dtypes=self.dtype or True)

    def stored(self, values: list[Tensor], seed: Tensor) -> list[Tensor]:
        """Returns new moments in the dtype in which they are kept; `seed` is scalar int64."""
        if self.dtype is None:
            return values
        if self.dtype == torch.bfloat16:
            return [rounded(value.to(torch.float32), seed) for value in values]
        return [value.to(self.dtype) for value in values]


def moments(where: str, value: Any) -> Moments:
    """Returns the `Moments` of an argument `moments=`. Raises `SpecError` for another value.

    >>> moments("adamw", "bf16")
    Traceback (most recent call last):
    fzero.errors.SpecError: adamw: moments is 'bf16' (str), but it must be 'float32', 'bfloat16' or None (the \
parameter's dtype)
    """
    if not isinstance(value, (str, type(None))) or value not in _DTYPES:
        raise SpecError(
            f"{where}: moments is {_check.kind(value)}, but it must be 'float32', 'bfloat16' or None (the parameter's "
            "dtype)"
        )
    return Moments(_DTYPES[value])
