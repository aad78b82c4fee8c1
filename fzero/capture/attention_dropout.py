"""attention_dropout: attention that drops some of its weights, by products.

A device's fused kernels draw from a generator of their own, which no key decides (`_scaled_dot_product_*_attention`:
2.13.0). As products, which the processor takes anyway, the draws are those of `fzero.random`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fzero.capture.refuse import REPLACED

DROPPED, OF_LAYERS = 4, inspect.signature(F.multi_head_attention_forward)  # the place of `dropout_p`; the arguments


def _by_products(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not (kwargs.get("dropout_p") or (len(args) > DROPPED and args[DROPPED])):
            return fn(*args, **kwargs)
        with sdpa_kernel(SDPBackend.MATH):
            return fn(*args, **kwargs)

    return called


def _layers_by_products(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        given = OF_LAYERS.bind(*args, **kwargs)
        given.apply_defaults()
        if not (given.arguments["training"] and given.arguments["dropout_p"]):
            return fn(*args, **kwargs)
        with sdpa_kernel(SDPBackend.MATH):
            return fn(*args, **kwargs)

    return called


REPLACED[F.scaled_dot_product_attention] = _by_products(F.scaled_dot_product_attention)
REPLACED[F.multi_head_attention_forward] = _layers_by_products(F.multi_head_attention_forward)
