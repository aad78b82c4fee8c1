"""Casts of mixed precision where nothing is gathered or sent: once a column, and in the update. Bits are those of plain
torch, which casts each leaf, takes gradients in bf16, casts them and updates with aten's fused AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import fzero
from fzero.compile.lowered import Lowered
from fzero.errors import VerifyError
from fzero.ir import fx_nodes
from fzero.ir.program import Program

WIDE = 600  # 360,000 elements of a leaf: the update runs in two tiles
ADAMW = fzero.optim.adamw(1e-2, weight_decay=0.1)


def loss(params: Any, x: Any) -> Any:
    return torch.tanh(torch.tanh(x @ params["a"]) @ params["b"]).float().square().mean()


def data() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(WIDE, WIDE, generator=generator) / 25 for name in "ab"}
    return params, torch.randn(4, WIDE, generator=generator).bfloat16()


def spec(**given: Any) -> fzero.Spec:
    return fzero.Spec(**{"loss": loss, "optimizer": ADAMW, "precision": "bf16", **given})


def lowered(**given: Any) -> Lowered:
    params, x = data()
    x = x.float() if given.get("precision") == "fp32" else x
    return fzero.lower(spec(**given), params, x, world_size=given.get("mesh", {"dp": 1})["dp"])


@pytest.mark.parametrize("zero", [0, 3])
def test_bits_of_plain_torch(zero: int) -> None:
    params, x = data()
    state = fzero.init(params, spec(zero=zero))
    plain = {name: value.clone().requires_grad_() for name, value in params.items()}
    optimizer = torch.optim.AdamW(plain.values(), lr=1e-2, weight_decay=0.1, fused=True)
    for _ in range(3):
        state = fzero.step(state, x)
        low = {name: value.detach().bfloat16().requires_grad_() for name, value in plain.items()}
        loss(low, x).backward()
        for name, value in plain.items():
            value.grad = low[name].grad.float()
        optimizer.step()
    for name, value in fzero.unshard(state.params).items():
        assert torch.equal(value, plain[name]), name


def casts(program: Program) -> list[str]:
    """What casts a whole leaf or a column, by the reason of its op."""
    return [
        str(op.why)
        for op in program.ops
        if op.segment
        for node in program.segments[op.segment].graph.nodes
        if fx_nodes.op_name(node) == "_to_copy" and node.meta["val"].numel() >= WIDE * WIDE
    ]


def test_one_cast_of_each_column_and_of_each_gradient() -> None:
    program = lowered(zero=0).program
    grads = [b for b in program.buffers.values() if b.kind == "grad"]
    assert {b.dtype for b in grads} == {torch.bfloat16}
    assert casts(program) == ["update a", "update a", "update b", "update b"], "the gradient, and the copy that stays"
    program = lowered(zero=0, optimizer=fzero.optim.sgd(0.1)).program
    assert casts(program)[:2] == ["bf16 once", "bf16 once"], "no kernel of sgd writes it"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"mesh": {"dp": 2}, "zero": 0}, "gradients are summed over ranks"),
        ({"microbatches": 2}, "and over microbatches"),
        ({"clip_norm": 1.0}, "the norm reads them, and the update multiplies them first"),
        ({"optimizer": fzero.optim.sgd(0.1)}, "its update casts nothing itself"),
    ],
)
def test_gradients_that_stay_wide(given: dict[str, Any], why: str) -> None:
    program = lowered(**given).program
    assert {b.dtype for b in program.buffers.values() if b.kind == "grad"} == {torch.float32}, why


def test_fp32_has_no_copies() -> None:
    assert not casts(lowered(precision="fp32").program)


def _of_moments(program: Program) -> Program:
    """The copy is made of the optimizer's moment: the values of another column."""
    cast = next(op for op in program.ops if str(op.why) == "bf16 once")
    moment = next(b.name for b in program.buffers.values() if b.entry == "opt_state/momentum")
    other = replace(cast, reads=(replace(cast.reads[0], name=moment),))
    return replace(program, ops=tuple(other if op is cast else op for op in program.ops))


def _stale(program: Program) -> Program:
    """The copy is made behind the step, for the next one."""
    cast = next(op for op in program.ops if str(op.why) == "bf16 once")
    return replace(program, ops=(*(op for op in program.ops if op is not cast), cast))


def _after_the_update(program: Program) -> Program:
    """The update has written the parameters when the loss casts them."""
    cast = next(op for op in program.ops if str(op.why) == "bf16 once")
    update = next(op for op in program.ops if op.is_update)
    ops = [op for op in program.ops if op not in (cast, update)]
    return replace(program, ops=(update, cast, *ops))


@pytest.mark.parametrize("broken", [_of_moments, _stale, _after_the_update])
def test_a_wrong_copy_is_found(broken: Callable[[Program], Program]) -> None:
    found = lowered(zero=0, optimizer=fzero.optim.sgd(0.1, momentum=0.9))
    fzero.verify(found.roles)
    with pytest.raises(VerifyError):
        fzero.verify({0: broken(found.program)})
