"""coded_sums: a sum over ranks in messages of blocks is the sum of what the ranks say. Every rank is run, node by
node."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorded import graph_of
from torch import Tensor, fx

from fzero.kernels.codecs import CODECS, decode, decode_sum, encode
from fzero.shard import ops
from fzero.shard.coded_sums import coded_sums

aten = torch.ops.aten


def over_ranks(gm: fx.GraphModule, inputs: list[Tensor]) -> list[Tensor]:
    """The result on every rank, node by node; `inputs`: of each rank."""
    values: list[dict[fx.Node, Any]] = []
    for x in inputs:
        values.append({node: x for node in gm.graph.nodes if node.op == "placeholder"})
    n = len(inputs)
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        given = [fx.node.map_arg(node.args, own.__getitem__) for own in values]
        if node.target in ops.TRANSFERS:
            held = [args[0] for args in given]
            for rank, own in enumerate(values):
                if node.target is ops.ALL_TO_ALL:
                    moved = torch.stack([x.reshape(n, -1)[rank] for x in held])
                elif node.target is ops.ALL_GATHER:
                    moved = torch.cat([x.reshape(-1) for x in held])
                else:
                    total = sum(held[1:], held[0])
                    moved = total.reshape(n, -1)[rank] if node.target is ops.REDUCE_SCATTER else total
                own[node] = moved.reshape(node.meta["val"].shape)
        else:
            for own, args in zip(values, given, strict=True):
                own[node] = node.target(*args, **node.kwargs)
    (result,) = next(node for node in gm.graph.nodes if node.op == "output").args[0]
    return [own[result] for own in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 64), (3, 70), (6, 128)])
@pytest.mark.parametrize("scatters", [True, False])
def test_a_sum_in_codes_is_that_of_what_ranks_say(scatters: bool, shape: tuple[int, int], dtype: torch.dtype) -> None:
    n, how = 3, CODECS["int8"]
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(n)]

    def fn(x: Tensor) -> Tensor:
        if scatters:
            return ops.REDUCE_SCATTER(x, "tp", n, [shape[0] // n, shape[1]])
        return ops.ALL_REDUCE(x, "tp", n, "sum")

    gm = graph_of(fn, inputs[0])
    made = coded_sums(gm, "int8")
    assert made is not gm
    kinds = [ops.TRANSFERS[node.target] for node in made.graph.nodes if node.target in ops.TRANSFERS]
    assert kinds == (["all_to_all"] if scatters else ["all_to_all", "all_gather"])
    moved = [node for node in made.graph.nodes if node.target in ops.TRANSFERS]
    assert {node.args[0].meta["val"].dtype for node in moved} == {torch.uint8}
    over = {node.args[1:3] for node in moved}
    assert over == {("tp", n)}
    part = -(-(inputs[0].numel() // n) // 64) * 64 if scatters else -(-inputs[0].numel() // (64 * n)) * 64
    fits = part * n == inputs[0].numel()
    calls = [node.target for node in made.graph.nodes]
    assert [calls.count(op) for op in (aten.constant_pad_nd.default, aten.slice.Tensor)] == [int(not fits)] * 2
    padded = [_padded(x.reshape(-1), n, part, scatters) for x in inputs]
    sums = [decode_sum(torch.stack([encode(p[rank], how) for p in padded]), 1, how) for rank in range(n)]
    for rank, found in enumerate(over_ranks(made, inputs)):
        if scatters:
            wanted = sums[rank][: inputs[0].numel() // n].view(-1, shape[1])
        else:
            wanted = torch.cat([decode(encode(x, how), part, how) for x in sums])[: inputs[0].numel()].view(shape)
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted.to(dtype), rtol=1e-5, atol=1e-5)


def _padded(x: Tensor, n: int, part: int, scatters: bool) -> Tensor:
    """By rank, what it gets of a value: of each slice, or of the whole, zeros behind it."""
    if scatters:
        return F.pad(x.view(n, -1), (0, part - len(x) // n))
    return F.pad(x, (0, n * part - len(x))).view(n, part)


@pytest.mark.parametrize(
    ("x", "how"),
    [
        (torch.zeros(128), "sum"), (torch.zeros(4, 63), "sum"), (torch.zeros(4, 64, dtype=torch.float64), "sum"),
        (torch.zeros(4, 64), "max"),
    ],
)  # fmt: skip
def test_what_is_small_or_no_sum_stays(x: Tensor, how: str) -> None:
    gm = graph_of(lambda x: ops.ALL_REDUCE(x, "tp", 2, how), x)
    assert coded_sums(gm, "int8") is gm
