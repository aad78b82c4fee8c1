"""absent: the parameters of a module whose values a state holds. Any use of one but for its shape is an error.

A meta tensor alone is not enough: torch computes with it without a word, and advises `to_empty`, which gives whatever
lies in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fzero.errors import FzeroError

_ASKED = "size stride numel nelement dim ndimension element_size storage_offset is_contiguous is_floating_point "
_ASKED += "is_complex is_signed get_device untyped_storage data_ptr requires_grad_ __len__ __hash__ __repr__ __format__"
_DESCRIBES = {vars(torch.Tensor).get(name) or getattr(torch.Tensor, name) for name in _ASKED.split()}
_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}  # properties that are tensors


class Absent(nn.Parameter):
    """A parameter without values, of which shape, dtype, device and requires_grad are there. Immutable.

    Every other use raises FzeroError, which names it and the module. `path` is its name there, `owner` the module's.
    """

    path: str
    owner: str

    def __new__(cls, like: Tensor, path: str, owner: str) -> Absent:
        """One of the shape and dtype of `like`."""
        empty = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta")
        made = super().__new__(cls, empty, like.requires_grad)
        made.path, made.owner = path, owner
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        asked = func in _DESCRIBES or (
            getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")
            and getattr(getattr(func, "__self__", None), "__name__", "") not in _VALUES
        )
        if asked:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise unusable(*_first((args, kwargs or {})))

    def __deepcopy__(self, memo: Any) -> Any:
        raise unusable(self.path, self.owner)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise unusable(self.path, self.owner)


def unusable(path: str, owner: str) -> FzeroError:
    """The error for a use of a module, or of its parameter `path`, whose values the state holds."""
    what = f"{path!r} of {owner} has" if path else f"{owner} has"
    return FzeroError(
        f"{what} no values of its own now: the Trainer's state holds them, in parts. To call the model, to read its "
        "parameters or to generate: with trainer.gathered() as model: model.generate(...). To write it: "
        "trainer.save_model(folder)"
    )


def _first(values: Any) -> tuple[str, str]:
    """(path, owner) of the first absent parameter among nested arguments."""
    pending = [values]
    while pending:
        value = pending.pop(0)
        if isinstance(value, Absent):
            return value.path, value.owner
        if isinstance(value, (tuple, list)):
            pending[:0] = value
        elif isinstance(value, Mapping):
            pending[:0] = value.values()
    return "", "a module"
