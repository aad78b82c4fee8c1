"""Casts of mixed precision where nothing is gathered or sent: once a column, and in the update. Bits are those of plain
torch, which casts each leaf, takes gradients in bf16, casts them and updates with aten's fused AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from short_programs import written

import fzero
from fzero._torch_compat import FakeTensorMode
from fzero.compile.lowered import Lowered
from fzero.errors import VerifyError
from fzero.ir import fx_nodes
from fzero.ir.program import Program
from fzero.ir.recorder import record
from fzero.passes.narrow_gradients import narrow_gradients

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


# --- which gradients may be narrower, by hand ------------------------------------------------------------------------

RECORDS = """
    bucket b length=128 w[0:64:64] v[64:128:64]
    buffer x f32[64] batch
    buffer p f32[128] param bucket=b
    buffer g f32[128] grad bucket=b
    buffer m f32[128] optimizer bucket=b
    buffer v f32[128] optimizer bucket=b
    buffer c i64[] state
    buffer r f64[] constant
    buffer h f32[128] scratch bucket=b space=host
    buffer o f32[128] scratch bucket=b
    buffer q f32[128] scratch bucket=b
"""
MAKES = "run x -> g[0:64:64] g[64:128:64]  region=r0  segment=made"
UPDATES = "run p[0:128] g[0:128] m[0:128] v[0:128] c r -> o[0:128]  flat=1  segment=used"


def segment(body: Callable[..., None], *like: torch.Tensor) -> torch.fx.GraphModule:
    def run(*xs: torch.Tensor) -> list[torch.Tensor]:
        body(*xs)
        return []

    with FakeTensorMode():
        return record(run, [torch.empty(x.shape, dtype=x.dtype) for x in like])


def made(x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
    one.copy_((x.bfloat16() * 2).float())
    other.copy_((x.bfloat16() * 3).float())


def used(p: Any, g: Any, m: Any, v: Any, c: Any, r: Any, into: Any) -> None:
    into.copy_(torch.ops.fzero.adamw(p, g, m, v, c, r, 0.9, 0.99, 1e-8, 0.0, True)[0])


def both_read(x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
    cast = (x.bfloat16() * 2).float()
    one.copy_(cast)
    other.copy_(cast)


def not_cast(x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
    one.copy_((x.bfloat16() * 2).float())
    other.copy_(x * 3)


def read_too(p: Any, g: Any, m: Any, v: Any, c: Any, r: Any, into: Any) -> None:
    used(p, g * 2, m, v, c, r, into)


def in_another_place(p: Any, g: Any, m: Any, v: Any, c: Any, r: Any, into: Any) -> None:
    used(p, g, g, v, c, r, into)


def dtype_of(*ops: str, makes: Callable[..., None] = made, uses: Callable[..., None] = used, batches: int = 1) -> Any:
    """The dtype of the column of gradients behind the pass."""
    leaf, whole = torch.empty(64), torch.empty(128)
    count, rate = torch.ones((), dtype=torch.int64), torch.ones((), dtype=torch.float64)
    pool = {"made": segment(makes, leaf, leaf, leaf), "used": segment(uses, *[whole] * 4, count, rate, whole)}
    text = RECORDS + "\n".join(ops or (MAKES, UPDATES)).replace("[0:128]", "[0:128:flat]")
    program = narrow_gradients(replace(written(text, segments=pool), microbatches=batches))
    return program.buffers["g"].dtype


def test_a_gradient_is_held_as_it_is_made_where_only_its_update_reads_it() -> None:
    assert dtype_of() == torch.bfloat16
    assert dtype_of(MAKES, UPDATES, UPDATES.replace("-> o", "-> q")) == torch.bfloat16, "two updates cast it"


@pytest.mark.parametrize(
    ("ops", "why"),
    [
        ((MAKES,), "nobody reads it"),
        ((MAKES, MAKES, UPDATES), "it is written twice"),
        ((MAKES.replace("  region=r0", ""), UPDATES), "no loss makes it"),
        ((MAKES, "all_reduce g -> o  axis=dp", UPDATES), "it is sent"),
        ((MAKES, "move g -> h", UPDATES), "it is moved"),
        ((MAKES, UPDATES.replace("-> o", "-> h")), "its update runs on the host"),
        ((MAKES, UPDATES, UPDATES.replace("-> o", "-> h")), "and so where it is the second"),
    ],
)
def test_a_gradient_that_others_touch_stays(ops: tuple[str, ...], why: str) -> None:
    assert dtype_of(*ops) == torch.float32, why


@pytest.mark.parametrize("body", [both_read, not_cast])
def test_a_gradient_that_is_not_cast_at_the_end_stays(body: Callable[..., None]) -> None:
    assert dtype_of(makes=body) == torch.float32


@pytest.mark.parametrize(
    ("dtype", "held"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float64, torch.float32),
        (torch.int8, torch.float32),
    ],
)
def test_only_a_smaller_floating_dtype_is_held(dtype: torch.dtype, held: torch.dtype) -> None:
    def body(x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
        for into in (one, other):
            into.copy_((x.to(dtype) * 2).float())

    def mixed(x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
        one.copy_((x.bfloat16() * 2).float())
        other.copy_((x.to(dtype) * 2).float())

    assert dtype_of(makes=body) == held
    assert dtype_of(makes=mixed) == (held if dtype is torch.bfloat16 else torch.float32), "leaves of two dtypes"


@pytest.mark.parametrize("body", [read_too, in_another_place])
def test_a_gradient_of_which_an_update_asks_more_stays(body: Callable[..., None]) -> None:
    assert dtype_of(uses=body) == torch.float32


def test_a_gradient_that_is_added_over_microbatches_stays() -> None:
    assert dtype_of(batches=2) == torch.float32
