"""running_norms: norms that keep running statistics, by torch's own kernels.

cuDNN's kernel writes the statistics, and its schema does not say so (`cudnn_batch_norm`: 2.13.0): a trace would see no
write, and the step would return the old ones. So `F.batch_norm` and `F.instance_norm` are traced without cuDNN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fzero.capture.refuse import REPLACED

FLAG = 8  # the argument of torch.batch_norm and torch.instance_norm that says whether cuDNN may be taken


def _without_cudnn(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.backends.cudnn.flags(enabled=False):
            return fn(*args, **kwargs)

    return called


def _with_flag(fn: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        if "cudnn_enabled" in kwargs:
            return fn(*args, **{**kwargs, "cudnn_enabled": False})
        return fn(*args[:FLAG], False, **kwargs)

    return called


REPLACED.update({fn: _without_cudnn(fn) for fn in (F.batch_norm, F.instance_norm)})
REPLACED.update({fn: _with_flag(fn) for fn in (torch.batch_norm, torch.instance_norm)})
