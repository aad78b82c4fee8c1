"""Stretches by what they share: each reads what it read before, wherever its call lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import helpers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fzero._torch_compat import FakeTensorMode, inductor_rounds
from fzero.codegen import clusters
from fzero.codegen.fusion import fused
from fzero.ir import forms, fx_values

LOW = torch.bfloat16


@pytest.fixture(autouse=True)
def rules_of_a_device() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clusters, "on_device", lambda node: bool(fx_values.tensors(node.meta.get("val"))))
        yield


def square(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


needs_rounding = pytest.mark.skipif(not inductor_rounds("cpu"), reason="this torch rounds to 16 bits at fewer places")


def stretches_keep_the_bits(fn: Callable[..., Any], *inputs: Tensor) -> int:
    """The number of stretches; what is returned and what is written in place are as without them."""
    mode = FakeTensorMode()
    gm = forms.propagate(make_fx(fn)(*[x.clone() for x in inputs]), [mode.from_tensor(x) for x in inputs])
    with_stretches, found = fused(gm, {})
    if with_stretches is None:
        return 0
    with_stretches.graph.lint()
    ours, plain = ([x.clone() for x in inputs] for _ in range(2))
    wanted, got = gm(*plain), with_stretches(*ours)
    assert all(helpers.same_bits(a, b) for a, b in zip([*got, *ours], [*wanted, *plain], strict=True))
    return len(found)


@needs_rounding
def test_a_cast_is_read_before_its_source_is_written() -> None:
    def fn(leaf: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        low = leaf.to(LOW)
        leaf.copy_(torch.tanh(torch.sigmoid(low) * x).float())
        return [torch.exp(torch.relu(low) * y)]

    assert stretches_keep_the_bits(fn, square(0), square(1, LOW), square(2, LOW)) == 1


@needs_rounding
def test_stretches_that_read_a_cast_have_one_each_and_one_of_a_view_is_joined() -> None:
    def apart(leaf: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        low = leaf.to(LOW)
        first = torch.sigmoid(low)
        other = torch.exp(torch.exp(low + y))
        return [torch.tanh(first * x), other]

    def by_a_view(leaf: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        low = leaf.to(LOW)
        first = torch.sigmoid(low)
        other = torch.exp(torch.exp(low + y) * low.view(2, 8).view(4, 4))
        return [torch.tanh(first * x), other]

    def by_both(leaf: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        low = leaf.to(LOW)
        first = torch.sigmoid(low)
        other = torch.exp(low + low.view(2, 8).view(4, 4))
        return [torch.tanh(first * x), other * y]

    inputs = square(0), square(1, LOW), square(2, LOW)
    assert stretches_keep_the_bits(apart, *inputs) == 2
    assert stretches_keep_the_bits(by_a_view, *inputs) == 1
    assert stretches_keep_the_bits(by_both, *inputs) == 1


UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.sin,
    torch.tanh,
    lambda x: x.sum(0, keepdim=True).expand(4, 4),
    lambda x: x.reshape(2, 8).reshape(4, 4),
    lambda x: x.reshape(16)[:4].reshape(4, 1).expand(4, 4),
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [torch.add, torch.mul, lambda a, b: torch.tanh(a @ b)]
WRITE = len(UNARY) + len(BINARY)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, WRITE + 2), st.integers(0, 99), st.integers(0, 99)), min_size=3, max_size=24))
def test_random_graphs_that_cast_and_write_what_they_are_given(steps: list[tuple[int, int, int]]) -> None:
    """All values are 16 bits wide; what is given is not, and is cast where it is read."""

    def fn(*leaves: Tensor) -> list[Tensor]:
        values = [leaves[0].to(LOW)]
        for what, left, right in steps:
            a, b, leaf = values[left % len(values)], values[right % len(values)], leaves[right % len(leaves)]
            if what < len(UNARY):
                values.append(UNARY[what](a))
            elif what < WRITE:
                values.append(BINARY[what - len(UNARY)](a, b))
            elif what == WRITE:
                values.append(leaf.to(LOW))
            elif what == WRITE + 1:
                leaf.copy_(a)
            else:
                leaf.copy_(leaves[left % len(leaves)])
        return values[-3:]

    stretches_keep_the_bits(fn, *(square(n) for n in range(3)))
