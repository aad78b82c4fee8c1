"""attention_dropout: attention that drops some of its weights, by products.

A device's fused kernels draw from a generator of their own, which no key decides (`_scaled_dot_product_*_attention`:
2.13.0). As products, which the processor takes anyway, the draws are those of `fzero.random`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fzero.capture.refuse import REPLACED

LAYERS = inspect.signature(F.multi_head_attention_forward)


def _by_products(fn: Callable[..., Any], drops: Callable[..., bool]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH) if drops(*args, **kwargs) else nullcontext():
            return fn(*args, **kwargs)

    return called


def _attention_drops(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any
) -> bool:
    return dropout_p > 0


def _layers_drop(*args: Any, **kwargs: Any) -> bool:
    given = LAYERS.bind(*args, **kwargs)
    given.apply_defaults()
    return bool(given.arguments["training"]) and given.arguments["dropout_p"] > 0


REPLACED[F.scaled_dot_product_attention] = _by_products(F.scaled_dot_product_attention, _attention_drops)
REPLACED[F.multi_head_attention_forward] = _by_products(F.multi_head_attention_forward, _layers_drop)
