"""Capture: nothing is baked in silently, what the two levels hold, and when a step is traced again.

A refusal must name the leaf or variable, the user's line (the one marked `# here`) and what to write instead.
"""

import functools
import inspect
import logging
import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fzero
from fzero import CaptureError, TreeError
from fzero.capture import trace_step
from fzero.capture.graph import Graph
from fzero.ir import fx_nodes
from fzero.state.state import State

REGION, REDUCE = torch.ops.fzero.region.default, torch.ops.fzero.reduce.default
SGD = fzero.optim.sgd(0.1)
Loss = Callable[[Any, Any], Any]


def params() -> dict[str, Tensor]:
    return {"w": torch.tensor([1.0, 2.0, 3.0])}


def batch() -> Tensor:
    return torch.tensor([[1.0, 0.0, 1.0], [0.0, 2.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 3.0]])


def mean_square(p: Any, b: Tensor) -> Tensor:
    return ((b @ p["w"]) ** 2).mean()


def here(fn: Callable[..., Any]) -> str:
    """`file:line` of the line of `fn` that is marked."""
    lines, first = inspect.getsourcelines(fn)
    return f"{Path(__file__).name}:{next(first + i for i, line in enumerate(lines) if '# here' in line)}"


def defined(fn: Callable[..., Any]) -> str:
    return f"{Path(__file__).name}:{inspect.getsourcelines(fn)[1]}"


def said(error: type[Exception], fn: Callable[[], Any], *parts: str) -> str:
    """The message of the error that `fn` raises: exactly of this class, with all these parts."""
    with pytest.raises(error) as caught:
        fn()
    assert type(caught.value) is error
    message = str(caught.value)
    for part in parts:
        assert part in message, f"{part!r} is missing in: {message}"
    return message


def refused(loss: Loss, *parts: str, p: Any = None, b: Any = None, error: type[Exception] = CaptureError) -> str:
    """Lowers a step with this loss, which must be refused."""
    spec = fzero.Spec(loss=loss, optimizer=SGD)
    return said(error, lambda: fzero.lower(spec, params() if p is None else p, batch() if b is None else b), *parts)


def refused_step(step: Loss, *parts: str, state: Any = None, error: type[Exception] = CaptureError, **spec: Any) -> str:
    def run() -> None:
        fzero.lower(fzero.Spec(step=step, **spec), {"p": params()} if state is None else state, batch())

    return said(error, run, *parts)


def after_one_step(loss: Loss, p: Any = None, b: Any = None, **spec: Any) -> State:
    state = fzero.init(params() if p is None else p, fzero.Spec(loss=loss, optimizer=SGD, **spec))
    return fzero.step(state, batch() if b is None else b)


def agrees(loss: Loss) -> State:
    """One step of a loss gives the loss and the parameters that plain autograd gives."""
    state = after_one_step(loss)
    w = params()["w"].requires_grad_()
    value = loss({"w": w}, batch())
    value.backward()
    torch.testing.assert_close(state.metrics["loss"], value.detach())
    torch.testing.assert_close(state.params["w"].full(), w.detach() - 0.1 * w.grad)
    return state


def captured(step: Loss, state: Any = None, b: Any = None, **options: Any) -> Graph:
    return trace_step.capture(
        step, {"p": params()} if state is None else state, batch() if b is None else b, **{"axis": "dp", **options}
    )


def nodes(gm: torch.fx.GraphModule, target: Any = None) -> list[torch.fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and target in (None, n.target)]


def sgd_step(loss: Loss, **options: Any) -> Loss:
    def step(state: Any, b: Any) -> Any:
        value, grads = fzero.value_and_grad(loss, **options)(state["p"], b)
        return {**state, "p": fzero.tree.map(lambda p, g: p - 0.1 * g, state["p"], grads)}, {"value": value}

    return step


# --- Python values in the state ---------------------------------------------------------------------------------------


def test_python_numbers_in_the_state_become_tensors_and_count() -> None:
    def step(state: Any, b: Tensor) -> Any:
        return {**state, "n": state["n"] + 1, "f": state["f"] * 2}, {}

    state = fzero.init({"p": params(), "n": 3, "f": 0.5}, fzero.Spec(step=step))
    for _ in range(3):
        state = fzero.step(state, batch())
    assert len(state.runtime.programs) == 1, "a counter must not be part of the program"
    full = fzero.unshard(state.tree)
    assert (full["n"].item(), full["n"].dtype, full["n"].shape) == (6, torch.int64, ())
    assert (full["f"].item(), full["f"].dtype) == (4.0, torch.float32)


@pytest.mark.parametrize("value", ["adam", True, b"x", 1j, torch.float32, print, 10**30, Enum("E", "A").A])
def test_other_python_values_in_the_state_are_refused(value: Any) -> None:
    spec = fzero.Spec(step=lambda s, b: (s, {}))
    said(
        TreeError, lambda: fzero.init({"p": params(), "v": value}, spec), "state['v'] is", repr(value), "a state holds"
    )


def test_a_python_number_returned_for_a_leaf_is_refused() -> None:
    refused_step(
        lambda s, b: ({**s, "n": 4}, {}),
        "state['n'] became the Python value 4",
        "as in state['n'] + 1",
        state={"p": params(), "n": 3},
    )


@pytest.mark.parametrize("value", [1.0, "text", 3, True])
def test_metrics_that_are_python_values_are_refused(value: Any) -> None:
    refused_step(lambda s, b: (s, {"m": [b.sum(), value]}), f"metric 'm/1' is the Python value {value!r}", "Return a")


# --- closed-over tensors ----------------------------------------------------------------------------------------------

GLOBAL = {"heads": [torch.nn.Parameter(torch.ones(3))]}


class Model:
    def __init__(self) -> None:
        self.head = torch.nn.Parameter(torch.ones(3))

    def loss(self, p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b) * self.head.sum()  # here

    def __call__(self, p: Any, b: Tensor) -> Tensor:
        return self.loss(p, b)


def test_closed_over_parameters_are_refused_by_name() -> None:
    scale = torch.nn.Parameter(torch.ones(()))
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    nested = {"a": {"b": torch.nn.Parameter(torch.ones(3))}}
    scaled = torch.ones(3, requires_grad=True) * 2

    def directly(p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b) * scale  # here

    def in_a_module(p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b) * model(b).sum()  # here

    def in_a_dict(p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b) * nested["a"]["b"].sum()  # here

    def in_a_global(p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b) * GLOBAL["heads"][0].sum()  # here

    def computed(p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b) * scaled.sum()  # here

    def by_default(p: Any, b: Tensor, m: Any = model) -> Tensor:
        return mean_square(p, b) * m[1].bias.sum()  # here

    def helped(p: Any, b: Tensor) -> Tensor:
        return directly(p, b)

    def first(m: Any, p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b) * m[1].bias.sum()  # here

    advice = "requires grad: it would get no gradient and never change. Pass it in through the parameters"
    refused(directly, "tensor 'scale' is closed over at", here(directly), advice)
    refused(helped, "tensor 'scale' is closed over at", here(directly), advice)
    refused(in_a_module, "tensor 'model.0.weight' is closed over at", here(in_a_module), advice)
    refused(in_a_dict, "tensor \"nested['a']['b']\" is closed over at", here(in_a_dict), advice)
    refused(in_a_global, "tensor \"GLOBAL['heads'][0]\" is closed over at", here(in_a_global), advice)
    refused(computed, "tensor 'scaled' is closed over at", here(computed), advice)
    refused(by_default, "tensor 'm.1.bias' is closed over at", here(by_default), advice)
    refused(functools.partial(first, model), ".1.bias' is closed over at", here(first), advice)
    refused(Model().loss, "tensor 'self.head' is closed over at", here(Model.loss), advice)
    refused(Model(), ".head' is closed over at", here(Model.loss), advice)


def test_a_closed_over_parameter_in_the_update_is_refused_too() -> None:
    scale = torch.nn.Parameter(torch.ones(()))

    def step(s: Any, b: Tensor) -> Any:
        return {"p": fzero.tree.map(lambda p: p * scale, s["p"])}, {}  # here

    refused_step(step, "tensor 'scale' is closed over at", here(step), "Pass it in through the parameters")


def test_a_frozen_teacher_needs_no_gradient() -> None:
    teacher = torch.nn.Linear(3, 1)

    def under_no_grad(p: Any, b: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(b).squeeze(1)
        return ((b @ p["w"] - target) ** 2).mean()

    def detached(p: Any, b: Tensor) -> Tensor:
        return ((b @ (p["w"] - teacher.weight.detach()[0])) ** 2).mean()

    def both(p: Any, b: Tensor) -> Tensor:
        return under_no_grad(p, b) + teacher(b).sum()  # here

    agrees(under_no_grad)
    agrees(detached)
    refused(both, "tensor 'teacher.weight' is closed over at", here(both))


def test_closed_over_tensors_become_named_constants_whose_bytes_are_in_the_program() -> None:
    table = {"mask": torch.tensor([1.0, 0.0, 2.0])}
    seen = torch.arange(4.0).reshape(2, 2).t()  # not contiguous

    def loss(p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b * table["mask"]) + (seen.reshape(-1) * torch.arange(4.0)).sum() * p["w"].sum()

    state = agrees(loss)
    lowered = next(iter(state.runtime.programs.values()))
    assert set(lowered.graph.constants) == {"table['mask']", "seen"}
    held = {name: b for name, b in state.program.buffers.items() if b.kind == "constant"}
    assert sorted(b.nbytes for b in held.values()) == [12, 16]
    assert any("mask" in name for name in held)
    for line in str(state.program).splitlines():
        if " -> " in line:
            assert not any(name in line.split(" -> ")[1].split("  ")[0].split() for name in held), "read only"
    torch.testing.assert_close(table["mask"], torch.tensor([1.0, 0.0, 2.0]))


def test_one_closed_over_tensor_used_twice_is_one_constant() -> None:
    mask = torch.tensor([1.0, 0.0, 2.0])

    def step(s: Any, b: Tensor) -> Any:
        loss = lambda p, b: mean_square(p, b * mask) + (p["w"] * mask).sum()  # noqa: E731
        value, grads = fzero.value_and_grad(loss)(s["p"], b)
        return {"p": {"w": s["p"]["w"] - mask * grads["w"]}}, {"value": value}

    assert list(captured(step).constants) == ["mask"]


def test_literal_tensors_are_fine() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        steps = torch.tensor([1.0, 2.0, 3.0])
        steps += 1
        steps[0] = 7
        return mean_square(p, b) * torch.tensor(0.5) + (p["w"] * steps).sum()

    state = agrees(loss)
    sizes = [b.nbytes for b in state.program.buffers.values() if b.kind == "constant"]
    assert sizes == [12], "a literal of one element is part of a segment, a longer one is a constant that counts"


# --- in-place work ----------------------------------------------------------------------------------------------------


def _add(x: Tensor) -> None:
    x.add_(1)  # here


def _augmented(x: Tensor) -> None:
    x += 1  # here


def _item(x: Tensor) -> None:
    x[0] = 5  # here


def _view(x: Tensor) -> None:
    x.view(-1).mul_(2)  # here


def _data(x: Tensor) -> None:
    x.data.zero_()  # here


def _detached(x: Tensor) -> None:
    x.detach().relu_()  # here


def _out(x: Tensor) -> None:
    torch.add(torch.ones(3), 1, out=x)  # here


def _copy(x: Tensor) -> None:
    x.copy_(torch.zeros(3))  # here


def _foreach(x: Tensor) -> None:
    torch._foreach_add_([x], 1.0)  # here


IN_PLACE = [_add, _augmented, _item, _view, _data, _detached, _out, _copy, _foreach]


@pytest.mark.parametrize("change", IN_PLACE, ids=lambda fn: fn.__name__.strip("_"))
def test_in_place_on_a_closed_over_tensor_is_refused_before_it_runs(change: Callable[[Tensor], None]) -> None:
    counts = torch.tensor([1.0, 2.0, 3.0])

    def loss(p: Any, b: Tensor) -> Tensor:
        change(counts)
        return mean_square(p, b)

    def step(s: Any, b: Tensor) -> Any:
        change(counts)
        return s, {}

    parts = ("tensor 'counts' is closed over and changed in place by", here(change), "put it in the state")
    refused(loss, *parts)
    assert counts.tolist() == [1.0, 2.0, 3.0]
    refused_step(step, *parts)
    assert counts.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("change", IN_PLACE, ids=lambda fn: fn.__name__.strip("_"))
def test_in_place_on_the_state_or_the_batch_is_refused(change: Callable[[Tensor], None]) -> None:
    def on_state(s: Any, b: Any) -> Any:
        change(s["p"]["w"])
        return s, {}

    def on_batch(s: Any, b: Any) -> Any:
        change(b["x"])
        return s, {}

    def on_batch_in_loss(p: Any, b: Any) -> Tensor:
        change(b["x"])
        return (p["w"] * b["x"]).sum()

    given = {"x": torch.ones(3)}
    state = fzero.init({"p": params()}, fzero.Spec(step=on_state))
    advice = "a step is pure. Return a new value instead"
    said(CaptureError, lambda: fzero.step(state, given), "state['p/w'] is changed in place by", here(change), advice)
    assert state.tree["p"]["w"].full().tolist() == [1.0, 2.0, 3.0]
    state = fzero.init({"p": params()}, fzero.Spec(step=on_batch))
    said(CaptureError, lambda: fzero.step(state, given), "batch['x'] is changed in place by", here(change), advice)
    said(
        CaptureError,
        lambda: after_one_step(on_batch_in_loss, b=given),
        "batch['x'] is changed in",
        here(change),
        advice,
    )
    assert given["x"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "change", [_add, _augmented, _item, _view, _data, _detached], ids=lambda fn: fn.__name__.strip("_")
)
def test_in_place_on_a_parameter_in_the_loss_is_refused(change: Callable[[Tensor], None]) -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        change(p["w"])
        return mean_square(p, b)

    refused(loss, "is changed in place", here(change), "a step is pure. Return a new value instead")


SQUARE = torch.arange(9.0).view(3, 3).cos()


def _beside_a_view(x: Tensor) -> Tensor:
    view = x.t()
    x.transpose_(0, 1)  # here
    return view * x


def _of_a_view_written_to(x: Tensor) -> Tensor:
    x = x.t()
    x.t_()  # here
    return x.mul_(SQUARE)


@pytest.mark.parametrize("change", [_beside_a_view, _of_a_view_written_to])
def test_a_shape_changed_in_place_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    """Eager autograd follows it, a trace would give wrong gradients."""

    def loss(p: Any, b: Tensor) -> Tensor:
        return (change(torch.outer(p["w"], p["w"])) * SQUARE).sum()

    refused(loss, here(change), "changes the shape of a tensor in place that shares", "Write x = x.transpose(...)")


def _alone(x: Tensor) -> Tensor:
    return x.transpose_(0, 1)


def _written_to(x: Tensor) -> Tensor:
    x.t_()
    x[1].mul_(3.0)
    return x


def _of_a_view(x: Tensor) -> Tensor:
    x = x[1:]
    x.t_()
    return x * SQUARE[:, :2] * SQUARE.sum()


def _twice(x: Tensor) -> Tensor:
    x = x.unsqueeze(0)
    x.squeeze_()
    return x.unsqueeze_(1)


@pytest.mark.parametrize("change", [_alone, _written_to, _of_a_view, _twice])
def test_another_shape_changed_in_place_is_followed(change: Callable[[Tensor], Tensor]) -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        x = change(torch.outer(p["w"], p["w"].sin()))
        return (x * x * torch.arange(x.numel()).view(x.shape).cos()).sum() * b.mean()

    w, b = torch.tensor([1.0, 2.0, 3.0]), torch.ones(2, 3)
    own = w.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss({"w": own}, b), own)

    def step(s: Any, b: Tensor) -> Any:
        _, gradients = fzero.value_and_grad(loss)(s, b)
        return s, {"gradient": gradients["w"]}

    state = fzero.step(fzero.init({"w": w}, fzero.Spec(step=step)), b)
    torch.testing.assert_close(state.metrics["gradient"], expected)


def _exchanged(p: Any, b: Tensor) -> Tensor:
    y = b * p["w"]
    y.data = y.data * 3  # here
    return (y**2).mean()


def _normed(p: Any, b: Tensor) -> Tensor:
    layer = torch.nn.Linear(3, 3).requires_grad_(False)
    layer.weight.data = torch.nn.functional.normalize(layer.weight.data)  # here
    return (layer(b) * p["w"]).mean()


@pytest.mark.parametrize("loss", [_exchanged, _normed])
def test_a_value_that_is_exchanged_is_refused(loss: Callable[[Any, Tensor], Tensor]) -> None:
    """Not even a dispatch mode sees `x.data = y`: the trace went on with the old value."""
    refused(loss, "`.data = ...`", here(loss), "puts another value into a tensor, which a trace cannot follow")


def test_what_cannot_be_made_pure_is_refused_with_its_line() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        z = torch.complex(p["w"], p["w"]).conj()
        z.mul_(2j)
        return z.abs().sum()

    refused(
        loss,
        "test_trace_step.py",
        "in-place work that cannot be made pure",
        "Write x = x.op(...) instead of x.op_(...)",
    )


def test_in_place_in_a_loss_on_a_tensor_of_the_step_is_refused() -> None:
    def step(s: Any, b: Tensor) -> Any:
        twice = b * 2

        def loss(p: Any, b: Tensor) -> Tensor:
            twice.add_(1)  # here
            return mean_square(p, b) * twice.sum()

        return s, {"value": fzero.value_and_grad(loss)(s["p"], b)[0]}

    refused_step(step, "is closed over and changed in place by", here(step))


def test_batchnorm_buffers_are_refused_by_name() -> None:
    norm = torch.nn.BatchNorm1d(3, affine=False)

    def loss(p: Any, b: Tensor) -> Tensor:
        return norm(b * p["w"]).sum()  # here

    refused(loss, "tensor 'norm.num_batches_tracked' is closed over and changed in place", here(loss), "in the state")
    assert (norm.num_batches_tracked.item(), norm.running_mean.tolist()) == (0, [0.0, 0.0, 0.0])


def test_in_place_on_intermediates_gives_the_values_of_the_same_work_done_eagerly() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        y = b * p["w"]
        y.mul_(2).add_(b)
        y[0] = 3.0
        y[:, 1].sub_(1)
        F.relu_(y)
        z = torch.zeros(4)
        z.index_add_(0, torch.tensor([1, 3]), y.sum(0)[:2])
        torch._foreach_mul_([z], 2.0)
        return (y.sum(1) + z).pow_(2).mean()

    agrees(loss)


def test_in_place_on_gradients_in_a_step_gives_the_right_values() -> None:
    def step(s: Any, b: Tensor) -> Any:
        _, grads = fzero.value_and_grad(mean_square)(s["p"], b)
        torch._foreach_mul_([grads["w"]], 0.5)
        grads["w"].clamp_(-1, 1)
        return {"p": {"w": s["p"]["w"] - grads["w"]}}, {}

    state = fzero.step(fzero.init({"p": params()}, fzero.Spec(step=step)), batch())
    _, grads = fzero.value_and_grad(mean_square)(params(), batch())
    torch.testing.assert_close(state.tree["p"]["w"].full(), params()["w"] - (0.5 * grads["w"]).clamp(-1, 1))


def test_containers_may_be_changed() -> None:
    def loss(p: Any, b: Any) -> Tensor:
        p["w"] = p["w"] * 2
        return mean_square(p, b.pop("x"))

    given = {"x": batch()}
    state = after_one_step(loss, b=given)
    assert list(given) == ["x"], "the user's own batch is another container"
    assert state.metrics["loss"] == mean_square({"w": 2 * params()["w"]}, batch())


# --- ambient randomness -----------------------------------------------------------------------------------------------

RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda b: torch.rand(3),
    "randn_like": torch.randn_like,
    "dropout": lambda b: F.dropout(b, 0.5),
    "module": lambda b: torch.nn.Dropout(0.5)(b),
    "bernoulli": lambda b: torch.bernoulli(b.sigmoid()),
    "randperm": lambda b: torch.randperm(3),
    "normal_": lambda b: torch.empty(3).normal_(),
    "randint": lambda b: torch.randint(0, 3, (3,)),
    "multinomial": lambda b: torch.multinomial(b + 1, 1),
    "gumbel_softmax": F.gumbel_softmax,
    "seeded": lambda b: torch.rand(3, generator=torch.Generator().manual_seed(0)),
    "init": lambda b: torch.nn.init.kaiming_uniform_(torch.empty(3, 3)),
    "attention": lambda b: F.scaled_dot_product_attention(b[None], b[None], b[None], dropout_p=0.5),
}


@pytest.mark.parametrize("name", RANDOM)
def test_ambient_randomness_is_refused(name: str) -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b) + RANDOM[name](b).sum()  # here

    def step(s: Any, b: Tensor) -> Any:
        return s, {"m": RANDOM[name](b).sum()}  # here

    parts = ("draws from torch's ambient generator", "lsewhere use fzero.random with a key from the state or the batch")
    line = here(loss) if name not in ("module", "init", "seeded", "randperm") else Path(__file__).name
    before = torch.get_rng_state()
    refused(loss, line if name in ("randn_like", "gumbel_softmax") else Path(__file__).name, *parts)
    refused_step(step, *parts)
    assert torch.equal(torch.get_rng_state(), before), "the refused draw did not happen"


def test_dropout_that_draws_nothing_is_fine() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        q = (b * p["w"]).view(1, 1, 4, 3)
        y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.0, is_causal=True).sum()
        return y + mean_square(p, F.dropout(F.dropout(b, 0.0), 0.5, training=False))

    agrees(loss)


def test_keyed_randomness_is_fine_and_draws_anew_each_step() -> None:
    def step(s: Any, b: Tensor) -> Any:
        key = fzero.random.fold_in(fzero.random.key(1), s["n"])
        return {**s, "n": s["n"] + 1}, {"draw": fzero.random.uniform(key)}

    state = fzero.init({"n": 0}, fzero.Spec(step=step))
    drawn = []
    for n in range(3):
        state = fzero.step(state, batch())
        drawn.append(state.metrics["draw"].item())
        assert drawn[-1] == fzero.random.uniform(fzero.random.fold_in(fzero.random.key(1), n)).item()
    assert len(set(drawn)) == 3


# --- values that are known only when the program runs -----------------------------------------------------------------


def _assert_finite(x: Tensor) -> int:
    assert torch.isfinite(x).all()  # here
    return 1


def _if(x: Tensor) -> int:
    if x.sum() > 0:  # here
        return 1
    return 2


def _while(x: Tensor) -> Tensor:
    while x.norm() > 1:  # here
        x = x / 2
    return x.sum()


DATA_DEPENDENT: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.detach().sum()),
    "int": lambda x: int(x.sum()),
    "tolist": lambda x: sum(x[0].tolist()),
    "range": lambda x: sum(range(x.sum().long())),
    "index": lambda x: [1, 2, 3, 4][x.argmax()],
    "slice": lambda x: x[: x.argmax()].sum(),
    "max": lambda x: max(x.sum(), x.mean()),
    "in": lambda x: int(3 in x),
    "equal": lambda x: int(torch.equal(x, x + 1)),
    "allclose": lambda x: int(torch.allclose(x, x + 1)),
    "mask": lambda x: x[x > 0].sum(),
    "masked_select": lambda x: x.masked_select(x > 0).sum(),
    "nonzero": lambda x: x.nonzero().sum(),
    "where": lambda x: torch.where(x > 0)[0].sum(),
    "unique": lambda x: x.unique().sum(),
    "one_hot": lambda x: F.one_hot(x.long()).sum(),
    "arange": lambda x: torch.arange(x.sum()).sum(),
    "full": lambda x: torch.full((3,), x.sum()).sum(),
    "repeat": lambda x: torch.repeat_interleave(x[0], x[0].long()).sum(),
}


OTHERS = {
    "unique": ("torch/functional.py:", "torch.sort keeps the shape"),
    "repeat": ("Say output_size=",),
    "one_hot": ("Say num_classes=",),
}


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_what_depends_on_a_value_is_refused(name: str) -> None:
    fn = DATA_DEPENDENT[name]

    def in_loss(p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b) * fn(b)

    def in_step(s: Any, b: Tensor) -> Any:
        return s, {"m": b.sum() * fn(b)}

    instead = OTHERS.get(name, ("torch.where(x > 0, a, b)", "multiply by the mask"))
    parts = (defined(fn), "which is known only when it runs", *instead)
    refused(in_loss, *parts)
    refused_step(in_step, *parts)


@pytest.mark.parametrize("fn", [_assert_finite, _if, _while], ids=lambda fn: fn.__name__.strip("_"))
def test_a_branch_on_a_value_is_refused_with_its_line(fn: Callable[[Tensor], Any]) -> None:
    refused(lambda p, b: mean_square(p, b) * fn(b), here(fn), "which is known only when it runs", "torch.where")
    refused(lambda p, b: mean_square(p, b) * fn(p["w"]), here(fn), "which is known only when it runs", "torch.where")


def test_branches_without_values_are_fine() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        y = torch.where(b > 0, b, 2.0) * p["w"]
        y = y.masked_fill(b > 2, 0.0).index_put((b < 0,), torch.tensor(1.0))
        return y.sum() if b.shape[0] > 2 and len(b) == 4 and b.is_contiguous() else y.mean()

    agrees(loss)


def test_numpy_lists_printing_of_values_and_sparse_tensors_are_refused_with_the_line() -> None:
    def numpy(p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b) * b.numpy().sum()  # here

    def listed(p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b) * torch.tensor([p["w"].sum(), 1.0]).sum()  # here

    def printed(p: Any, b: Tensor) -> Tensor:
        assert f"{p['w'].sum():.3f}"  # here
        return mean_square(p, b)

    def sparse(p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b) * p["w"].to_sparse().sum()  # here

    refused(sparse, here(sparse), "aten._to_sparse", "makes a tensor of torch.sparse_coo", "are dense")
    refused(numpy, here(numpy), "numpy would need a tensor's values", "pass it in the batch")
    refused(listed, here(listed), "known only when the program runs", "torch.stack([x, y])")
    refused(printed, here(printed), "known only when the program runs", "Return it as a metric")


# --- value_and_grad and reductions where they do not belong -----------------------------------------------------------


def test_value_and_grad_inside_a_loss_or_a_transform_is_refused() -> None:
    def in_loss(p: Any, b: Tensor) -> Tensor:
        return fzero.value_and_grad(mean_square)(p, b)[0]  # here

    def in_vmap(p: Any, b: Tensor) -> Tensor:
        per_row = lambda x: fzero.grad(mean_square)(p, x[None])["w"]  # noqa: E731  # here
        return torch.vmap(per_row)(b).sum()

    def in_grad(p: Any, b: Tensor) -> Tensor:
        inner = lambda w: fzero.value_and_grad(mean_square)({"w": w}, b)[0]  # noqa: E731  # here
        return torch.func.grad(inner)(p["w"]).sum()

    parts = ("value_and_grad was called inside a loss or a torch.func transform", "Inside a loss use torch.func.grad")
    for fn in (in_loss, in_vmap, in_grad):
        refused(fn, here(fn), *parts)
        refused_step(lambda s, b, fn=fn: (s, {"m": fn(s["p"], b)}), here(fn), *parts) if fn is not in_loss else None
    said(CaptureError, lambda: in_vmap(params(), batch()), here(in_vmap), *parts)


@pytest.mark.parametrize("op", ["pmean", "psum", "pmax"])
def test_reductions_inside_a_loss_are_refused(op: str) -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        return getattr(fzero, op)(mean_square(p, b))  # here

    refused(loss, f"fzero.{op} was called inside a loss at", here(loss), "reduce what value_and_grad returns")


def test_reductions_of_the_wrong_thing() -> None:
    refused_step(lambda s, b: (s, {"m": fzero.psum(3)}), "fzero.psum of a value: needed a tensor, got 3")
    refused_step(lambda s, b: (s, {"m": fzero.psum({"a": ["x"]})}), "fzero.psum of a/0: needed a tensor, got 'x'")
    refused_step(lambda s, b: (s, {"m": fzero.pmean(b.long())}), "needed a floating dtype. Use psum, or cast")
    refused_step(lambda s, b: (s, {"m": fzero.pmean(b, "tp")}), "over axis 'tp'", "'dp'")


# --- losses -----------------------------------------------------------------------------------------------------------


def _vector(p: Any, b: Tensor) -> Any:
    return b @ p["w"]


def _one_element(p: Any, b: Tensor) -> Any:
    return (b @ p["w"]).sum(0, keepdim=True)


def _integer(p: Any, b: Tensor) -> Any:
    return mean_square(p, b).long()


def _complex(p: Any, b: Tensor) -> Any:
    return mean_square(p, b) * 1j


def _number(p: Any, b: Tensor) -> Any:
    return 1.0


def _nothing(p: Any, b: Tensor) -> Any:
    return None


def _dict(p: Any, b: Tensor) -> Any:
    return {"loss": mean_square(p, b)}


def _tuple(p: Any, b: Tensor) -> Any:
    return mean_square(p, b), {}


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (_vector, "f32[4]"),
        (_one_element, "f32[1]"),
        (_integer, "i64[]"),
        (_complex, "c64[]"),
        (_number, "float 1.0"),
        (_nothing, "NoneType None"),
        (_dict, "dict"),
    ],
)
def test_a_loss_is_a_floating_scalar(loss: Loss, given: str) -> None:
    refused(loss, "a loss is a floating 0-d tensor", defined(loss), f"returned {given}", ".mean() or .sum()")


def test_a_loss_that_returns_a_tuple_is_told_about_aux() -> None:
    refused(_tuple, "returned a tuple", defined(_tuple), "has_aux=True")
    refused_step(sgd_step(_vector, has_aux=True), "with has_aux=True a loss returns (loss, aux)", defined(_vector))


def test_aux() -> None:
    def loss(p: Any, b: Tensor) -> Any:
        y = b @ p["w"]
        return (y**2).mean(), {"y": y, "none": None, "list": [y.sum()]}

    state = fzero.step(fzero.init({"p": params()}, fzero.Spec(step=sgd_step(loss, has_aux=True))), batch())
    value, aux = state.metrics["value"]
    assert value == mean_square(params(), batch())
    assert torch.equal(aux["y"], batch() @ params()["w"])
    assert aux["none"] is None
    assert aux["list"][0] == aux["y"].sum()


def test_aux_of_microbatches_is_averaged_and_integers_are_the_last_ones() -> None:
    def floating(p: Any, b: Tensor) -> Any:
        return mean_square(p, b), (b @ p["w"]).sum()

    def counting(p: Any, b: Tensor) -> Any:
        return mean_square(p, b), (b > 0).sum()

    spec = fzero.Spec(step=sgd_step(floating, has_aux=True), microbatches=2)
    state = fzero.step(fzero.init({"p": params()}, spec), batch())
    torch.testing.assert_close(state.metrics["value"][1], (batch() @ params()["w"]).sum() / 2)
    spec = fzero.Spec(step=sgd_step(counting, has_aux=True), microbatches=2)
    state = fzero.step(fzero.init({"p": params()}, spec), batch())
    assert int(state.metrics["value"][1]) == int((batch().chunk(2)[1] > 0).sum())


def test_aux_that_is_a_python_value_is_refused() -> None:
    def loss(p: Any, b: Tensor) -> Any:
        return mean_square(p, b), {"lr": 0.1}

    refused_step(sgd_step(loss, has_aux=True), "aux['lr']", defined(loss), "is the Python value 0.1")


def test_values_smuggled_out_of_a_loss_are_refused() -> None:
    kept: dict[str, Tensor] = {}

    def loss(p: Any, b: Tensor) -> Tensor:
        kept["accuracy"] = (b > 0).float().mean()
        return mean_square(p, b)

    def step(s: Any, b: Tensor) -> Any:
        value, _ = fzero.value_and_grad(loss)(s["p"], b)
        return s, {"value": value, "accuracy": kept["accuracy"]}

    def later(s: Any, b: Tensor) -> Any:
        return s, {"m": b.sum() + kept["accuracy"]}  # here

    refused_step(step, "was made inside a loss", "as aux (has_aux=True)")
    refused_step(later, "in another trace", here(later))


def test_a_parameter_without_a_gradient_is_named() -> None:
    given = {"w": torch.ones(3), "u": torch.full((2,), 5.0), "deep": [{"v": torch.ones(2)}]}
    refused(mean_square, "'deep/0/v', 'u' get no gradient", defined(mean_square), "allow_unused=True", p=given)
    refused(lambda p, b: mean_square(p, b).detach(), "'w' get no gradient")
    state = after_one_step(mean_square, given, allow_unused=True)
    assert state.params["u"].full().tolist() == [5.0, 5.0]
    assert state.params["w"].full().tolist() != [1.0, 1.0, 1.0]
    refused_step(sgd_step(mean_square), "'u' get no gradient", state={"p": {"w": torch.ones(3), "u": torch.ones(2)}})
    graph = captured(sgd_step(mean_square, allow_unused=True), {"p": {"u": torch.ones(2), "w": torch.ones(3)}})
    assert graph.regions[0].grad_of == (1,)


def test_parameters_must_be_floating() -> None:
    state = {"p": {"w": torch.ones(3), "n": torch.ones(2, dtype=torch.int64)}}
    refused_step(sgd_step(mean_square), "params['n'] is i64[2]", "gradients need floating", state=state)
    refused_step(lambda s, b: (s, {"v": fzero.grad(lambda p: b.sum())({})}), "its first argument has no leaves")


def test_arguments_of_value_and_grad_are_checked() -> None:
    said(CaptureError, lambda: fzero.value_and_grad(3), "value_and_grad of int 3: needed a function")
    said(CaptureError, lambda: fzero.value_and_grad(mean_square, microbatches=0), "microbatches=0", "positive int")
    said(CaptureError, lambda: fzero.grad(mean_square, batch_argnum=0)(params(), batch()), "batch_argnum=0")


def test_microbatches_need_a_batch_that_they_can_cut() -> None:
    def keyword(s: Any, b: Tensor) -> Any:
        return s, {"v": fzero.value_and_grad(lambda p, rows: mean_square(p, rows))(s["p"], rows=b)[0]}

    def closed_over(s: Any, b: Tensor) -> Any:
        return s, {"v": fzero.value_and_grad(lambda p: mean_square(p, b))(s["p"])[0]}

    advice = "pass the batch as an argument (not by closure), or set batch_argnum"
    refused_step(keyword, "microbatches=2 cuts the batch along dim 0", advice, microbatches=2)
    refused_step(closed_over, "microbatches=2 cuts the batch along dim 0", advice, microbatches=2)
    refused_step(sgd_step(mean_square), "batch is f32[4, 3]: dim 0 must be divisible by microbatches=3", microbatches=3)


def test_errors_of_the_users_own_code_arrive_as_they_are() -> None:
    def own(p: Any, b: Tensor) -> Tensor:
        raise KeyError("mine")

    said(KeyError, lambda: after_one_step(own), "mine")
    with pytest.raises(RuntimeError, match=r"reduction dim|size|shape") as caught:
        after_one_step(lambda p, b: (b @ torch.ones(4, 4)).sum() * p["w"].sum())
    assert any(entry.path == Path(__file__) for entry in caught.traceback)


# --- what torch offers inside a loss ----------------------------------------------------------------------------------


def test_torch_func_transforms_work_inside_a_loss() -> None:
    at = lambda b: lambda w: mean_square({"w": w}, b)  # noqa: E731
    agrees(lambda p, b: torch.func.grad(at(b))(p["w"]).pow(2).sum())
    agrees(lambda p, b: torch.vmap(lambda x: torch.func.grad(at(x[None]))(p["w"]))(b).pow(2).sum())
    agrees(lambda p, b: torch.func.jvp(lambda w: at(b)(w) ** 2, (p["w"],), (torch.ones(3),))[1])
    agrees(lambda p, b: torch.func.hessian(lambda w: at(b)(w) ** 2)(p["w"]).sum())
    agrees(lambda p, b: torch.func.jacrev(lambda w: (b @ w) ** 2)(p["w"]).sum())
    agrees(lambda p, b: torch.func.vmap(lambda x: (x * p["w"]).sum() ** 2)(b).mean())


def test_autograd_inside_a_loss_works() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 2 * ctx.saved_tensors[0] * g

    def penalty(p: Any, b: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(mean_square(p, b), p["w"], create_graph=True)
        return mean_square(p, b) + grad.pow(2).sum()

    def rematerialised(p: Any, b: Tensor) -> Tensor:
        return checkpoint(lambda w: mean_square({"w": w}, b), p["w"], use_reentrant=False)

    agrees(penalty)
    agrees(rematerialised)
    agrees(lambda p, b: Square.apply(b @ p["w"]).mean())


def test_a_functional_module_trains() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    given = {name: p.detach() for name, p in model.named_parameters()}

    def loss(p: Any, b: Tensor) -> Tensor:
        return torch.func.functional_call(model, p, (b,)).pow(2).mean()

    state = after_one_step(loss, given)
    value = model(batch()).pow(2).mean()
    value.backward()
    torch.testing.assert_close(state.metrics["loss"], value.detach())
    for name, p in model.named_parameters():
        torch.testing.assert_close(state.params[name].full(), p.detach() - 0.1 * p.grad)


def test_a_compiled_loss_works_or_says_what_to_do() -> None:
    compiled = torch.compile(mean_square, backend="eager")

    def inside(p: Any, b: Tensor) -> Tensor:
        return compiled(p, b)  # here

    try:
        agrees(inside)
        agrees(compiled)
        return
    except CaptureError as error:
        message = str(error)
    advice = "a torch.compiled function is called. Pass the plain one: fzero compiles the step"
    assert message == f"{here(inside)}: {advice}"
    refused(compiled, advice)
    pytest.skip("make_fx refuses compiled functions, and fzero says so")


# --- what a step returns ----------------------------------------------------------------------------------------------


def test_a_step_returns_state_and_metrics() -> None:
    for result in (lambda s: s, lambda s: None, lambda s: (s, {}, {}), lambda s: [s, {}]):
        refused_step(lambda s, b, r=result: r(s), "a step returns (new state, metrics)", "return (state, {})")


def test_the_new_state_has_the_structure_shapes_and_dtypes_of_the_old() -> None:
    tree = {"p": params(), "n": 3}
    for new, part in [
        (lambda s: {"p": s["p"]}, "state['n'] is missing"),
        (lambda s: {**s, "z": s["n"]}, "state['z'] is new"),
        (lambda s: {**s, "p": [s["p"]["w"]]}, "state['p/w'] is missing"),
        (lambda s: {**s, "n": None}, "state['n'] is missing"),
        (lambda s: {**s, "p": {"w": s["p"]["w"][:2]}}, "state['p/w'] was f32[3] and the step made it f32[2]"),
        (lambda s: {**s, "p": {"w": s["p"]["w"].double()}}, "state['p/w'] was f32[3] and the step made it f64[3]"),
        (lambda s: {**s, "n": s["n"] / 2}, "state['n'] was i64[] and the step made it f32[]"),
        (lambda s: {**s, "n": s["n"][None]}, "state['n'] was i64[] and the step made it i64[1]"),
        (
            lambda s: {**s, "n": torch.empty((), dtype=torch.int64, device="meta")},
            "state['n'] was a dense tensor on cpu",
        ),
    ]:
        refused_step(lambda s, b, new=new: (new(s), {}), part, state=tree, error=TreeError)


def test_metrics_may_be_any_pytree_of_tensors() -> None:
    def step(s: Any, b: Tensor) -> Any:
        total = b.sum()
        return s, {"a": [total, total], "b": {"c": s["p"]["w"]}, 3: b > 1, "none": None}

    state = fzero.step(fzero.init({"p": params()}, fzero.Spec(step=step)), batch())
    assert state.metrics["a"][0] == state.metrics["a"][1] == batch().sum()
    assert torch.equal(state.metrics["b"]["c"], params()["w"])
    assert torch.equal(state.metrics[3], batch() > 1)
    assert state.metrics["none"] is None
    sparse = lambda s, b: (s, {"m": b.to_sparse()})  # noqa: E731
    said(
        CaptureError, lambda: captured(sparse), "aten._to_sparse", "torch.sparse_coo", "The tensors of a step are dense"
    )


# --- two levels -------------------------------------------------------------------------------------------------------


def two_losses(s: Any, b: Tensor) -> Any:
    first, grads = fzero.value_and_grad(mean_square)(s["p"], b)
    moved = fzero.tree.map(lambda p, g: p - 0.1 * g, s["p"], grads)
    second, more = fzero.value_and_grad(lambda p, b: (b @ p["w"]).sin().mean())(moved, b)
    return {"p": fzero.tree.map(lambda p, g: p - 0.1 * g, moved, more)}, {"first": first, "second": second}


def test_one_region_node_for_each_value_and_grad() -> None:
    graph = captured(two_losses)
    regions = nodes(graph.gm, REGION)
    assert [node.args[1] for node in regions] == [0, 1]
    assert len(graph.regions) == 2
    outside = {str(node.target) for node in nodes(graph.gm)}
    assert not any("mv" in target or "pow" in target or "sin" in target for target in outside), "losses are inside"
    for region in graph.regions:
        inside = {str(node.target) for node in nodes(region.gm)}
        assert any("mv" in target for target in inside)
        assert not any("fzero" in target for target in inside)
        assert region.grad_of == (0,)
        assert [tuple(v.shape) for v in region.values] == [(), (3,)], "the loss, then a gradient for each leaf"


def test_reductions_are_nodes_with_axis_and_op() -> None:
    graph = captured(two_losses)
    assert [tuple(n.args[1:]) for n in nodes(graph.gm, REDUCE)] == [("mean", "dp")] * 4, "a loss and a gradient, twice"

    def step(s: Any, b: Tensor) -> Any:
        return s, {"a": fzero.psum(b).sum(), "b": fzero.pmax(b).sum(), "c": fzero.pmean({"x": b, "y": b[0]})["x"].sum()}

    assert [n.args[1] for n in nodes(captured(step).gm, REDUCE)][:2] == ["sum", "max"]


def test_microbatches_are_traced_once_at_the_shape_of_one() -> None:
    calls = []

    def loss(p: Any, b: Any) -> Tensor:
        calls.append(tuple(b["x"].shape))
        return mean_square(p, b["x"]) * b["scale"] * b["static"]

    given = {"x": batch(), "scale": torch.tensor(2.0), "static": 3}
    graph = captured(sgd_step(loss), b=given, microbatches=4)
    assert calls == [(1, 3)]
    (region,) = graph.regions
    assert (region.microbatches, region.sliced) == (4, (False, False, True))
    assert len(nodes(graph.gm, REGION)) == 1
    lowered = fzero.lower(fzero.Spec(loss=loss, optimizer=SGD, microbatches=4, zero=0), params(), given, world_size=2)
    runs = [op for op in lowered.program.ops if op.phase == "region"]
    assert {op.microbatch for op in runs} == {0, 1, 2, 3}, "the program repeats it"


def test_traced_values_that_a_loss_closes_over_are_inputs_of_its_region() -> None:
    def step(s: Any, b: Tensor) -> Any:
        scaled = b * s["p"]["w"]
        return s, {"v": fzero.value_and_grad(lambda p: (p["w"] * scaled).sum())(s["p"])[0]}

    graph = captured(step)
    (node,) = nodes(graph.gm, REGION)
    assert [str(n.target) for n in node.args[0]] == [
        n.name if n.op == "placeholder" else "aten.mul.Tensor" for n in node.args[0]
    ]
    assert not graph.constants
    state = fzero.step(fzero.init({"p": params()}, fzero.Spec(step=step)), batch())
    torch.testing.assert_close(state.metrics["v"], (batch() * params()["w"] ** 2).sum())


def test_nodes_carry_the_users_line_and_the_phase() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        return (b @ p["w"]).tanh().sum()  # here

    def step(s: Any, b: Tensor) -> Any:
        _, grads = fzero.value_and_grad(loss)(s["p"], b)
        return {"p": {"w": s["p"]["w"] - 0.125 * grads["w"]}}, {}  # here

    graph = captured(step)
    (region,) = graph.regions
    assert region.source.startswith(Path(__file__).name)
    assert {n.meta["source"] for n in nodes(region.gm)} == {here(loss)} | {
        n.meta["source"] for n in nodes(region.gm) if n.meta.get("phase") == "backward"
    }
    forward = [n for n in nodes(region.gm) if n.meta.get("phase") != "backward"]
    assert [n.target.name() for n in forward] == ["aten::mv", "aten::tanh", "aten::sum"]
    assert any("tanh_backward" in str(n.target) for n in nodes(region.gm) if n.meta.get("phase") == "backward")
    outer = [n for n in nodes(graph.gm) if n.target in (torch.ops.aten.mul.Tensor, torch.ops.aten.sub.Tensor)]
    assert outer
    assert {n.meta["source"] for n in outer} == {here(step)}
    assert all(n.meta.get("source") for n in nodes(graph.gm))


def test_graphs_are_pure() -> None:
    graph = captured(two_losses)
    for gm in (graph.gm, *(region.gm for region in graph.regions)):
        assert not [n for n in gm.graph.nodes if fx_nodes.mutated(n) or n.op == "get_attr"]
        assert all("val" in n.meta for n in nodes(gm))


# --- the varying analysis ---------------------------------------------------------------------------------------------


def test_a_varying_value_that_reaches_the_state_is_refused() -> None:
    def directly(s: Any, b: Tensor) -> Any:
        return {"p": {"w": b[0]}}, {}  # here

    def through_ops(s: Any, b: Tensor) -> Any:
        rows = b.softmax(-1).t() @ b
        return {"p": {"w": torch.where(s["p"]["w"] > 0, rows.sum(0), s["p"]["w"])}}, {}  # here

    def through_aux(s: Any, b: Tensor) -> Any:
        (_, aux), _ = fzero.value_and_grad(lambda p, b: (mean_square(p, b), b.sum()), has_aux=True)(s["p"], b)
        return {"p": {"w": s["p"]["w"] + aux}}, {}  # here

    def own_gradients(s: Any, b: Tensor) -> Any:
        grads = torch.func.grad(mean_square)(s["p"], b)
        return {"p": {"w": s["p"]["w"] - grads["w"]}}, {}  # here

    def one_of_two(s: Any, b: Tensor) -> Any:
        new = fzero.pmean(b.sum()) + b.sum()
        return {"p": {"w": s["p"]["w"] + new}}, {}  # here

    for step in (directly, through_ops, through_aux, own_gradients, one_of_two):
        refused_step(
            step,
            "state['p/w'] would differ between ranks",
            here(step),
            "Reduce it with fzero.pmean, or keep one per rank with fzero.per_rank",
        )


def test_a_reduction_makes_a_value_replicated() -> None:
    def step(s: Any, b: Tensor) -> Any:
        (_, aux), grads = fzero.value_and_grad(lambda p, b: (mean_square(p, b), b.sum()), has_aux=True)(s["p"], b)
        new = s["p"]["w"] - grads["w"] + fzero.pmean(aux) + fzero.pmax(b).sum() + fzero.psum(b[0])
        return {"p": {"w": new}}, {"own": aux, "mean": fzero.pmean(aux), "rows": b * 2}

    graph = captured(step)
    assert sorted(graph.varying_metrics) == ["own", "rows"]


def test_per_rank_leaves_may_vary_but_do_not_spread() -> None:
    def keep(s: Any, b: Tensor) -> Any:
        return {**s, "r": s["r"] + b.sum()}, {}

    def spread(s: Any, b: Tensor) -> Any:
        return {**s, "p": {"w": s["p"]["w"] + s["r"]}}, {}  # here

    tree = {"p": params(), "r": fzero.per_rank(torch.zeros(()))}
    state = fzero.step(fzero.init(tree, fzero.Spec(step=keep)), batch())
    assert state.tree["r"].shape == (1,)
    assert state.tree["r"].full().tolist() == [batch().sum().item()]
    refused_step(spread, "state['p/w'] would differ between ranks", here(spread), state=tree)
    refused_step(
        lambda s, b: (fzero.per_rank(s), {}), "state['p/w'] became per_rank in the step: make it so in fzero.init"
    )


# --- the cache of programs --------------------------------------------------------------------------------------------


def scaled_loss(p: Any, b: Any) -> Tensor:
    return mean_square(p, b["x"]) * b["s"]


class Cached:
    """A state that is stepped with zero learning rate; counts programs and log lines."""

    def __init__(self, caplog: pytest.LogCaptureFixture, loss: Loss = scaled_loss) -> None:
        caplog.set_level(logging.INFO, logger="fzero")
        self.log = caplog
        self.state = fzero.init(params(), fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.0)))

    def __call__(self, **given: Any) -> float:
        self.log.clear()
        self.state = fzero.step(self.state, given)
        return self.state.metrics["loss"].item()

    @property
    def programs(self) -> int:
        return len(self.state.runtime.programs)

    @property
    def messages(self) -> str:
        return "\n".join(r.getMessage() for r in self.log.records if r.name == "fzero")


def test_equal_shapes_do_not_retrace(caplog: pytest.LogCaptureFixture) -> None:
    run, x = Cached(caplog), batch()
    assert run(x=x, s=2) == 2 * mean_square(params(), x)
    assert run(x=2 * x, s=2) == 2 * mean_square(params(), 2 * x), "values are not part of the program"
    assert run(x=x.t().contiguous().t(), s=2) == 2 * mean_square(params(), x), "nor are strides"
    assert run.programs == 1
    assert run.messages == ""


def test_a_new_shape_retraces_and_the_log_says_what_changed(caplog: pytest.LogCaptureFixture) -> None:
    run, x = Cached(caplog), batch()
    run(x=x, s=2)
    assert run(x=x[:2], s=2) == 2 * mean_square(params(), x[:2])
    assert "batch['x'] was f32[4, 3], is f32[2, 3]" in run.messages
    assert "'s'" not in run.messages
    run(x=x, s=2)
    assert run.messages == "", "the first program was kept"
    run(x=x, s=2, more=x.double())
    assert "batch['more'] is new" in run.messages
    run(x=x, s=2, more=x.long())
    assert "batch['more'] was f64[4, 3], is i64[4, 3]" in run.messages
    run(x=x, s=2)
    assert run.programs == 4


def test_static_values_are_part_of_the_key(caplog: pytest.LogCaptureFixture) -> None:
    run, x = Cached(caplog), batch()
    plain = mean_square(params(), x).item()
    for count, value in enumerate([2, 3, 2.5, True, 1, 1.0, 0.0], 1):
        assert run(x=x, s=value) == plain * value
        assert run.programs == count
    assert "batch['s'] was float 1.0, is float 0.0" in run.messages
    assert math.copysign(1.0, run(x=x, s=-0.0)) == -1.0, "-0.0 equals 0.0 but is another program"
    assert run(x=x, s=3) == plain * 3
    assert run.messages == ""
    count = run.programs
    for _ in range(3):
        assert math.isnan(run(x=x, s=float("nan")))
    assert run.programs == count + 1, "nan is not equal to itself but is the same program"


def test_a_program_runs_as_it_was_traced_whatever_modes_are_on() -> None:
    states = [fzero.init(params(), fzero.Spec(loss=mean_square, optimizer=SGD)) for _ in range(2)]
    plain = fzero.step(states[0], batch())
    with torch.no_grad(), torch.inference_mode():
        other = fzero.step(states[1], batch())
    assert torch.equal(plain.params["w"].full(), other.params["w"].full())


def test_a_program_runs_without_the_ambient_autocast_that_it_was_traced_under(caplog: pytest.LogCaptureFixture) -> None:
    w = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])

    def loss(p: Any, b: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return ((b["x"] @ w.t() * p["w"]) ** 2).mean()

    run, x = Cached(caplog, loss), torch.tensor([[0.7, 0.11]])
    with torch.autocast("cpu", torch.bfloat16):
        assert run(x=x) == loss(params(), {"x": x}).item()


def test_a_string_selects(caplog: pytest.LogCaptureFixture) -> None:
    def loss(p: Any, b: Any) -> Tensor:
        return mean_square(p, b["x"]) if b["mode"] == "square" else (b["x"] @ p["w"]).mean()

    run, x = Cached(caplog, loss), batch()
    for _ in range(2):
        assert run(x=x, mode="square") == mean_square(params(), x)
        assert run(x=x, mode="mean") == (x @ params()["w"]).mean()
    assert run.programs == 2


def test_many_alternations_do_not_grow(caplog: pytest.LogCaptureFixture) -> None:
    run, x = Cached(caplog), batch()
    for number in range(30):
        assert run(x=x if number % 2 else x[:2], s=2 + number % 3) > 0
    assert run.programs == 6
    assert run.messages == ""


@dataclass(frozen=True)
class Config:
    scale: float


@dataclass(frozen=True)
class Rows:
    x: Tensor


class Batch:
    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_values_compared_by_content_may_be_static(caplog: pytest.LogCaptureFixture) -> None:
    def loss(p: Any, b: Any) -> Tensor:
        return mean_square(p, b["x"]).to(b["dtype"]) * b["c"].scale

    run, x = Cached(caplog, loss), batch()
    for _ in range(2):
        assert run(x=x, c=Config(2.0), dtype=torch.float64) == 2 * mean_square(params(), x)
        assert run(x=x, c=Config(3.0), dtype=torch.float32) == 3 * mean_square(params(), x)
    assert run.programs == 2


def test_objects_whose_contents_cannot_be_seen_are_refused() -> None:
    state = fzero.init(params(), fzero.Spec(loss=lambda p, b: mean_square(p, b["o"].x), optimizer=SGD))
    for value in (Batch(batch()), Rows(batch()), iter([1])):
        parts = (f"batch['o'] is a {type(value).__name__}", "Pass a dict", "optree.register_pytree_node")
        said(TreeError, lambda value=value: fzero.step(state, {"o": value}), *parts)
    for value in ({1, 2}, bytearray(b"x")):
        said(TreeError, lambda value=value: fzero.step(state, {"o": value}), f"batch['o'] is {type(value).__name__}")


def test_pytrees_of_all_kinds_are_batches(caplog: pytest.LogCaptureFixture) -> None:
    pair = namedtuple("pair", "x y")
    state = fzero.init(params(), fzero.Spec(loss=lambda p, b: mean_square(p, b["in"][0].x), optimizer=SGD))
    state = fzero.step(state, {"in": [pair(batch(), None)], "none": None, "empty": ()})
    assert state.metrics["loss"] == mean_square(params(), batch())


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda p, b: p["w"].t().view(-1).sum() * b.sum(), r"write x\.reshape\(\.\.\.\) instead of x\.view"),
        (
            lambda p, b: p["w"].sum() * torch.autograd.grad((CLOSED * b).sum(), CLOSED)[0].sum(),
            r"or closed over\)\. Take it of x\.detach\(\)\.requires_grad_\(\)",
        ),
    ],
)  # fmt: skip
def test_torchs_own_errors_come_with_what_to_write(loss: Any, says: str) -> None:
    spec = fzero.Spec(loss=loss, optimizer=fzero.optim.sgd(0.1))
    with pytest.raises(fzero.errors.CaptureError, match=f"(?i){says}"):
        fzero.lower(spec, {"w": torch.ones(2, 3)}, torch.ones(3), world_size=1)


CLOSED = torch.ones(3)
