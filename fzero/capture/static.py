"""static: a leaf of a batch that decides the program. The loss reads its value; another value is another program."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fzero.errors import TreeError
from fzero.ir.records import DTYPE_NAMES

MOST = 1 << 16  # elements of a tensor: it is compared when it is marked, and shown to all ranks at each step
_SHOWN = 16  # elements that a message shows
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class Static:
    """What `static` makes. Two are equal if their values have the same type, form and bits.

    value: what the loss reads. text: what tells it from others, in messages and in the key of a program.
    """

    value: Any = field(compare=False)
    text: str

    def __repr__(self) -> str:
        return self.text


def static(value: Any) -> Static:
    """Marks a leaf of the batch: the loss reads this very value while it is traced, so it may decide the program.

    value: an int, float, bool, str, bytes or None, or a tuple or list of them (read as a tuple); or a tensor or array
    of at most 65,536 elements, of which a copy is kept. A tensor's values may be asked for (`if`, `.item()`,
    `x[mask]`, `range`). It is one value for the whole batch, the same on all ranks; microbatches do not cut it.

    A step of a value that was seen before runs the program of that value. Another value is traced, and 32 programs are
    kept, so mark what has few values. Raises TreeError for another value.

    >>> import fzero
    >>> def loss(params, batch):
    ...     x = batch["x"]
    ...     for _ in range(batch["turns"]):
    ...         x = torch.tanh(x @ params["w"])
    ...     return x[:, batch["kept"]].square().mean()
    >>> spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    >>> state = fzero.init({"w": torch.eye(3)}, spec)
    >>> for turns in (1, 2, 1):
    ...     kept = torch.tensor([True, False, True])
    ...     state = fzero.step(state, {"x": torch.ones(2, 3), "turns": static(turns), "kept": static(kept)})
    >>> state.step, static((3, 5)), static(kept)
    (3, static((3, 5)), static(bool[3] [True, False, True]))
    """
    if isinstance(value, Static):
        return value
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    value = _plain(value)
    return Static(value, f"static({value!r})")


def opened(leaf: Any) -> Any:
    """The value that the loss reads for a leaf of the batch."""
    return leaf.value if isinstance(leaf, Static) else leaf


def _plain(value: Any) -> Any:
    """The value, sequences as tuples and numpy's numbers as Python's."""
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _PLAIN:
        return value
    if type(value) in (list, tuple):
        return tuple(map(_plain, value))
    raise TreeError(
        f"fzero.static of a {type(value).__name__}: needed an int, float, bool, str, bytes or None, a tuple of them, "
        "or a tensor. Mark the leaves of a dict one by one"
    )


def _of_tensor(value: torch.Tensor) -> Static:
    form = f"{DTYPE_NAMES.get(value.dtype, str(value.dtype))}{list(value.shape)}"
    if value.layout is not torch.strided or value.is_meta or value.dtype not in DTYPE_NAMES:
        raise TreeError(f"fzero.static of a tensor of {value.layout} and {value.dtype} on {value.device}: needed a "
                        f"dense one with values, of {', '.join(DTYPE_NAMES.values())}")  # fmt: skip
    if value.numel() > MOST:
        raise TreeError(
            f"fzero.static of {form}: needed at most {MOST:,} elements, for each value is a program of its own. Pass "
            "a tensor whose values do not decide the program as it is"
        )
    with torch.no_grad():
        kept = value.detach().clone(memory_format=torch.contiguous_format)
    raw = kept.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    shown = f"#{hashlib.blake2b(raw, digest_size=8).hexdigest()}" if kept.numel() > _SHOWN else f"{kept.tolist()}"
    return Static(kept, f"static({form} {shown})")
