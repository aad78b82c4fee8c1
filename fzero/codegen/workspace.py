"""workspace: bytes that a kernel allocates for itself, beyond its operands and results.

The rules are for ATen's CPU kernels: the plan of another machine cannot measure. Each was found by running the op
under the profiler (torch 2.13.0, oneDNN) and comparing the bytes that the allocator saw with the results' bytes. The
ops of common models without a rule were seen to need nothing, or less than a hundredth of their operands.

Three kinds of memory come again and again. A kernel that walks its operand by itself copies an operand that is not
contiguous first (`piece_workspace.COPIES`); BLAS copies a matrix whose rows and columns both lie apart
(`matrix_workspace`); an op that returns a sum keeps its terms (`loss_workspace`). oneDNN's convolutions reorder into
blocked layouts. Operands of another dtype are cast first. Attention keeps a tile per thread. The need of matmuls in 16
bits is not known: oneDNN packs an operand or two.

Ops of fzero have their formula beside them, but for recurrent layers, which stand below the program's graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import fx

from fzero import backend
from fzero._torch_compat import OpOverload
from fzero.codegen import image_workspace, loss_workspace, matrix_workspace, piece_workspace
from fzero.codegen.workspace_parts import Formula
from fzero.ir import fx_nodes, fx_values, op_info
from fzero.ir.op_info import OpInfo
from fzero.recurrent import recurrent_ops as recurrent

aten = torch.ops.aten


def workspace_bytes(node: fx.Node) -> int:
    """Bytes that a node's kernel holds while it runs, on CPU tensors; 0 elsewhere and for ops without a formula."""
    formula = op_info.of(node.target).workspace
    values = (
        fx_values.tensors(node.meta["val"]) or fx_values.tensors(fx_nodes.operand(node).meta["val"]) if formula else []
    )
    if formula is None or not values or not backend.of(values[0].device).on_host:
        return 0
    return formula(node)


def _promoted(node: fx.Node) -> int:
    """Bytes of a pointwise op's casts: it computes in one dtype, and casts operands of another first.

    A complex magnitude is complex first. Numbers and 0-d tensors cost nothing.
    """
    (result, *_) = fx_values.tensors(node.meta["val"]) or [fx_nodes.operand(node).meta["val"]]
    values = [a.meta["val"] for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    if node.target is aten.where.self:
        values = [v for v in values if v.dtype is not torch.bool]
    if not values:
        return 0
    common = functools.reduce(torch.promote_types, (v.dtype for v in values if v.dim()), result.dtype)
    if result.dtype is torch.bool:
        common = functools.reduce(torch.promote_types, (v.dtype for v in values if v.dim()), torch.bool)
    cast = [result] if common.is_complex and not result.dtype.is_complex and result.dtype is not torch.bool else []
    return sum(v.numel() * common.itemsize for v in [*values, *cast] if v.dim() and v.dtype is not common)


def _recurrent(count: Callable[..., int]) -> Formula:
    return lambda node: count(*fx.node.map_arg(node.args, lambda n: n.meta["val"]))


def _default(op: OpOverload, row: OpInfo) -> Formula | None:
    atens = op.namespace == "aten" or row.out_form.startswith("aten.")
    return _promoted if atens and torch.Tag.pointwise in op.tags else None


for kind in (matrix_workspace, image_workspace, loss_workspace, piece_workspace):
    op_info.fill("workspace", kind.FORMULAS)
op_info.fill(
    "workspace",
    {
        recurrent.FORWARD: _recurrent(recurrent.scratch_bytes),
        recurrent.BACKWARD: _recurrent(recurrent.backward_scratch_bytes),
    },
)
op_info.default("workspace", _default)
