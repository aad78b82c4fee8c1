"""host_values: `x.numpy()`, `np.asarray(x)` and `x.tolist()` of values that no input decides.

They read memory and are no ops, so that a trace sees none of it: torch hands out that of a fake tensor, which is not
there. The known value is read instead, as by `x.item()`: a later change in place is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fzero._torch_compat import is_fake, unwatched
from fzero.capture import context
from fzero.capture.refuse import REPLACED


def _of_known(read: Callable[..., Any]) -> Callable[..., Any]:
    """A method that reads memory, of a known value."""

    def fn(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        tracing = context.active()
        value = None if tracing is None else tracing.known.on_host(tensor)
        if value is None and is_fake(tensor):
            return read(tensor, *args, **kwargs)  # which refuses it
        with unwatched():
            return read(tensor if value is None else value, *args, **kwargs)

    return fn


REPLACED.update({read: _of_known(read) for read in (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__)})
