"""fzero.scan: the loop's numbers, one op whatever the length, gradients of what is closed over, and its refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import run
from torch import Tensor, nn

import fzero
from fzero import optim
from fzero._torch_compat import allocations
from fzero.capture import trace_step
from fzero.codegen import segment_memory
from fzero.interop import from_module
from fzero.ir.scan_op import SCAN

STEPS, ROWS, WIDTH = 5, 4, 3


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (WIDTH, WIDTH), "u": (WIDTH, WIDTH), "b": (WIDTH,), "h": (ROWS, WIDTH)}
    return {name: torch.randn(s, generator=generator, dtype=torch.float64) for name, s in shapes.items()}


def data(steps: int = STEPS) -> Tensor:
    return torch.randn(steps, ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def cell(**how: Any) -> Callable[[Any, Tensor], Tensor]:
    """A loss of a recurrent cell with a count that no gradient follows; weights are closed over."""

    def loss(p: Any, x: Tensor) -> Tensor:
        scale = p["w"].sin()  # closed over too, and no leaf

        def f(carry: Any, x: Tensor) -> Any:
            h = F.layer_norm(torch.tanh(x @ scale + carry["h"] @ p["u"].t() + p["b"]), (WIDTH,))
            return {"h": h, "n": carry["n"] + 1}, (h.sin(), carry["n"])

        last, (ys, numbers) = fzero.scan(f, {"h": p["h"], "n": torch.tensor(0)}, x, **how)
        weights = torch.arange(ys.shape[0], dtype=ys.dtype)[:, None, None]
        return (ys * weights).square().mean() + last["h"][0].sum() + (last["n"] * numbers.sum()).double()

    return loss


def captured(loss: Any, own: Any, x: Any, **how: Any) -> tuple[Tensor, dict[str, Tensor]]:
    def step(state: Any, batch: Any) -> Any:
        value, grads = fzero.value_and_grad(loss, allow_unused=True, **how)(state["p"], batch)
        return {"p": state["p"], "g": grads}, {"loss": value}

    state = fzero.step(fzero.init({"p": own, "g": own}, fzero.Spec(step=step)), x)
    return state.metrics["loss"], {name: g.full() for name, g in state.tree["g"].items()}


def agrees(loss: Any, own: Any, x: Any, **how: Any) -> None:
    """The captured op has the numbers of the plain loop."""
    value, grads = captured(loss, own, x, **how)
    wanted, wanted_grads = fzero.value_and_grad(loss, allow_unused=True, **how)(own, x)
    torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-14)
    assert set(grads) == set(wanted_grads)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted_grads[name], rtol=1e-10, atol=1e-12, msg=name)


def region(loss: Any, own: Any, x: Any) -> torch.fx.Graph:
    def step(state: Any, batch: Any) -> Any:
        return state, {"loss": fzero.value_and_grad(loss)(state, batch)[0]}

    return trace_step.capture(step, own, x, axis="dp").regions[0].gm.graph


@pytest.mark.parametrize("how", [{}, {"reverse": True}, {"remat": True}, {"remat": True, "reverse": True}], ids=str)
def test_numbers_are_those_of_the_loop(how: dict[str, Any]) -> None:
    agrees(cell(**how), params(), data())


def test_the_plain_loop_is_the_loop_written_out() -> None:
    def by_hand(p: Any, x: Tensor) -> Tensor:
        h, ys = p["h"], []
        for row in x.flip(0).unbind(0):
            h = torch.tanh(row @ p["w"] + h)
            ys.append(h)
        return (torch.stack(ys[::-1]) * x).sum()

    def by_scan(p: Any, x: Tensor) -> Tensor:
        def f(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(row @ p["w"] + h)
            return h, h

        return (fzero.scan(f, p["h"], x, reverse=True)[1] * x).sum()

    own = {name: v.requires_grad_() for name, v in params().items()}
    values = [loss(own, data()) for loss in (by_hand, by_scan)]
    assert torch.equal(*values)
    both = [torch.autograd.grad(value, [own["w"], own["h"]]) for value in values]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@pytest.mark.parametrize("remat", [False, True])
def test_a_loop_is_two_ops_whatever_its_length(remat: bool) -> None:
    lengths = []
    for steps in (2, 60):
        graph = region(cell(remat=remat), params(), data(steps))
        assert sum(node.target is SCAN for node in graph.nodes) == 2
        lengths.append(len(graph.nodes))
    assert lengths[0] == lengths[1]


def test_remat_keeps_the_carry_alone() -> None:
    kept = []
    for remat in (False, True):
        graph = region(cell(remat=remat), params(), data(60))
        forward = next(node for node in graph.nodes if node.target is SCAN)
        kept.append(sum(v.nbytes for v in forward.meta["val"]))
    assert kept[1] < 0.6 * kept[0]


def test_a_scan_of_a_recomputed_function_is_a_scan_with_remat() -> None:
    """As `jax.lax.scan(jax.checkpoint(f), ...)`; it kept all that the backward read, and nothing said so."""

    def of(wrap: Callable[[Any], Any], **how: Any) -> Any:
        def loss(p: Any, x: Tensor) -> Tensor:
            def f(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
                h = torch.tanh(torch.sin(row @ p["w"]) + h)
                return h, h

            return fzero.scan(wrap(f), p["h"], x, **how)[1].square().sum()

        return loss

    own = {name: params()[name] for name in ("h", "w")}
    agrees(of(fzero.remat), own, data())
    texts = [str(region(loss, own, data())) for loss in (of(fzero.remat), of(lambda f: f, remat=True))]
    assert texts[0] == texts[1]
    assert texts[0] != str(region(of(lambda f: f), own, data()))


def test_xs_and_parts_of_trees_get_gradients() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        xs = {"a": (p["w"] * 2).expand(STEPS, -1, -1).contiguous() * x[:, :WIDTH], "b": (x, x.long())}
        last, ys = fzero.scan(lambda c, s: ((c[0] + s["a"].sin(), c[1]), s["b"][0] * c[0][0]), (p["u"], p["b"]), xs)
        return ys.square().sum() + (last[0] * last[1]).sum()

    agrees(loss, params(), data())


def test_without_xs_a_length_is_needed() -> None:
    agrees(lambda p, x: fzero.scan(lambda c, _: ((c * p["b"]).sin(), None), p["h"], None, length=4)[0].sum() + x.sum(),
           params(), data())  # fmt: skip
    with pytest.raises(fzero.CaptureError, match="xs has no tensors, length=None"):
        fzero.scan(lambda c, _: (c, None), torch.ones(2), None)


def test_modules_and_layers_of_other_kinds_run_inside() -> None:
    torch.manual_seed(0)
    module = nn.ModuleDict({"cell": nn.LSTMCell(WIDTH, 6), "net": nn.GRU(6, 6), "out": nn.Linear(6, 1)}).double()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = module

        def forward(self, x: Tensor) -> Tensor:
            zeros = x.new_zeros(ROWS, 6)

            def f(state: Any, x: Tensor) -> Any:
                h, c = self.parts["cell"](x, state)
                return (h, c), self.parts["out"](self.parts["net"](h[None])[0][0])

            return fzero.scan(f, (zeros, zeros), x)[1]

    own, buffers, apply = from_module(Net())
    agrees(lambda p, x: apply(p, buffers, x).square().mean(), own, data())


def test_torchs_scan_is_the_same_op() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        scan = torch._higher_order_ops.scan
        last, ys = scan(lambda c, s: (c * 0.5 + s.sin(), c * s), p["h"], x * p["b"] @ p["w"] @ p["u"], reverse=True)
        return last.sum() + ys.square().sum()

    assert sum(node.target is SCAN for node in region(loss, params(), data()).nodes) == 2
    value, grads = captured(loss, params(), data())

    def written(p: Any, x: Tensor) -> Tensor:
        rows = x * p["b"] @ p["w"] @ p["u"]
        last, ys = fzero.scan(lambda c, s: (c * 0.5 + s.sin(), c * s), p["h"], rows, reverse=True)
        return last.sum() + ys.square().sum()

    wanted, wanted_grads = fzero.value_and_grad(written, allow_unused=True)(params(), data())
    torch.testing.assert_close(value, wanted, rtol=1e-12, atol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted_grads[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", [{"zero": 3}, {"zero": 3, "remat": "full"}, {"zero": 3, "prefetch": 0}], ids=str)
def test_no_stage_changes_a_bit(options: dict[str, Any]) -> None:
    for a, b in zip(of_run(cell(), {}), of_run(cell(), options), strict=True):
        assert torch.equal(a, b)


def of_run(loss: Any, options: dict[str, Any], more: Any = None) -> list[Tensor]:
    spec = fzero.Spec(loss=loss, optimizer=optim.adamw(1e-2), **options)
    return run(spec, {**params(), **(more or {})}, lambda _, step: data() * (step + 1), world=2, steps=2).leaves[-1]


def test_over_tp_a_loop_is_whole_on_each_rank() -> None:
    more = {"k": torch.randn(ROWS, WIDTH, dtype=torch.float64)}
    tp = {"mesh": {"tp": 2}, "shard": {"k": fzero.P("tp")}}

    def loss(p: Any, x: Tensor) -> Tensor:
        return cell()(p, x * p["k"].sin())

    for a, b in zip(of_run(loss, {}, more), of_run(loss, tp, more), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    with pytest.raises(fzero.SpecError, match=r"params/k lies as S0, and fzero.scan.default .* Keep it whole"):
        of_run(lambda p, x: cell()(p, x) + fzero.scan(lambda c, s: (c + p["k"], None), p["h"], x)[0].sum(), tp, more)


@pytest.mark.parametrize("remat", [False, True])
def test_a_loop_asks_the_allocator_for_no_more_than_planned(remat: bool) -> None:
    own = {name: torch.randn(64, 64, dtype=torch.float64) for name in ("w", "u", "h")}

    def loss(p: Any, x: Tensor) -> Tensor:
        def f(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(x @ p["w"] + h @ p["u"]) * h.sin()
            return h, h

        return fzero.scan(f, p["h"], x, remat=remat)[1].square().mean()

    x = torch.randn(9, 64, 64, dtype=torch.float64)
    graph = region(loss, own, x)
    values: dict[Any, Any] = dict(
        zip(graph.find_nodes(op="placeholder"), [own["h"], own["u"], own["w"], x], strict=True)
    )
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            with allocations() as events:
                values[node] = node.target(*args, **kwargs)
            peak = max(itertools.accumulate((nbytes for _, nbytes in events), initial=0))
            if node.target is SCAN:
                assert peak <= segment_memory.heap_bytes(node) <= 1.3 * peak + 8192


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "a carry of another dtype": (
        lambda p, x: fzero.scan(lambda c, s: (c.float(), s), p["h"], x)[0].sum(),
        r"carry is .*f32.* after a step, and .*f64.* before it: each step must return the same form",
    ),
    "a carry of other leaves": (
        lambda p, x: fzero.scan(lambda c, s: ({"h": c}, s), p["h"], x)[0].sum(), "a carry with the leaves h: init has",
    ),
    "a number": (lambda p, x: fzero.scan(lambda c, s: (c, s), 0.0, x)[1].sum(), r"init is .*0\.0.*: needed a tensor"),
    "no pair": (lambda p, x: fzero.scan(lambda c, s: c, p["h"], x)[0].sum(), r"f returned .*: needed \(carry, y\)"),
    "lengths": (
        lambda p, x: fzero.scan(lambda c, s: (c, s[0]), p["h"], {"a": x, "b": x[1:]})[1].sum(),
        r"one length .*xs\['a'\] has 5, xs\['b'\] has 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_is_needed(name: str) -> None:
    loss, text = REFUSED[name]
    with pytest.raises(fzero.CaptureError, match=text):
        loss(params(), data())
    with pytest.raises(fzero.CaptureError, match=text):
        captured(loss, params(), data())


def test_draws_from_the_losss_key_are_refused() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        return fzero.scan(lambda c, s: (F.dropout(c + s, 0.5), None), p["h"], x)[0].sum()

    with pytest.raises(
        fzero.CaptureError, match=r"every step would draw the same. Pass keys in xs, fzero.random.split"
    ):
        captured(loss, params(), data(), key=fzero.random.key(0))


def test_keys_in_xs_draw_for_each_step() -> None:
    def loss(p: Any, x: Tensor, key: Tensor) -> Tensor:
        def f(c: Tensor, s: Any) -> tuple[Tensor, None]:
            return fzero.random.dropout(s[1], c + s[0] * p["b"], 0.5), None

        return fzero.scan(f, p["h"], (x, fzero.random.split(key, STEPS)))[0].sum()

    agrees(loss, params(), data(), key=fzero.random.key(0))


def test_a_gradient_of_a_gradient_is_refused_by_name() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        value = fzero.scan(lambda c, s: ((c * s).sin(), None), p["h"], x)[0].sum()
        return torch.autograd.grad(value, x, create_graph=True)[0].square().sum()

    with pytest.raises(fzero.CaptureError, match="a gradient of its gradient is asked for"):
        captured(loss, params(), data())
    fzero.value_and_grad(loss, allow_unused=True)(params(), data())  # the plain loop has it


def test_a_transform_around_it_is_the_loop() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        inner = lambda x: fzero.scan(lambda c, s: ((c * s).sin(), None), p["h"], x)[0].sum()  # noqa: E731
        return torch.func.grad(inner)(x).square().sum()

    agrees(loss, params(), data())
