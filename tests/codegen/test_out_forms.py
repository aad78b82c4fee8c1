"""Results that an op leaves out, or returns as nothing; and the forms that write into given memory."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import same_bits
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode  # 2.11.0, 2.13.0
from torch.fx.experimental.proxy_tensor import make_fx

import fzero
from fzero._torch_compat import kernel_of
from fzero.codegen import bind, segment_memory
from fzero.codegen.out_forms import copied, copy_results, form_of
from fzero.cost.allocator import measured_peak
from fzero.ir import segments
from fzero.ir.op_info import of

aten = torch.ops.aten

STEPS, ROWS, WIDTH, HIDDEN = 5, 3, 4, 6
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1}


def test_a_result_that_is_left_out_is_not_copied() -> None:
    into = [torch.full((2,), 7.0) for _ in range(2)] + [torch.empty(0)]
    copy_results(lambda: (torch.ones(2), None, torch.empty(0)), list(enumerate(into)))
    assert [x.tolist() for x in into] == [[1.0, 1.0], [7.0, 7.0], []]


@pytest.mark.parametrize("made", [0, 1])
def test_a_result_of_another_shape_than_planned_is_an_error(made: int) -> None:
    """One without elements left its place as it was, and one of one element was spread."""
    with pytest.raises(RuntimeError, match=rf"result 1 of .* has shape \[{made}\], and \[2\] is planned"):
        copy_results(lambda: (torch.ones(2), torch.empty(made)), [(1, torch.full((2,), 7.0))])


@pytest.mark.parametrize(("dropout", "wanted"), [((), {0, 1}), ((0.0, True), {0, 1}), ((0.1, True), {0, 1, 6, 7})])
def test_the_seeds_of_an_attention_are_copied_for_its_dropout(dropout: tuple[Any, ...], wanted: set[int]) -> None:
    """Without one its kernels take no random numbers, and each layer would copy two numbers for nothing."""
    graph = fx.Graph()
    q = graph.placeholder("q")
    op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    call = graph.call_function(op, (q, q, q, None, True, *dropout))
    for place in (0, 1, 6, 7):
        graph.call_function(operator.getitem, (call, place))
    assert copied(call) == wanted
    named = graph.call_function(op, (q, q, q, None, True), {"dropout_p": 0.5})
    graph.call_function(operator.getitem, (named, 6))
    assert copied(named) == {6}


def recurrent(
    name: str, biases: bool, layers: int, both: bool, *, width: int = WIDTH
) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
    """The weights of one of torch's recurrent functions, and a loss of its output and last states."""
    generator, ways, weights = torch.Generator().manual_seed(0), 1 + both, {}
    for layer in range(layers):
        for way in range(ways):
            inner = width if layer == 0 else ways * HIDDEN
            shapes = [(GATES[name] * HIDDEN, inner), (GATES[name] * HIDDEN, HIDDEN)]
            shapes += [(GATES[name] * HIDDEN,)] * 2 if biases else []
            for i, shape in enumerate(shapes):
                weights[f"{layer}.{way}.{i}"] = torch.randn(shape, generator=generator) / 3

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        first = torch.zeros(layers * ways, x.shape[1], HIDDEN)
        start: Any = (first, first) if name == "lstm" else first
        out, *states = getattr(torch, name)(x, start, list(p.values()), biases, layers, 0.0, True, both, False)
        return out.square().mean() + sum((s.sin().mean() for s in states), out.new_zeros(()))

    return weights, loss


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("name", GATES)
@pytest.mark.sampled(3)
def test_recurrent_functions_train_as_torch_does(name: str, biases: bool, layers: int, both: bool) -> None:
    _trains_as_torch_does(*recurrent(name, biases, layers, both), (STEPS, ROWS, WIDTH))


@pytest.mark.parametrize("shape", [(2, 3, WIDTH), pytest.param((64, 32, 256), marks=pytest.mark.acceptance)])
def test_an_lstm_without_biases_trains_as_torch_does(shape: tuple[int, ...]) -> None:
    _trains_as_torch_does(*recurrent("lstm", False, 1, False, width=shape[2]), shape)


def _trains_as_torch_does(weights: dict[str, Tensor], loss: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    state = fzero.init(weights, fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.5)))
    own = {name: w.clone().requires_grad_() for name, w in weights.items()}
    for _ in range(2):
        state = fzero.step(state, x)
        value = loss(own, x)
        assert state.metrics["loss"].item() == pytest.approx(value.item(), rel=1e-5)
        grads = torch.autograd.grad(value, list(own.values()))
        own = {k: (w - 0.5 * g).detach().requires_grad_() for (k, w), g in zip(own.items(), grads, strict=True)}
    for name, w in own.items():
        torch.testing.assert_close(state.params[name].full(), w.detach(), rtol=1e-4, atol=1e-6)


def operands(op: Any, dtype: torch.dtype, order: str) -> list[Any] | None:
    """Arguments of an op: each tensor in plain order, with its dims moved, or both in turn; None: it takes others."""
    generator, given = torch.Generator().manual_seed(0), []
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            moved = order == "moved" or (order == "in turn" and not any(isinstance(x, Tensor) for x in given))
            x = torch.rand((7, 5, 5) if moved else (5, 5, 7), generator=generator) * 3
            given.append((x.permute(1, 2, 0) if moved else x).to(dtype))
        elif kind in ("number", "float"):
            given.append(2)
        elif argument.has_default_value() or argument.kwarg_only:
            break
        elif kind in ("int", "bool") and argument.name != "input_dtype":
            given.append(kind == "int")
        else:
            return None  # a dtype of a result, a list
    return given if any(isinstance(x, Tensor) for x in given) else None


def written(op: Any, given: list[Any]) -> tuple[Tensor, Tensor] | None:
    """(An op's result, what its `out=` form writes where the op's shape rule says); None where it has no such form."""
    try:
        result = op(*given)
        with FakeTensorMode() as mode:
            planned = op(*[mode.from_tensor(x) if isinstance(x, Tensor) else x for x in given])
    except (RuntimeError, IndexError, ValueError, NotImplementedError):
        return None  # not of these shapes or dtypes
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") if isinstance(x, Tensor) else x for i, x in enumerate(given)]
    for node, x in zip(nodes, given, strict=True):
        if isinstance(node, fx.Node):
            node.meta["val"] = x
    call = graph.call_function(op, tuple(nodes))
    call.meta["val"] = planned
    if (form := form_of(call)) is None:
        return None
    into = torch.empty_strided(planned.shape, planned.stride(), dtype=planned.dtype).fill_(3)
    (name,) = [a.name for a in form._schema.arguments if a.is_out]
    form(*given, **{name: into})
    return result, into


@pytest.mark.parametrize("order", ["plain", "moved", "in turn"])
@pytest.mark.filterwarnings("ignore")
def test_an_out_form_writes_the_bits_of_its_op_into_any_strides(order: str) -> None:
    """`2 ** x` of a transposed x lies in another order than torch's shape rule says: written there by its form, it is
    made by a vector's power instead of a number's, and the last bits differ."""
    tried, wrong = 0, []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for op in [getattr(packet, overload) for overload in getattr(packet, "overloads", list)()]:
            if op._schema.is_mutable or [str(r.type) for r in op._schema.returns] != ["Tensor"] or not of(op).out_form:
                continue
            for dtype in (torch.float32, torch.float64):
                given = operands(op, dtype, order)
                both = None if given is None else written(op, given)
                if both is not None:
                    tried += 1
                    wrong += [] if same_bits(*both) else [str(op)]
    assert tried > 250, tried
    assert wrong == []


def test_ops_of_fzeros_own_are_called_without_torchs_wrapper() -> None:
    """It took 10 us a call, more than the kernel for a small parameter."""
    for op in (torch.ops.fzero.adamw_.default, torch.ops.fzero.random_fold_in_tensor.default):
        body = kernel_of(op)
        assert inspect.isfunction(body)
        assert list(inspect.signature(body).parameters) == [a.name for a in op._schema.arguments]
    assert kernel_of(torch.ops.aten.add.out) is torch.ops.aten.add.out._op


def _images(op: str) -> tuple[Any, ...]:
    """Arguments of an op on images, as a step has them."""
    x, small, rows = torch.randn(2, 4, 8, 10), torch.randn(2, 4, 4, 5), torch.randn(2, 4, 20)
    cube, small_cube = torch.randn(2, 3, 4, 6, 8), torch.randn(2, 3, 2, 3, 4)
    twice, plain = ([2, 2], [2, 2], [0, 0]), ([2, 2, 2], [2, 2, 2], [0, 0, 0])
    places, deep = aten.max_pool2d_with_indices(x, [2, 2])[1], aten.max_pool3d_with_indices(cube, [2, 2, 2])[1]
    cases: dict[str, tuple[Any, ...]] = {
        "avg_pool2d": (x, *twice), "avg_pool2d_backward": (small, x, *twice, False, True, None),
        "avg_pool3d": (cube, *plain), "avg_pool3d_backward": (small_cube, cube, *plain, False, True, None),
        "max_pool2d_with_indices_backward": (small, x, *twice, [1, 1], False, places),
        "max_pool3d_with_indices": (cube, [2, 2, 2]),
        "max_pool3d_with_indices_backward": (small_cube, cube, *plain, [1, 1, 1], False, deep),
        "adaptive_max_pool2d": (x, [4, 5]), "adaptive_max_pool2d_backward": (small, x, places),
        "upsample_nearest2d_backward": (x, [8, 10], [2, 4, 4, 5], None, None),
        "upsample_bilinear2d_backward": (x, [8, 10], [2, 4, 4, 5], False, None, None),
        "upsample_nearest1d_backward": (rows, [20], [2, 4, 10], None), "reflection_pad1d": (rows, [2, 3]),
        "reflection_pad2d": (x, [1, 2, 3, 1]), "glu": (x, 1),
        "glu_backward": (x[:, :2].contiguous(), x, 1), "relu": (x,),
    }  # fmt: skip
    return cases[op]


IMAGE_OPS = (
    "avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward max_pool2d_with_indices_backward "
    "max_pool3d_with_indices max_pool3d_with_indices_backward adaptive_max_pool2d adaptive_max_pool2d_backward "
    "upsample_nearest2d_backward upsample_bilinear2d_backward upsample_nearest1d_backward reflection_pad1d "
    "reflection_pad2d glu glu_backward relu"
)


@pytest.mark.parametrize("name", IMAGE_OPS.split())
def test_an_op_on_images_writes_its_result_where_it_belongs(name: str) -> None:
    """They were made by the allocator and copied: the same bits, and no memory of their own."""
    op, args = getattr(aten, name).default, _images(name)
    tensors = [x for x in args if isinstance(x, Tensor)]

    def fn(*given: Tensor) -> list[Tensor]:
        rest = iter(given)
        result = op(*[next(rest) if isinstance(x, Tensor) else x for x in args])
        return list(result) if isinstance(result, tuple) else [result]

    gm = segments.normalised(make_fx(fn, tracing_mode="fake")(*tensors))
    expected = gm(*tensors)
    outs = [torch.full_like(x, 7) for x in expected]
    layout = segment_memory.layout(gm)
    calls = bind.bind(gm, [x.clone() for x in tensors], outs, torch.empty(layout.nbytes, dtype=torch.uint8))
    _, asked = measured_peak(lambda: [call() for call in calls])
    assert asked == 0
    assert all(same_bits(a, b) for a, b in zip(outs, expected, strict=True))
