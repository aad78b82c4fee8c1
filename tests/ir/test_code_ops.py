"""The codecs as ops: what they are to the judge, to the planner of memory, and to a graph that is spelled out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fzero._torch_compat import FakeTensorMode
from fzero.codegen.workspace import workspace_bytes
from fzero.cost.allocator import measured_peak
from fzero.ir.code_ops import OPS, CodeOps, coded, spelled_out
from fzero.ir.op_info import of
from fzero.ir.recorder import record
from fzero.kernels.codecs import CODECS, decode, decode_sum, encode

ALL = pytest.mark.parametrize("name", CODECS)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def call(target: Any, *args: Any) -> fx.Node:
    """A node of an op with these arguments, and its fake result."""
    graph = fx.Graph()
    holders = [graph.placeholder(f"x{i}") if isinstance(a, Tensor) else a for i, a in enumerate(args)]
    node = graph.call_function(target, tuple(holders))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
        node.meta["val"] = target(*fakes)
    for holder, fake in zip(holders, fakes, strict=True):
        if isinstance(holder, fx.Node):
            holder.meta["val"] = fake
    return node


@ALL
def test_ops_are_the_functions_of_the_codec(name: str) -> None:
    ops, codec, x = OPS[name], CODECS[name], randn(5, 13)
    message = ops.encode(x)
    assert torch.equal(message, encode(x.flatten(), codec))
    assert torch.equal(ops.decode(message)[:65], decode(message, 65, codec))
    assert torch.equal(ops.coded(x), decode(message, 65, codec).view(5, 13))
    messages = torch.stack([message, ops.encode(-2 * x)])
    assert torch.equal(ops.decode_sum(messages, 3), decode_sum(messages, 3, codec))


@ALL
def test_out_forms_write_where_they_are_told(name: str) -> None:
    ops, x = OPS[name], randn(130)
    message = ops.encode(x)
    for op, args in ((ops.encode, (x,)), (ops.decode, (message,)), (ops.decode_sum, (message[None].repeat(3, 1), 3))):
        wanted = op(*args)
        room = torch.full((wanted.numel() + 64,), 7, dtype=wanted.dtype)
        out = getattr(op.overloadpacket, "out")  # noqa: B009
        assert out(*args, out=room[32:-32]).data_ptr() == room[32:].data_ptr()
        assert torch.equal(room[32:-32], wanted)
        assert bool((room[:32] == 7).all())
        assert bool((room[-32:] == 7).all())


@ALL
@pytest.mark.parametrize("size", [64, 4096, 131_072, 300_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_workspace_is_what_the_allocator_gives(name: str, size: int, dtype: torch.dtype) -> None:
    ops, x = OPS[name], randn(size, dtype=dtype)
    message = ops.encode(x)
    messages = torch.stack([message] * 3)
    ops.decode(message)  # a table is made once
    for op, *args in ((ops.encode, x), (ops.decode, message), (ops.decode_sum, messages, 3)):
        node = call(op, *args)
        result, peak = measured_peak(lambda op=op, args=args: op(*args))
        assert tuple(node.meta["val"].shape) == tuple(result.shape)
        said = result.numel() * result.element_size() + workspace_bytes(node)
        assert -0.01 * peak - 256 <= said - peak <= 0.05 * peak + 1024, (op, said, peak)


@ALL
def test_a_graph_spelled_out_has_the_same_bits(name: str) -> None:
    x = randn(6, 50)
    with FakeTensorMode() as mode:
        gm = record(lambda x: [coded(x, name).sum(0), x * 2], [mode.from_tensor(x)])
    made = spelled_out(gm)
    targets = [node.target for node in made.graph.nodes]
    ops = OPS[name]
    assert ops.coded not in targets
    assert ops.encode in targets
    assert ops.decode in targets
    for got, wanted in zip(made(x), gm(x), strict=True):
        assert torch.equal(got, wanted)
    assert spelled_out(made) is made


def test_what_the_judge_is_told() -> None:
    ops: CodeOps = OPS["int4"]
    assert str(ops.per) == "16/9"
    assert of(ops.encode).blockwise == ((1,), (ops.per,))
    assert of(ops.decode).blockwise == ((ops.per,), (1,))
    assert of(ops.decode_sum).of_ranks
    assert not of(ops.decode).of_ranks
