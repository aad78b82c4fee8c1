"""Operands of several dtypes: what eager PyTorch refuses is refused at its line, and what it takes is taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fzero
from fzero import optim
from fzero.capture import mixed_dtypes
from fzero.errors import CaptureError

aten = torch.ops.aten
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PLACES = torch.tensor([0, 1])
CLASSES = torch.zeros(6, dtype=torch.long)


def written_rows(w: Tensor, b: Tensor) -> Tensor:
    x = w * 1
    x[PLACES] = b[:2]
    return x


def written_row(w: Tensor, b: Tensor) -> Tensor:
    x = w * 1
    x[1] = b[0]
    return x


MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_put_": written_rows,
    "index_add": lambda w, b: torch.index_add(w, 0, PLACES, b[:2]),
    "index_copy": lambda w, b: torch.index_copy(w, 0, PLACES, b[:2]),
    "nll_loss_forward": lambda w, b: F.cross_entropy(w, CLASSES, weight=b[0].abs()),
    "binary_cross_entropy": lambda w, b: F.binary_cross_entropy(w[:4].sigmoid(), b.sigmoid()),
    "_cdist_forward": torch.cdist,
    "linalg_cross": lambda w, b: torch.linalg.cross(w[:4], b),
    "mm": lambda w, b: w @ b.mT,
    "native_layer_norm": lambda w, b: F.layer_norm(w, (3,), b[0]),
    "native_batch_norm": lambda w, b: F.batch_norm(w, b[0], b[1].abs(), w[0], w[1]),
}


def filled(w: Tensor, b: Tensor) -> Tensor:
    x = w * 1
    x[x > 0] = b.sum()
    return x


TAKEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a row": written_row,
    "a mask": filled,
    "a sum": lambda w, b: w[:4] + b,
    "a choice": lambda w, b: torch.where(b > 0, w[:4], b),
}


def lowered(make: Callable[[Tensor, Tensor], Tensor], batch: Tensor) -> None:
    spec = fzero.Spec(loss=lambda p, b: make(p["w"], b).sum(), optimizer=optim.sgd(0.1))
    fzero.lower(spec, {"w": torch.ones(6, 3)}, batch)


@pytest.mark.parametrize("name", MIXED)
def test_what_eager_refuses_is_refused_at_its_line(name: str) -> None:
    """The complaint: a raw RuntimeError when the step ran, without a line."""
    batch = torch.rand(4, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        MIXED[name](torch.ones(6, 3), batch)
    with pytest.raises(
        CaptureError, match=rf"aten\.{name}\.\w+ at test_mixed_dtypes\.py:\d+ is given f32\[.* and f64\["
    ):
        lowered(MIXED[name], batch)
    lowered(MIXED[name], batch.float())


@pytest.mark.parametrize("name", TAKEN)
def test_what_eager_takes_is_taken(name: str) -> None:
    batch = torch.rand(4, 3, dtype=torch.float64)
    TAKEN[name](torch.ones(6, 3), batch)
    lowered(TAKEN[name], batch)


def test_norms_are_refused_where_eager_refuses_them() -> None:
    """Every dtype of values, weights, biases and statistics."""
    differing = []
    for dtype, weight, bias in itertools.product(FLOATS, (*FLOATS, None), (*FLOATS, None)):
        x, w, b = torch.randn(2, 4, 3).to(dtype), column(weight, 4), column(bias, 4)
        row, rows = column(weight, 3), column(bias, 3)
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (aten.native_layer_norm.default, (x, [3], row, rows, 1e-5)),
            (aten.native_group_norm.default, (x, w, b, 2, 4, 3, 2, 1e-5)),
        ]
        for statistics, training in itertools.product((weight, torch.float32, dtype), (False, True)):
            own = column(statistics, 4)
            if own is not None:
                calls += [(aten.native_batch_norm.default, (x, w, b, own, own.clone(), training, 0.1, 1e-5))]
        differing += [
            (op, dtype, weight, bias) for op, args in calls if (mixed_dtypes.why(op, args) == "") != runs(op, args)
        ]
    assert differing == []


def column(dtype: torch.dtype | None, size: int) -> Tensor | None:
    return None if dtype is None else torch.ones(size, dtype=dtype)


def runs(op: Any, args: tuple[Any, ...]) -> bool:
    try:
        with torch.backends.mkldnn.flags(enabled=False):  # as BatchNorm is captured
            op(*args)
    except RuntimeError:
        return False
    return True
