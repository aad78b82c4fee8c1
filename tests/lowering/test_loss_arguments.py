"""loss_arguments: a loss of values like parameters (SAM, an average) gathers them layer by layer, as parameters."""

from __future__ import annotations

from typing import Any

import kept
import pytest
import torch
from torch import Tensor

import fzero
from fzero import optim, tree
from fzero.ir.program import Program, wire_bytes

LAYERS, WIDTH, RANKS = 12, 48, 4
TX = optim.adamw(1e-3)


def params() -> Any:
    return {"layers": [{"w": torch.empty(WIDTH, WIDTH), "b": torch.empty(WIDTH)} for _ in range(LAYERS)]}


def loss(params: Any, x: Tensor) -> Tensor:
    for layer in params["layers"]:
        x = x + torch.tanh(x @ layer["w"] + layer["b"])
    return x.square().mean()


def sharp(state: Any, x: Tensor) -> Any:
    """A step of SAM."""
    value, grads = fzero.value_and_grad(loss)(state["params"], x)
    size = optim.global_norm(grads)
    moved = tree.map(lambda p, g: p + 0.05 * g / size, state["params"], grads)
    _, grads = fzero.value_and_grad(loss)(moved, x)
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optim.apply_updates(state["params"], updates), "opt": opt}, {"loss": value}


def averaged(state: Any, x: Tensor) -> Any:
    """A step that says the loss of the average that it makes."""
    value, grads = fzero.value_and_grad(loss)(state["params"], x)
    updates, opt = TX.update(grads, state["opt"], state["params"])
    params = optim.apply_updates(state["params"], updates)
    average = tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], params)
    return {"params": params, "opt": opt, "average": average}, {
        "loss": value, "of average": fzero.forward(loss)(average, x),
    }  # fmt: skip


def some(state: Any, x: Tensor) -> Any:
    """A step that perturbs matrices alone."""
    moved = tree.map_with_path(lambda path, p: p * 0.9 if path.endswith("/w") else p, state["params"])
    value, grads = fzero.value_and_grad(loss)(moved, x)
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optim.apply_updates(state["params"], updates), "opt": opt}, {"loss": value}


def lowered(step: Any, zero: int, **more: Any) -> tuple[fzero.Lowered, int]:
    """The program, and the bytes of the parameters with their padding."""
    state = {"params": params(), "opt": TX.init(params()), **more}
    found = kept.lower(fzero.Spec(step=step, zero=zero), state, torch.empty(2, WIDTH), RANKS)
    return found, 4 * sum(bucket.length for bucket in found.program.buckets.values())


def sent(program: Program, kind: str) -> int:
    return sum(wire_bytes(program, op) for op in program.ops if op.kind == kind)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.sampled(2)
def test_the_gradients_of_perturbed_parameters_are_reduced_as_those_of_parameters(zero: int) -> None:
    """Each rank sent all of them to each other rank, and all perturbed parameters were whole at once."""
    made, whole = lowered(sharp, zero)
    share = whole * (RANKS - 1) // RANKS
    assert sent(made.program, "all_reduce") + sent(made.program, "reduce_scatter") == (4 if zero == 0 else 2) * share
    assert sent(made.program, "all_reduce_small") < 0.02 * whole  # norms
    twice = 2 * (2 * share - 2 * share // LAYERS)  # of both losses, but two layers once
    assert sent(made.program, "all_gather") == {0: 0, 1: 2 * share, 2: 2 * share, 3: twice}[zero]
    held = (made.memory.peak - made.memory.state) / whole
    assert held < (1.0 if zero == 3 else 1.6), held


def test_an_average_that_a_loss_reads_is_gathered_layer_by_layer() -> None:
    """New leaves that wait for the loss are slices: four of them here."""
    made, whole = lowered(averaged, 3, average=params())
    assert (made.memory.peak - made.memory.state) / whole < 4 / RANKS + 0.8
    share = whole * (RANKS - 1) // RANKS
    assert sent(made.program, "all_gather") <= 3 * share
    new = [b for name, b in made.program.buffers.items() if name.endswith(".new") and b.bucket]
    assert new
    assert all(b.sharded for b in new)


def test_values_of_some_leaves_of_a_bucket_stay_as_they_are() -> None:
    made, _ = lowered(some, 3)
    assert not any(name.startswith("a") and ":layers" in name for name in made.program.buffers)


def test_values_of_two_dtypes_are_no_column_of_a_bucket() -> None:
    """Each dtype has columns of its own, and neither has a value of every leaf here."""

    def step(state: Any, x: Tensor) -> Any:
        half = tree.map_with_path(lambda path, p: p.bfloat16() if path.endswith("/b") else p * 0.9, state["params"])

        def mixed(params: Any, x: Tensor) -> Tensor:
            return loss(tree.map(Tensor.float, params), x)

        value, grads = fzero.value_and_grad(mixed)(half, x)
        grads = tree.map(Tensor.float, grads)
        updates, opt = TX.update(grads, state["opt"], state["params"])
        return {"params": optim.apply_updates(state["params"], updates), "opt": opt}, {"loss": value}

    made, _ = lowered(step, 1)
    assert not any(name.startswith("a") and ":layers" in name for name in made.program.buffers)
