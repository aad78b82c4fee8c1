"""cast_before_gather: what is gathered of a parameter that every use casts. Its text is in test_goldens."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import cases
import torch
from naive_steps import written
from passed import upto

import fzero
from fzero.ir import fx_nodes
from fzero.ir.code_ops import OPS
from fzero.ir.program import wire_bytes
from fzero.passes.cast_before_gather import _nbytes


def test_of_two_forms_of_a_leaf_the_one_of_fewer_bytes_is_gathered() -> None:
    """An element of a block of 64 in 8 bits takes one byte, and a 16th for the block's number."""
    assert [_nbytes(form) for form in (torch.float32, torch.bfloat16)] == [4, 2]
    assert _nbytes(OPS["int8"]) == Fraction(17, 16) < _nbytes(torch.bfloat16)


def test_casts_before_the_gather_halve_what_is_gathered() -> None:
    wide, low = (cases.lowered(loss=loss).program for loss in (cases.layers_loss, cases.bf16_loss))
    gathered = [sum(wire_bytes(p, op) for op in p.ops if op.gathers) for p in (wide, low)]
    assert gathered[1] * 2 == gathered[0]


def test_a_mixed_use_is_gathered_as_it_is() -> None:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return cases.bf16_loss(params, x) + sum((p**2).sum() for p in fzero.tree.flatten(params)[1])

    program = cases.lowered(loss=loss).program
    assert all(program.buffers[op.writes[0].name].dtype == torch.float32 for op in program.ops if op.gathers)


def test_codes_of_a_bucket_are_made_leaf_by_leaf() -> None:
    """Of as many elements as each has: blocks begin anew with it."""

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ params["layers"]["0"]["a"] @ params["layers"]["0"]["b"]).square().mean()

    leaves = {"layers": {"0": {"a": torch.empty(8, 64, device="meta"), "b": torch.empty(64, 32, device="meta")}}}
    spec = cases.spec(loss=loss, zero=3, precision=fzero.Precision(gather="int8"))
    program = upto("cast_before_gather", written(spec, leaves, cases.batch(), 2).program)
    (codes,) = (op for op in program.ops if op.why == "int8 before the gather")
    shapes = [x.meta["val"].numel() for x in fx_nodes.placeholders(program.segments[codes.segment].graph)]
    assert shapes[:2] == [8 * 64, 64 * 32]
    assert [(ref.start, ref.stop) for ref in codes.reads] == [(0, 512), (512, 512 + 2048)]
