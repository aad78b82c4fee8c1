"""Gradients in signs whose loss is fed back: a loop by hand in plain PyTorch, one set of bits at every stage."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from coded_cases import GRIDS, params_of, rows, start
from helpers import Run, differing, run
from torch import Tensor

import fzero
from fzero import Precision, optim, tree
from fzero.kernels.codecs import CODECS, decode, encode

SIGN = Precision(reduce="sign")


def trained(mesh: dict[str, int], steps: int = 3, **given: Any) -> Run:
    world = 1
    for n in mesh.values():
        world *= n
    made = {"loss": cases.layers_loss, "optimizer": optim.sgd(0.1, momentum=0.5), "precision": SIGN, "transfers": "p2p"}
    return run(fzero.Spec(mesh=mesh, **{**made, **given}), start(), rows, world=world, steps=steps)


def by_hand(world: int, steps: int, microbatches: int = 1) -> dict[str, Tensor]:
    """SGD with momentum; matrices' gradients in signs, whose loss each rank adds to its next ones."""
    paths, leaves, treedef = tree.flatten(start())
    leaves, momenta = [x.clone() for x in leaves], [torch.zeros_like(x) for x in leaves]
    errors = [[torch.zeros_like(x) for x in leaves] for _ in range(world)]
    for step in range(steps):
        sent: list[list[Tensor]] = []
        for rank in range(world):
            grads = [torch.zeros_like(x) for x in leaves]
            for part in rows(rank, step).chunk(microbatches):
                used = [x.clone().requires_grad_() for x in leaves]
                found = torch.autograd.grad(cases.layers_loss(tree.unflatten(treedef, used), part), used)
                grads = [g + f for g, f in zip(grads, found, strict=True)]
            own = []
            for i, g in enumerate(grads):
                if g.ndim < 2:
                    own.append(g)
                    continue
                value = g + errors[rank][i] * microbatches
                flat = value.reshape(-1)
                own.append(decode(encode(flat, CODECS["sign"]), flat.numel(), CODECS["sign"]).view(g.shape))
                errors[rank][i] = (value - own[-1]) / microbatches
            sent.append(own)
        for i in range(len(leaves)):
            total = sent[0][i]
            for own in sent[1:]:
                total = total + own[i]
            momenta[i] = total / (world * microbatches) + 0.5 * momenta[i]
            leaves[i] = leaves[i] - 0.1 * momenta[i]
    return {f"params/{path}": x for path, x in zip(paths, leaves, strict=True)}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_a_run_is_that_of_a_loop_by_hand(world: int, microbatches: int) -> None:
    one = trained({"dp": world}, zero=2, microbatches=microbatches)
    wanted = by_hand(world, 3, microbatches)
    assert params_of(one).keys() == wanted.keys()
    for path, leaf in wanted.items():
        torch.testing.assert_close(params_of(one)[path], leaf, rtol=0, atol=1e-7)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("grid", ["1", "2", "3"])
def test_stages_have_one_set_of_bits(grid: str, microbatches: int) -> None:
    first = trained(GRIDS[grid], zero=0, microbatches=microbatches)
    for zero in (1, 2, 3):
        other = trained(GRIDS[grid], zero=zero, microbatches=microbatches)
        assert differing(other.final, first.final) == [], zero
