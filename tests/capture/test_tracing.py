"""What a trace must not bake in: closed-over tensors, values that are known only when the program runs."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capturing import (
    agrees,
    captured,
    defined,
    here,
    mean_square,
    refused,
    refused_step,
)
from torch import Tensor

import fzero

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
    "one_hot": ("Say num_classes=, as a number",),
    "index": ("Instead of x[i] write",),
    "slice": ("Instead of x[i] write",),
}


@pytest.mark.sampled(8)
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


def test_a_check_of_hidden_states_as_in_transformers_detr() -> None:
    def clamped(hidden_states: Tensor) -> Tensor:
        if not torch.isfinite(hidden_states).all():  # here
            hidden_states = hidden_states.clamp(-1.0, 1.0)
        return hidden_states.sum()

    refused(
        lambda p, b: mean_square(p, b) * clamped(b), here(clamped), "from_module(module, train=False) leaves it out"
    )


def test_a_list_of_values_is_refused_with_its_line() -> None:
    def loss(p: Any, b: Tensor) -> Tensor:
        return mean_square(p, b) * b.sum().tolist()  # here

    refused(loss, here(loss), "which is known only when it runs", "x.item()")


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
