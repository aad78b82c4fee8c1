"""code_ops: the codecs of messages (`fzero.kernels.codecs`) as ops: `fzero::encode_int8`, and so for each codec.

`encode` makes the message (uint8, 1-D) of a tensor of any shape (`counts`: as in `codecs.encode`); `decode` the float32
elements of whole blocks; `decode_sum` those of the messages of several ranks (rows), added in the order of ranks and
divided once. `coded` is
what a tensor is after both, in its shape: the form in which a loss is captured, until `spelled_out` writes it as the
others. It has no gradient of its own: what it rounds off is passed over (straight-through).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from fzero._torch_compat import OpOverload, graph_module
from fzero.ir import fx_nodes, op_info
from fzero.ir.leafwise import LeafCall, leafwise
from fzero.ir.op_info import OpInfo
from fzero.kernels import codecs
from fzero.kernels.codecs import BLOCK, CODECS, BlockCodec

_LIBRARY = torch.library.Library("fzero", "FRAGMENT")


@dataclass(frozen=True)
class CodeOps:
    """The ops of a codec. per: elements of a tensor for each byte of its message."""

    codec: BlockCodec
    encode: OpOverload
    decode: OpOverload
    decode_sum: OpOverload
    coded: OpOverload

    @property
    def name(self) -> str:
        return self.codec.name

    @property
    def feedback(self) -> bool:
        return self.codec.feedback

    @property
    def per(self) -> Fraction:
        return Fraction(BLOCK, self.codec.block_bytes)


def _define(name: str, schema: str, fake: Callable[..., Tensor], run: Callable[..., Any], tags: Any = ()) -> OpOverload:
    """`fzero::<name>`, and its `out=` form where `run` takes one."""
    arguments, _, result = schema.partition(" -> ")
    _LIBRARY.define(f"{name}({arguments}) -> {result}", tags=tags)
    torch.library.register_fake(f"fzero::{name}", fake, lib=_LIBRARY)
    torch.library.impl(f"fzero::{name}", "CompositeExplicitAutograd", run, lib=_LIBRARY)
    if not tags:
        _LIBRARY.define(f"{name}.out({arguments}, *, Tensor(a!) out) -> Tensor(a!)")
        torch.library.impl(f"fzero::{name}.out", "CompositeExplicitAutograd", run, lib=_LIBRARY)
    op: OpOverload = getattr(torch.ops.fzero, name).default
    return op


def _ops_of(codec: BlockCodec) -> CodeOps:
    def encode(x: Tensor, counts: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        return codecs.encode(x.reshape(-1), codec, None if counts is None else counts.reshape(-1), out)

    def decode(message: Tensor, *, out: Tensor | None = None) -> Tensor:
        return codecs.decode_blocks(message, codec, out)

    def decode_sum(messages: Tensor, divisor: int, *, out: Tensor | None = None) -> Tensor:
        return codecs.decode_sum(messages, divisor, codec, out)

    def coded(x: Tensor) -> Tensor:
        return codecs.decode(encode(x), x.numel(), codec).view(x.shape)

    def message(x: Tensor, counts: Tensor | None = None) -> Tensor:
        return x.new_empty((codecs.message_bytes(x.numel(), codec),), dtype=torch.uint8)

    def blocks(message: Tensor, *_: int) -> Tensor:
        size = message.shape[-1] // codec.block_bytes * BLOCK
        return message.new_empty((size,), dtype=torch.float32)

    name = codec.name
    made = CodeOps(
        codec,
        _define(f"encode_{name}", "Tensor x, Tensor? counts=None -> Tensor", message, encode),
        _define(f"decode_{name}", "Tensor message -> Tensor", blocks, decode),
        _define(f"decode_sum_{name}", "Tensor messages, int divisor -> Tensor", blocks, decode_sum),
        _define(
            f"coded_{name}", "Tensor x -> Tensor", lambda x: x.new_empty(x.shape, dtype=torch.float32), coded,
            (torch.Tag.pointwise,),
        ),
    )  # fmt: skip

    def encoding(node: fx.Node) -> int:
        source = fx_nodes.operand(node).meta["val"]
        tail = BLOCK * 8 if source.numel() % BLOCK else 0
        return codecs.encode_scratch(source.numel(), codec, source.dtype) + tail

    def decoding(node: fx.Node) -> int:
        messages = fx_nodes.operand(node).meta["val"]
        return codecs.decode_scratch(node.meta["val"].numel(), codec, messages.shape[0] if messages.ndim > 1 else 1)

    plain = OpInfo(blockwise=((made.per,), (1,)), workspace=decoding, out_form="call")
    op_info.add(made.encode, replace(plain, blockwise=((1,), (made.per,)), workspace=encoding))
    op_info.add(made.decode, plain)
    op_info.add(made.decode_sum, replace(plain, of_ranks=True))
    return made


OPS: dict[str, CodeOps] = {name: _ops_of(codec) for name, codec in CODECS.items()}
_CODED = {ops.coded: ops for ops in OPS.values()}
CODES: dict[Any, CodeOps] = {op: ops for ops in OPS.values() for op in (ops.encode, ops.decode, ops.decode_sum)}
ENCODES = frozenset(ops.encode for ops in OPS.values())


def coded(x: Tensor, name: str) -> Tensor:
    """What a tensor is once it was encoded and decoded: float32, of its shape.

    >>> coded(torch.tensor([7.0, -3.2]), "int4")
    tensor([ 7., -3.])
    """
    result: Tensor = OPS[name].coded(x)
    return result


def encode_leaves(ops: CodeOps, dtype: torch.dtype, sizes: Sequence[int]) -> fx.GraphModule:
    """The segment that makes the messages of several leaves of so many elements, each a range of a bucket."""
    source, message = torch.empty(0, dtype=dtype), torch.empty(0, dtype=torch.uint8)
    return leafwise([
        LeafCall(ops.encode, source, message, size, gives=codecs.message_bytes(size, ops.codec)) for size in sizes
    ])  # fmt: skip


def spelled_out(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with each `coded` as the message, its elements, and a view of those; itself where there is none."""
    if not any(node.target in _CODED for node in gm.graph.nodes):
        return gm
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.target in _CODED:
            env[node] = _spelled(graph, _CODED[node.target], env[fx_nodes.operand(node)], node)
        else:
            env[node] = fx_nodes.copy_node(graph, node, env.__getitem__)
    return graph_module(graph)


def _spelled(graph: fx.Graph, ops: CodeOps, source: fx.Node, like: fx.Node) -> fx.Node:
    """The nodes of a codec's `coded` of a value."""
    shape, node = tuple(like.meta["val"].shape), source
    size = like.meta["val"].numel()
    for target, *args in (
        (ops.encode,),
        (ops.decode,),
        (torch.ops.aten.slice.Tensor, 0, 0, size),
        (torch.ops.aten.view.default, list(shape)),
    ):
        value = node.meta["val"]
        node = graph.call_function(target, (node, *args))
        node.meta = {**like.meta, "val": target(value, *args)}
    return node
