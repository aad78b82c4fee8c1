"""Padded products on the processor, with the rule for CUDA forced: the oracle is torch's own product."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero import backend
from fzero._torch_compat import inductor_lacks
from fzero.codegen import pad
from fzero.ir import forms, fx_nodes

aten = torch.ops.aten
VOCABULARY = 13

needs_compiler = pytest.mark.skipif(bool(inductor_lacks("cpu")), reason="no C++ compiler")


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor wants sides in multiples of eight, of all products."""
    monkeypatch.setitem(backend.BACKENDS, "cpu", replace(backend.CPU, product_sides=8))
    monkeypatch.setattr(pad, "LEAST_FLOPS", 0)
    monkeypatch.setattr(pad, "WIDTHS", (2, 4))


def loss(params: Any, batch: Any) -> Any:
    h = torch.tanh(params["table"][batch["x"]] @ params["w"])
    logits = h @ params["table"].t()
    return torch.nn.functional.cross_entropy(logits.float().view(-1, VOCABULARY), batch["y"].view(-1))


def params() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"table": torch.randn(VOCABULARY, 16, generator=generator), "w": torch.randn(16, 16, generator=generator)}


def batch(rank: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {name: torch.randint(0, VOCABULARY, (4, 8), generator=generator) for name in "xy"}


def trained(zero: int, precision: str, compile: str = "none") -> tuple[list[float], list[torch.Tensor]]:
    """The losses of three steps, and the parameters after them."""
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-2), zero=zero, precision=precision, compile=compile)
    state = fzero.init(params(), spec)
    losses = []
    for step in range(3):
        state = fzero.step(state, batch(step))
        losses.append(float(state.metrics["loss"]))
    return losses, fzero.tree.flatten(fzero.unshard(state.params))[1]


def products(precision: str = "bf16", **given: Any) -> list[Any]:
    """The products of a step's program, as nodes."""
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.adamw(1e-2), precision=precision, **given)
    program = fzero.lower(spec, params(), batch(), world_size=1).program
    return [n for gm in program.segments.values() for n in gm.graph.nodes if fx_nodes.op_name(n) in ("mm", "bmm")]


def test_sides_that_are_no_multiple_are_padded(forced: None) -> None:
    sides = {side for n in products() for x in n.all_input_nodes for side in x.meta["val"].shape[-2:]}
    assert {side % 8 for side in sides} == {0}, sides


def test_nothing_is_padded_without_the_rule() -> None:
    assert any(VOCABULARY in x.meta["val"].shape for n in products() for x in n.all_input_nodes)


@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-6), ("bf16", 1e-2)])
def test_losses(precision: str, near: float, request: pytest.FixtureRequest) -> None:
    plain = trained(0, precision)
    request.getfixturevalue("forced")
    padded = trained(0, precision)
    assert padded[0] == pytest.approx(plain[0], rel=near)
    assert [x.shape for x in padded[1]] == [x.shape for x in plain[1]], "leaves keep their shapes"


@pytest.mark.parametrize("compile", ["none", pytest.param("inductor", marks=needs_compiler)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stages_are_equal(forced: None, precision: str, compile: str) -> None:
    first, *others = (trained(zero, precision, compile) for zero in (0, 1, 2, 3))
    for other in others:
        assert other[0] == first[0]
        assert all(map(torch.equal, other[1], first[1]))
    if precision == "fp32":
        assert first[0] == pytest.approx(trained(0, precision)[0], rel=1e-6)


def test_every_side_against_torch(forced: None) -> None:
    """Rows, columns and the inner side, alone and together, of plain and of transposed operands; a view over rows of
    the result's memory is made of a copy."""
    for m, k, n in [(5, 8, 8), (8, 5, 8), (8, 8, 5), (5, 6, 7)]:
        a, b = torch.randn(m, k), torch.randn(n, k)
        gm = make_fx(lambda a, b: (aten.mm(a, aten.t(b)).mul(2), aten.view(aten.mm(a, aten.t(b)), [-1])))(a, b)
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) for x in (a, b)]
        done = pad._with_pads(forms.propagate(gm, fakes))
        assert sum(node.target is aten.constant_pad_nd.default for node in done.graph.nodes) >= 1
        for found, wanted in zip(done(a, b), (2 * (a @ b.t()), (a @ b.t()).view(-1)), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_pad_is_written_where_it_belongs() -> None:
    """Bits of torch's pad, into memory that holds other numbers; a pad that cuts has no such form."""
    from fzero.codegen.out_forms import _padded

    x = torch.randn(3, 4)
    for pads in ([0, 2], [1, 2, 3, 0], [0, 0, 0, 5]):
        wanted = aten.constant_pad_nd(x, pads, 0.5)
        into = torch.full_like(wanted, torch.nan)
        for call in _padded(into, x, pads, 0.5):
            call()
        assert torch.equal(into, wanted)
