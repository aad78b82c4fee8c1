"""write_in_place: when a result may be written where it goes as it is made, and not copied there at the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fzero._torch_compat import FakeTensorMode
from fzero.ir.recorder import record
from fzero.passes.write_in_place import _kernels

aten = torch.ops.aten


def copied(fn: Any, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """A segment that copies fn's result into its last input."""

    def body(*xs: Tensor) -> list[Tensor]:
        xs[-1].copy_(fn(*xs[:-1]))
        return []

    with FakeTensorMode():
        gm = record(body, [*(torch.empty(shape) for shape in shapes[:-1]), torch.empty(shapes[-1], dtype=dtype)])
    return gm


def calls(gm: fx.GraphModule) -> list[str]:
    return [str(node.target).removeprefix("aten.") for node in gm.graph.nodes if node.op == "call_function"]


SQUARE = ((4, 4),) * 3


@pytest.mark.parametrize(
    ("fn", "aliases", "direct"),
    [
        (torch.mm, {}, True),  # into a buffer that nothing here reads
        (torch.mm, {2: 0}, False),  # over an operand: a product reads it all the time
        (torch.add, {2: 0}, True),  # element by element
        (torch.add, {2: -1}, False),  # what it overlaps with is none of the operands
        (lambda x, y: torch.add(x, y) + 0 * x, {2: 0}, True),  # the last reader of x
    ],
)
def test_a_result_is_written_over_what_nobody_reads_any_more(fn: Any, aliases: dict[int, int], direct: bool) -> None:
    gm = copied(fn, *SQUARE)
    made = _kernels(gm, 2, aliases)
    assert ("copy_.default" not in calls(made)) == direct
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    wanted = fn(x, y)
    into = x if aliases.get(2) == 0 else torch.zeros(4, 4)
    made(x, y, into)
    torch.testing.assert_close(into, wanted)


def test_an_operand_that_is_read_later_is_not_overwritten() -> None:
    def body(x: Tensor, y: Tensor, into: Tensor, other: Tensor) -> list[Tensor]:
        total = x + y
        product = total * x
        into.copy_(total)
        other.copy_(product)
        return []

    with FakeTensorMode():
        gm = record(body, [torch.empty(3) for _ in range(4)])
    made = _kernels(gm, 2, {2: 0})
    x, y, other = torch.randn(3), torch.randn(3), torch.zeros(3)
    wanted = x + y, (x + y) * x
    made(x, y, x, other)
    assert torch.equal(x, wanted[0])
    assert torch.equal(other, wanted[1])


@pytest.mark.parametrize(("shape", "dtype"), [((4, 4), torch.float64), ((2, 4, 4), torch.float32)])
def test_a_copy_that_casts_or_repeats_stays(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gm = copied(torch.add, (4, 4), (4, 4), shape, dtype=dtype)
    assert "copy_.default" in calls(_kernels(gm, 2, {}))
