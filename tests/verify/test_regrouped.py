"""Two graphs that add in another order are one; a term left out, doubled or taken through another view is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fzero.errors import VerifyError
from fzero.verify.regrouped import check_regrouped

aten = torch.ops.aten
X, W, B = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)


def graph(fn: Callable[..., Tensor], bias: Tensor = B) -> fx.GraphModule:
    gm: Any = make_fx(lambda *xs: [fn(*xs)], tracing_mode="fake")(X, W, bias)
    return gm


def captured(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return ((x + x @ w) + x.sin() @ w) + aten.addmm(b, x.cos(), w).view(2, 2, 8).view(4, 8)


def narrow(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return ((x.bfloat16() + w[:4].bfloat16()) + b.bfloat16()).float() + x


SAME = {
    "itself": captured,
    "another order": lambda x, w, b: (x.sin() @ w + x @ w) + (x + aten.addmm(b, x.cos(), w).view(2, 2, 8).view(4, 8)),
    "the bias apart": lambda x, w, b: ((x + x @ w) + x.sin() @ w) + ((x.cos() @ w).view(2, 2, 8) + b).view(4, 8),
}
OTHER = {
    "left out": lambda x, w, b: (x + x @ w) + aten.addmm(b, x.cos(), w).view(2, 2, 8).view(4, 8),
    "doubled": lambda x, w, b: captured(x, w, b) + x,
    "another product": lambda x, w, b: ((x + x @ w) + x.sin() @ w.t()) + aten.addmm(b, x.cos(), w),
    "another bias": lambda x, w, b: ((x + x @ w) + x.sin() @ w) + ((x.cos() @ w).view(2, 2, 8) + b.sin()).view(4, 8),
}


@pytest.mark.parametrize("name", SAME)
def test_another_order_is_accepted(name: str) -> None:
    check_regrouped(graph(captured), graph(SAME[name]))


@pytest.mark.parametrize("name", OTHER)
def test_another_meaning_is_refused(name: str) -> None:
    with pytest.raises(VerifyError, match="is not what was captured"):
        check_regrouped(graph(captured), graph(OTHER[name]))


def test_a_bias_of_rows_does_not_go_through_a_view() -> None:
    rows = torch.randn(4, 1)
    before = graph(lambda x, w, b: aten.addmm(b, x, w).view(8, 4), rows)
    after = graph(lambda x, w, b: (x @ w).view(8, 4) + b.view(4), rows)
    with pytest.raises(VerifyError):
        check_regrouped(before, after)


def test_a_sum_that_was_rounded_is_not_taken_apart() -> None:
    def wide(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return (x.bfloat16() + (w[:4].bfloat16() + b.bfloat16())).float() + x

    check_regrouped(graph(narrow), graph(wide))  # bf16 sums in another order
    with pytest.raises(VerifyError):
        check_regrouped(graph(narrow), graph(lambda x, w, b: x.bfloat16() + (w[:4].bfloat16() + b.bfloat16()) + x))
