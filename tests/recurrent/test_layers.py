"""torch's recurrent functions as ops of a layer: torch's numbers, one op a layer and direction, planned memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import run
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import fzero
from fzero import P, optim, tree
from fzero._torch_compat import allocations, onednn_has_bf16, seen_in_backwards
from fzero.capture import trace_step
from fzero.interop import from_module
from fzero.recurrent import layers, loops, recurrent_ops

STEPS, ROWS, WIDTH, HIDDEN = 5, 3, 4, 6
PLAIN = {"num_layers": 1}
OPTIONS: tuple[dict[str, Any], ...] = (
    PLAIN, {"num_layers": 2, "bidirectional": True}, {"bias": False, "bidirectional": True}, {"batch_first": True},
    {"num_layers": 3, "dropout": 0.4},
)  # fmt: skip
MODULES: dict[str, Callable[..., nn.Module]] = {
    "lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}  # fmt: skip
CASES = [(name, o) for name in MODULES for o in OPTIONS]
CASES += [("lstm", {"proj_size": 3, "num_layers": 2, "bidirectional": way}) for way in (False, True)]


def of(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, Callable[..., Tensor], Tensor]:
    """A module's parameters with its first states, a loss of all that it returns, and a batch."""
    torch.manual_seed(0)
    params, buffers, apply = from_module(MODULES[name](WIDTH, HIDDEN, **options).to(dtype))
    count = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    params = {**params, "h": torch.randn(count, ROWS, options.get("proj_size", HIDDEN), dtype=dtype)}
    params |= {"c": torch.randn(count, ROWS, HIDDEN, dtype=dtype)} if name == "lstm" else {}

    def loss(p: Any, x: Tensor) -> Tensor:
        own = {k: v for k, v in p.items() if k not in ("h", "c")}
        out, states = apply(own, buffers, x, (p["h"], p["c"]) if name == "lstm" else p["h"])
        values = [out, *(states if name == "lstm" else (states,))]
        return sum((v.sin() * (i + 1)).square().sum() for i, v in enumerate(values))  # type: ignore[return-value]

    shape = (ROWS, STEPS, WIDTH) if options.get("batch_first") else (STEPS, ROWS, WIDTH)
    return params, loss, torch.randn(shape, dtype=dtype)


def captured(loss: Any, params: Any, x: Tensor, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its gradients, the batch's too, by a program."""

    def step(state: Any, batch: Tensor) -> Any:
        value, grads = fzero.value_and_grad(loss, **options)(state["p"], batch)
        return {"p": state["p"], "g": grads}, {"loss": value}

    state = fzero.init({"p": params, "g": params}, fzero.Spec(step=step))
    state = fzero.step(state, x)
    return state.metrics["loss"], {name: value.full() for name, value in state.tree["g"].items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.sampled(5)
def test_numbers_are_torchs(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    params, loss, x = of(name, dtype, **options)
    key = {"key": fzero.random.key(3)} if options.get("dropout") else {}
    params["x"] = x  # as a parameter, so that it has a gradient

    def of_all(p: Any, _: Tensor) -> Tensor:
        return loss({k: v for k, v in p.items() if k != "x"}, p["x"])

    wanted, wanted_grads = fzero.value_and_grad(of_all, **key)(params, x)  # outside of a step: torch's own kernels
    value, grads = captured(of_all, params, x, **key)
    bound = 1e-12 if dtype is torch.float64 else 1e-6
    assert abs(value - wanted) <= bound * abs(wanted)
    for path, grad in grads.items():
        assert (grad - wanted_grads[path]).abs().max() <= 2 * bound * wanted_grads[path].abs().max(), path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_lstm_has_the_bits_of_torchs_own(dtype: torch.dtype) -> None:
    """Both are oneDNN's, where torch has it."""
    if dtype is torch.bfloat16 and not onednn_has_bf16():
        pytest.skip("a processor without bf16")
    params, loss, x = of("lstm", dtype, num_layers=2, bidirectional=True)
    value, grads = captured(loss, params, x)
    wanted, wanted_grads = fzero.value_and_grad(loss)(params, x)
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch without oneDNN")
    assert torch.equal(value, wanted)
    for path, grad in wanted_grads.items():  # torch's layer adds the gradient of its last output in fp32
        bound = 0.0 if dtype is torch.float32 else 2**-6 * grad.abs().max()
        assert (grads[path] - grad).abs().max() <= bound, path


@pytest.mark.parametrize("name", MODULES)
def test_there_is_one_op_for_a_layer_and_direction(name: str) -> None:
    params, loss, x = of(name, num_layers=2, bidirectional=True)
    lengths = []
    for longer in (1, 40):
        graph = region(loss, params, x.repeat(longer, 1, 1))
        assert [sum(n.target is op for n in graph.nodes) for op in (recurrent_ops.FORWARD, recurrent_ops.BACKWARD)] == [
            4,
            4,
        ]
        lengths.append(len(graph.nodes))
    assert lengths[0] == lengths[1], "the graph grows with time"


def region(loss: Any, params: Any, x: Any) -> torch.fx.Graph:
    def step(state: Any, batch: Any) -> Any:
        return state, {"loss": fzero.value_and_grad(loss)(state, batch)[0]}

    return trace_step.capture(step, params, x, axis="dp").regions[0].gm.graph


@pytest.mark.parametrize("name", [*MODULES, "cell"])
@pytest.mark.sampled(2)
def test_results_may_be_written_into(name: str) -> None:
    """As in eager PyTorch: what a layer returns is the caller's, whatever its backward reads."""
    torch.manual_seed(0)
    module = nn.LSTMCell(WIDTH, HIDDEN) if name == "cell" else MODULES[name](WIDTH, HIDDEN, num_layers=2)
    params, buffers, apply = from_module(module.double())
    x = torch.randn(*(() if name == "cell" else (STEPS,)), ROWS, WIDTH, dtype=torch.float64)

    def loss(p: Any, x: Tensor) -> Tensor:
        values = apply(p, buffers, x)
        out, states = values[0], values[1:] if name == "cell" or not isinstance(values[1], tuple) else values[1]
        F.silu(out, inplace=True)
        states[-1].mul_(2.0).add_(out.sum())
        return sum((v.sin() * (i + 1)).square().sum() for i, v in enumerate((out, *states)))  # type: ignore[return-value]

    own = tree.map(lambda w: w.detach().clone().requires_grad_(), params)
    value, (paths, leaves, _) = loss(own, x), tree.flatten(own)
    wanted = dict(zip(paths, torch.autograd.grad(value, leaves), strict=True))
    found, grads = captured(loss, params, x)
    torch.testing.assert_close(found, value.detach())
    torch.testing.assert_close(grads, wanted)
    program = str(fzero.lower(fzero.Spec(loss=loss, optimizer=optim.sgd(0.1), zero=0), params, x, world_size=1))
    assert "clone" not in program


def test_a_trace_sees_the_backwards_of_its_own_thread_alone() -> None:
    class Seen(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(threading.current_thread().name)
            return func(*args, **(kwargs or {}))

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 2

    def differentiated() -> None:
        x = torch.ones(2, requires_grad=True)
        torch.autograd.grad(Doubled.apply(x).sum(), x)

    calls: list[str] = []
    with seen_in_backwards(Seen()):
        other = threading.Thread(target=differentiated, name="other")
        other.start()
        other.join()
        assert calls == []
        differentiated()
    assert set(calls) == {threading.current_thread().name}


@pytest.mark.parametrize("name", ["lstm", "gru", "tanh"])
@pytest.mark.sampled(2)
def test_in_bf16_they_are_as_near_to_exact_numbers_as_torchs(name: str) -> None:
    """Sums are rounded at other places: 16-bit numbers are not torch's, and lie no further from exact ones. (Where the
    processor has bf16, torch's LSTM is oneDNN's, and so is ours.)"""
    own = theirs = 0.0
    for seed in range(2):
        torch.manual_seed(seed)
        module = MODULES[name](WIDTH, HIDDEN).bfloat16()
        params, buffers, apply = from_module(module)
        x = torch.randn(STEPS, 4 * ROWS, WIDTH).bfloat16()
        exact = torch.func.functional_call(module.double(), {k: v.double() for k, v in params.items()}, (x.double(),))[
            0
        ]
        torchs = torch.func.functional_call(module.bfloat16(), params, (x,))[0]

        def loss(p: Any, b: Tensor, apply: Any = apply, buffers: Any = buffers) -> Any:
            out = apply(p, buffers, b)[0]
            return out.square().mean(), {"out": out}

        ours = fzero.step(fzero.init(params, fzero.Spec(loss=loss, optimizer=optim.sgd(0.1))), x).metrics["out"]
        own += float((ours.double() - exact).abs().mean())
        theirs += float((torchs.double() - exact).abs().mean())
    assert own < 1.05 * theirs


@pytest.mark.parametrize(
    ("dtype", "again"), [(torch.float64, False), (torch.float32, False), (torch.float64, True)],
    ids=["fp64", "fp32", "again"],
)  # fmt: skip
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.sampled(2)
def test_in_a_checkpoint(name: str, dtype: torch.dtype, again: bool) -> None:
    """A backward that recomputes a layer takes the layer's op, as the forward did; also one of a gradient's norm."""
    params, loss, x = of(name, dtype, num_layers=2)

    def of_all(p: Any, x: Tensor) -> Tensor:
        value = checkpoint(loss, p, x, use_reentrant=False)
        if not again:
            return value
        return sum(g.square().sum() for g in torch.autograd.grad(value, list(p.values()), create_graph=True))  # type: ignore[return-value]

    wanted, wanted_grads = fzero.value_and_grad(of_all)(params, x)
    value, grads = captured(of_all, params, x)
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(grads, wanted_grads)
    if not again:
        ops = [n.target for n in region(of_all, params, x).nodes]
        assert (ops.count(recurrent_ops.FORWARD), ops.count(recurrent_ops.BACKWARD)) == (4, 2)


def test_lines_are_the_users() -> None:
    params, loss, x = of("gru")
    nodes = [n for n in region(loss, params, x).nodes if n.target in (recurrent_ops.FORWARD, recurrent_ops.BACKWARD)]
    assert [n.meta["source"].split(":")[0] for n in nodes] == ["test_layers.py"] * 2


@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize("options", [{"remat": "full"}, {"zero": 3}, {"zero": 3, "microbatches": 3}])
@pytest.mark.sampled(2)
def test_no_stage_changes_a_bit(name: str, options: dict[str, Any]) -> None:
    params, loss, _ = of(name, torch.float32, num_layers=2, batch_first=True)
    params = {k: v for k, v in params.items() if k not in ("h", "c")}

    def mean(p: Any, x: Tensor) -> Tensor:
        states = torch.zeros(2, x.shape[0], HIDDEN)
        return loss({**p, "h": states, "c": states}, x) / x.shape[0]

    def batch(rank: int, step: int) -> Tensor:
        return torch.randn(3, STEPS, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))

    number = options.get("microbatches", 1)
    runs = [
        run(fzero.Spec(loss=mean, optimizer=optim.adamw(1e-2), **how), params, batch, world=2, steps=2)
        for how in ({"microbatches": number}, options)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*(r.leaves[-1] for r in runs), strict=True))


def test_sharded_weights_are_refused_by_name() -> None:
    params, loss, x = of("gru")
    shard = {"weight_ih_l0": P(fzero.groups("tp", 3))}
    with pytest.raises(fzero.SpecError, match=r"params/weight_ih_l0 lies as S0/3, .*recurrent.* Keep it whole: P\(\)"):
        run(
            fzero.Spec(loss=loss, optimizer=optim.sgd(0.1), mesh={"tp": 2}, shard=shard),
            params,
            lambda *_: x,
            world=2,
            steps=1,
        )


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.sampled(1)
def test_a_gradient_can_be_differentiated_again(name: str) -> None:
    params, loss, x = of(name, bidirectional=True)

    def penalised(p: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        value = loss(p, x)
        (grad,) = torch.autograd.grad(value, x, create_graph=True)
        return value + grad.square().sum()

    with torch.backends.mkldnn.flags(enabled=False):
        wanted, wanted_grads = fzero.value_and_grad(penalised)(params, x)
    value, grads = captured(penalised, params, x)
    torch.testing.assert_close(value, wanted, rtol=1e-12, atol=0)
    for path, grad in grads.items():
        torch.testing.assert_close(grad, wanted_grads[path], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("what", ["torch.func", "packed", "autocast", "kwargs"])
@pytest.mark.sampled(1)
def test_what_an_op_cannot_do_is_decomposed(what: str) -> None:
    params, _, x = of("gru")
    weights = [params[name] for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")]
    packed = torch.tensor([3, 2, 1])

    def other(p: Any, x: Tensor) -> Tensor:
        own = [p[str(i)] for i in range(4)]
        if what == "torch.func":
            rest = (own, True, 1, 0.0, True, False, False)
            return torch.func.grad(lambda x: torch.gru(x, p["h"], *rest)[0].sum())(x).square().sum()
        if what == "packed":
            return torch.gru(x.flatten(0, 1)[:6], packed, p["h"], own, True, 1, 0.0, True, False)[0].sum()
        if what == "autocast":
            with torch.autocast("cpu"):
                return torch.gru(x.float(), p["h"].float(), [w.float() for w in own], True, 1, 0.0, True, False, False)[
                    0
                ].sum()
        return torch.gru(x, p["h"], own, has_biases=True, num_layers=1, dropout=0.0, train=True, bidirectional=False,
                         batch_first=False)[0].sum()  # fmt: skip

    named = {**dict(zip("0123", weights, strict=True)), "h": params["h"]}
    graph = region(other, named, x)
    assert not any(n.target is recurrent_ops.FORWARD for n in graph.nodes)
    value, _ = captured(other, named, x)
    torch.testing.assert_close(
        value, fzero.value_and_grad(other)(named, x)[0], rtol=1e-2 if what == "autocast" else 1e-12, atol=0
    )


def unrolled(steps: int, dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[Any, Any, Tensor]:
    """An LSTM cell's parameters, a loss of a Python loop over time, and a batch."""
    torch.manual_seed(0)
    params, buffers, apply = from_module(nn.LSTMCell(WIDTH, HIDDEN, bias=bias).to(dtype))

    def loss(p: Any, xs: Tensor) -> Tensor:
        h = c = xs.new_zeros(ROWS, HIDDEN)
        total = xs.new_zeros(())
        for x in xs.unbind(0):
            h, c = apply(p, buffers, x, (h, c))
            total = total + h.sin().square().sum() + c.cos().sum()
        return total

    return params, loss, torch.randn(steps, ROWS, WIDTH, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("bias", [True, False])
def test_numbers_of_a_cell_are_torchs(bias: bool, dtype: torch.dtype) -> None:
    """The forward bitwise: the kernel has the order of torch's own work."""
    params, loss, x = unrolled(STEPS, dtype, bias)
    wanted, wanted_grads = fzero.value_and_grad(loss)(params, x)
    value, grads = captured(loss, params, x)
    assert torch.equal(value, wanted)
    bound = 1e-12 if dtype is torch.float64 else 1e-6
    for path, grad in grads.items():
        assert (grad - wanted_grads[path]).abs().max() <= 2 * bound * wanted_grads[path].abs().max(), path


def test_a_cell_is_one_op() -> None:
    """The complaint: a loop over two LSTMCells was a graph of 140 nodes a step, traced twice; 100 s at T = 400."""
    params, loss, x = unrolled(6)
    counts = []
    for steps in (3, 6):
        graph = region(loss, params, x[:steps])
        assert [sum(n.target is op for n in graph.nodes) for op in (recurrent_ops.FORWARD, recurrent_ops.BACKWARD)] == [
            steps,
            steps,
        ]
        counts.append(len(graph.nodes))
    assert counts[1] - counts[0] <= 3 * 45, "nodes of three steps, the loss's among them"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.float32) for kind in (*loops.GATES, recurrent_ops.ONEDNN)), (recurrent_ops.ONEDNN, torch.bfloat16)],
)
@pytest.mark.parametrize(("projected", "bias"), [(False, True), (True, False)])
def test_no_layer_asks_the_allocator_for_more_than_planned(
    kind: str, projected: bool, bias: bool, dtype: torch.dtype
) -> None:
    """And for about as much; small values aside."""
    if dtype is torch.bfloat16 and not onednn_has_bf16():
        pytest.skip("a processor without bf16")
    if projected and kind != "lstm":
        pytest.skip("of an LSTM alone, in ATen")
    new = partial(torch.randn, dtype=dtype)
    for steps, rows, width, size in itertools.product((1, 2, 33), (2, 17), (3, 64), (16, 51)):
        gates, shown = (
            (4 if kind == recurrent_ops.ONEDNN else loops.GATES[kind]) * size,
            size // 2 if projected else size,
        )
        states = new(rows, shown), new(rows, size) if "lstm" in kind else None
        biases = [new(gates)] * 2 if bias else [None, None]
        weights = new(gates, width), new(gates, shown), *biases
        layer = (new(steps, rows, width), *states, *weights, new(shown, size) if projected else None)
        args = (*layer, kind, False, True)
        results = recurrent_ops.FORWARD(*args)
        outs = dict(zip(("ys", "last", "saved"), results, strict=True))
        forth = given(lambda args=args, outs=outs: torch.ops.fzero.recurrent.out(*args, **outs))
        incoming = torch.randn_like(results[0]), None if states[1] is None else new(rows, size)
        back = (*results, *incoming, *args)
        grads = {f"d_{n}": g for n, g in zip(loops.Grads._fields, recurrent_ops.BACKWARD(*back), strict=True)}
        behind = given(lambda back=back, grads=grads: torch.ops.fzero.recurrent_backward.out(*back, **grads))
        for peak, planned in (
            (forth, recurrent_ops.scratch_bytes(*args)),
            (behind, recurrent_ops.backward_scratch_bytes(*back)),
        ):
            assert peak <= planned <= 1.15 * peak + 33_000, (steps, rows, width, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onednn_asks_for_no_more_than_planned(dtype: torch.dtype) -> None:
    """The complaint: layers that are wider than their states, and those that are evaluated (no `keep`), asked for more,
    the latter for a workspace that nobody reads."""
    if dtype is torch.bfloat16 and not onednn_has_bf16():
        pytest.skip("a processor without bf16")
    new = partial(torch.randn, dtype=dtype)
    shapes = [(1, 100, 320, 16), (1, 8, 320, 1), (5, 64, 127, 8), (64, 1, 64, 255), (2, 2, 256, 8), (9, 7, 128, 5)]
    for (steps, rows, width, size), keep in itertools.product(shapes, (True, False)):
        states, weights = (new(rows, size), new(rows, size)), (new(4 * size, width), new(4 * size, size))
        args = (new(steps, rows, width), *states, *weights, new(4 * size), new(4 * size), None)
        args = (*args, recurrent_ops.ONEDNN, False, keep)
        results = recurrent_ops.FORWARD(*args)
        outs = dict(zip(("ys", "last", "saved"), results, strict=True))
        forth = given(lambda args=args, outs=outs: torch.ops.fzero.recurrent.out(*args, **outs))
        assert forth <= recurrent_ops.scratch_bytes(*args), (steps, rows, width, size, keep)
        if keep:
            back = (*results, torch.randn_like(results[0]), new(rows, size), *args)
            grads = {f"d_{n}": g for n, g in zip(loops.Grads._fields, recurrent_ops.BACKWARD(*back), strict=True)}
            behind = given(lambda back=back, grads=grads: torch.ops.fzero.recurrent_backward.out(*back, **grads))
            assert behind <= recurrent_ops.backward_scratch_bytes(*back), (steps, rows, width, size)


def given(call: Callable[[], Any]) -> int:
    with allocations() as events:
        call()
    return max(itertools.accumulate((nbytes for _, nbytes in events), initial=0))


def test_a_workspace_that_is_too_small_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula is that of some versions of oneDNN: another one must not write behind the plan."""
    params, loss, x = of("lstm", torch.float32)
    monkeypatch.setattr("fzero.recurrent.onednn.workspace_bytes", lambda *_: 64)
    monkeypatch.setattr("fzero.ir.forms._kept", {})  # of true sizes
    with pytest.raises(RuntimeError, match=r"oneDNN's LSTM wants .* bytes of workspace, planned 64"):
        captured(loss, params, x)


def test_every_function_of_torch_has_a_kind() -> None:
    assert set(layers.KINDS.values()) == set(loops.GATES)


def test_packed_sequences_of_unknown_lengths_are_refused_with_the_mask_to_use() -> None:
    net = torch.nn.GRU(4, 5, batch_first=True)
    params, buffers, apply = fzero.interop.from_module(net)

    def loss(params: Any, batch: Any) -> Tensor:
        packed = torch.nn.utils.rnn.pack_padded_sequence(batch["x"], batch["lengths"], batch_first=True)
        return apply(params, buffers, packed)[0].data.square().mean()

    state = fzero.init(params, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1)))
    with pytest.raises(fzero.CaptureError, match=r"Lengths of packed sequences are values.*mask"):
        fzero.step(state, {"x": torch.ones(2, 3, 4), "lengths": torch.tensor([3, 2])})
